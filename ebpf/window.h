/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Serial numbers against a ring that only the host moves. */
#ifndef TB_WINDOW_H
#define TB_WINDOW_H

#include "compat.h"

#include "abi.h"

#define TB_INSIDE 0
#define TB_BEHIND 1
#define TB_AHEAD 2

static __always_inline __u32 tb_window(__u32 seq, __u32 base, __u32 ring)
{
	__s32 d = tb_distance(seq, base);

	if (d < 0)
		return TB_BEHIND;
	return (__u32)d >= ring ? TB_AHEAD : TB_INSIDE;
}

/* Position of an op's record: OP_STEPS steps of OP_PER_STEP ops. */
static __always_inline __u32 tb_op_slot(__u32 op)
{
	return (op >> TB_OP_INDEX_BITS) % TB_OP_STEPS * TB_OP_PER_STEP +
	       (op & ((1 << TB_OP_INDEX_BITS) - 1)) % TB_OP_PER_STEP;
}

/* Whose record it is: this op's, an older one's (or another job's) to be started anew, or a newer one's. */
#define TB_TAG_SAME 0
#define TB_TAG_OLD 1
#define TB_TAG_NEWER 2

static __always_inline __u32 tb_tag(__u32 cookie, __u32 op, __u32 record_cookie, __u32 record_op)
{
	if (record_cookie != cookie)
		return TB_TAG_OLD;
	if (record_op == op)
		return TB_TAG_SAME;
	return tb_distance(record_op, op) > 0 ? TB_TAG_NEWER : TB_TAG_OLD;
}

#endif /* TB_WINDOW_H */
