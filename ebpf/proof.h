/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a packet's last field has to be: the check, or in a program built with TB_TAGGED the tag by the job's key.
 * In the former the key is a null pointer, and nothing is left of it.
 */
#ifndef TB_PROOF_H
#define TB_PROOF_H

#include "compat.h"

#include "check.h"
#include "tag.h"

#ifdef TB_TAGGED
#define TB_WRONG TB_VERDICT_FORGED

/* What is left of a packet's proof besides its header: enough to make another header's proof. */
static __always_inline __u64 tb_proof_sum(const struct tb_header *head, const void *codes,
					  const void *end, const __u64 *key)
{
	return tb_tag_hash(head, codes, end, key);
}

static __always_inline __u64 tb_proof(__u64 sum, const struct tb_header *head, const __u64 *key)
{
	struct tb_tag_state state;

	tb_tag_open(&state, head, key);
	return tb_tag_close(&state, sum);
}

static __always_inline __u64 tb_proof_moved(__u64 sum, int i, __u64 before, __u64 now,
					    const __u64 *key)
{
	return tb_tag_moved(sum, i, before, now, key);
}
#else
#define TB_WRONG TB_VERDICT_CORRUPT

static __always_inline __u64 tb_proof_sum(const struct tb_header *head, const void *codes,
					  const void *end, const __u64 *key)
{
	(void)key;
	return tb_check(head, codes, end);
}

static __always_inline __u64 tb_proof(__u64 sum, const struct tb_header *head, const __u64 *key)
{
	(void)head;
	(void)key;
	return sum;
}

static __always_inline __u64 tb_proof_moved(__u64 sum, int i, __u64 before, __u64 now,
					    const __u64 *key)
{
	(void)key;
	return tb_check_moved(sum, i, now - before);
}
#endif

#endif /* TB_PROOF_H */
