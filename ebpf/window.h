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

/*
 * Under a row's lock: whether what the row holds is of an op that is over here, or of a job other than the one that runs
 * now. Nobody reads it then, so it may go; and codes may be written over it before it is known whether they are right. An
 * older op alone does not say so: were the packet's label or place wrong, the row might be that of an op in progress. Nor
 * does another cookie than the packet's: the host may have begun another job since the packet was admitted.
 */
static __always_inline int tb_over(const struct tb_control *control, __u32 cookie, __u32 op)
{
	return cookie != TB_READ_ONCE(control->cookie) ||
	       tb_distance(op, TB_READ_ONCE(control->released)) <= 0;
}

#endif /* TB_WINDOW_H */
