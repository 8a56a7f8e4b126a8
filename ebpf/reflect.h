/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Turns a probe round in place (kernel-18), as an echo to whoever sent it, with the checksum that its family asks for
 * (ip.h). sum is that of the probe's own proof.
 *
 * The echo says how many packets of the prober came with CE. The probe's own mark does not go back with it: it would
 * count for the other direction.
 */
#ifndef TB_REFLECT_H
#define TB_REFLECT_H

#include "compat.h"

#include "proof.h"
#include "parse.h"

#ifndef TB_USER
/* Everything in front of the header; and what is made over all of the frame. */
static __always_inline void tb_frame_turn(const struct tb_frame *f)
{
	__u16 *mac = (__u16 *)f->eth, half;
	__be16 port = f->udp->source;
	int i;

#pragma unroll
	for (i = 0; i < 3; i++) {
		half = mac[i];
		mac[i] = mac[i + 3];
		mac[i + 3] = half;
	}
	tb_unmark(f->ip);
	tb_ip_turn(f->ip);
	f->udp->source = f->udp->dest;
	f->udp->dest = port;
}

static __always_inline void tb_frame_close(const struct tb_frame *f)
{
	tb_udp_checksum(f->ip, f->udp, 8 + TB_HEADER_BYTES + TB_ROW_STEP);
}
#endif

static __always_inline void tb_reflect(const struct tb_frame *f, __u32 rank, __u32 marked,
				       __u64 sum, const __u64 *key)
{
	tb_u64 *words = (tb_u64 *)f->head;
	__u64 word0 = tb_word(words, 0), word1 = tb_word(words, 1), word2 = tb_word(words, 2);

	tb_frame_turn(f);
	f->head->type = TB_TYPE_ECHO;
	f->head->owner = f->head->sender;
	f->head->sender = rank;
	f->head->seq = tb_be32(marked);
	sum = tb_proof_moved(sum, 0, word0, tb_word(words, 0), key);
	sum = tb_proof_moved(sum, 1, word1, tb_word(words, 1), key);
	sum = tb_proof_moved(sum, 2, word2, tb_word(words, 2), key);
	f->head->check = tb_be64(tb_proof(sum, f->head, key));
	tb_frame_close(f);
}

#endif /* TB_REFLECT_H */
