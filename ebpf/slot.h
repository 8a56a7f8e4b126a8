/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The state machine of a sum slot (kernel-16). All of it runs under the slot's lock; the record is written here only.
 *
 *   d = op - record.op   < 0: stale    = 0: add, or a duplicate    > 0 (or another job): store, if record.op is over
 *
 * The first contributor may have come before the host said which exponent is right, with a wrong one. Nothing could be
 * added to its sum that the host would use: the first packet with the right one stores over it, and abandons it.
 */
#ifndef TB_SLOT_H
#define TB_SLOT_H

#include "compat.h"

#include "abi.h"
#include "packet.h"
#include "ranks.h"
#include "window.h"

/* The expectation as one word, so that a host that is just writing it is never seen half-way. */
static __always_inline struct tb_expect tb_expect_of(const struct tb_expect *expect)
{
	union {
		__u64 word;
		struct tb_expect value;
	} e = { .word = TB_READ_ONCE(*(const tb_u64 *)expect) };

	return e.value;
}

/* STORED or ADDED: what to do; or the reason not to. */
static __always_inline __u32 tb_slot_judge(const struct tb_control *control,
					   const struct tb_slot *slot, __u32 sealed_op,
					   struct tb_expect expect, const struct tb_packet *p,
					   __s32 exponent)
{
	int expected = expect.valid && expect.op == p->op;
	__u32 tag;

	if (tb_distance(p->op, sealed_op) <= 0)
		return TB_VERDICT_LATE;
	tag = tb_tag(p->cookie, p->op, slot->cookie, slot->op);
	if (tag == TB_TAG_NEWER)
		return TB_VERDICT_STALE_OP;
	if (tag == TB_TAG_SAME) {
		if (expected && exponent == expect.exponent && exponent != slot->exponent)
			return TB_VERDICT_STORED;
		if (tb_rank_in(slot->ranks, p->sender))
			return p->flags & TB_FLAG_REPEAT ? TB_VERDICT_DUPLICATE_REPAIR
							 : TB_VERDICT_DUPLICATE;
		if (exponent != (expected ? expect.exponent : slot->exponent))
			return TB_VERDICT_SCALE_MISMATCH;
		return TB_VERDICT_ADDED;
	}
	if (expected && exponent != expect.exponent)
		return TB_VERDICT_SCALE_MISMATCH;
	return tb_over(control, slot->cookie, slot->op) ? TB_VERDICT_STORED : TB_VERDICT_FUTURE_OP;
}

/*
 * Asked before a store: 0 if the slot holds a sum of the same job and op. Anything else means no; it is not made a truth
 * value, since that takes a branch, and the verifier would follow all that comes behind it twice.
 */
static __always_inline __u32 tb_slot_apart(const struct tb_slot *slot, const struct tb_packet *p)
{
	return (slot->cookie ^ p->cookie) | (slot->op ^ p->op);
}

static __always_inline void tb_slot_start(struct tb_slot *slot, const struct tb_packet *p,
					  __s32 exponent, __s32 need, __u32 shift)
{
	slot->cookie = p->cookie;
	slot->op = p->op;
	slot->ranks[0] = 0;
	slot->ranks[1] = 0;
	slot->ranks[2] = 0;
	slot->ranks[3] = 0;
	tb_rank_put(slot->ranks, p->sender);
	slot->count = 1;
	slot->units = 1U << (shift & 31);
	slot->need = need;
	slot->exponent = exponent;
	slot->row = p->row;
	slot->counted = 0;
}

static __always_inline void tb_slot_join(struct tb_slot *slot, const struct tb_packet *p,
					 __s32 need, __u32 shift)
{
	tb_rank_put(slot->ranks, p->sender);
	slot->count++;
	slot->units += 1U << (shift & 31);
	if (need > slot->need)
		slot->need = need;
}

/*
 * After a packet has come in: 1 if the row has become complete by it, which is so once for a sum, however the live set
 * changes. Only so can it be told when the sum is stored over whether it had been counted.
 */
static __always_inline __u32 tb_slot_count(struct tb_slot *slot, const __u64 *live)
{
	__u32 complete = (slot->counted ^ 1) & tb_ranks_within(live, slot->ranks);

	slot->counted |= complete;
	return complete;
}

#endif /* TB_SLOT_H */
