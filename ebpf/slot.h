/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The state machine of a sum slot (kernel-16). All of it runs under the slot's lock; the record is written here only.
 *
 *   d = op - record.op   < 0: stale    = 0: add, or a duplicate    > 0 (or another job): store, if record.op is over
 *
 * Every contribution has a scale of its own (codec-9). A sum has the first one's, F doublings finer. Contributions below
 * its unit are shifted down to it. Before one for which lanes have no room, the sum is shifted down.
 */
#ifndef TB_SLOT_H
#define TB_SLOT_H

#include "compat.h"

#include "abi.h"
#include "packet.h"
#include "ranks.h"
#include "window.h"

/* The code that units count by; that of the value 0 in 8 bits. */
#define TB_CODE_ZERO 128
/*
 * Codes are shifted down by so many doublings at most, those of half a byte by half of them: what zeros leave is a whole
 * number. F is no more either.
 */
#define TB_DOWN_MOST 7
/* A contribution that lies so many doublings further down is taken in once in so many. */
#define TB_FAR_MOST 16
/* So many doublings leave nothing of a sum. */
#define TB_MOVE_MOST 16

/* How a contribution goes into its sum. */
struct tb_fit {
	__u32 move; /* by which the sum is shifted down before */
	__u32 weight; /* what its codes are multiplied by */
	__u32 add; /* what is added then, to round */
	__u32 down; /* by which they are shifted down then */
};

/* Bits by which a contribution is rounded (MurmurHash3's finaliser): others for each row, rank and op. */
static __always_inline __u32 tb_slot_bits(const struct tb_packet *p)
{
	__u32 h = (p->seq ^ p->op * 0x9e3779b1U) + p->sender * 0x7feb352dU;

	h = (h ^ h >> 16) * 0x85ebca6bU;
	h = (h ^ h >> 13) * 0xc2b2ae35U;
	return h ^ h >> 16;
}

/* F for one weight: a smaller one than others may be doubled further. */
static __always_inline __u32 tb_slot_spare(const struct tb_control *control, __u32 weight)
{
	__u32 cap = control->weight_cap;

	return (control->spare + (2 * weight <= cap) + (4 * weight <= cap)) & TB_DOWN_MOST;
}

/* STORED or ADDED: what to do; or the reason not to. place: in the window. */
static __always_inline __u32 tb_slot_judge(const struct tb_control *control,
					   const struct tb_slot *slot, __u32 sealed_op,
					   const struct tb_packet *p, __u32 place)
{
	__u32 tag = tb_tag(p->cookie, p->op, slot->cookie, slot->op);

	if (tag == TB_TAG_SAME && tb_rank_in(slot->ranks, p->sender))
		return p->flags & TB_FLAG_REPEAT ? TB_VERDICT_DUPLICATE_REPAIR
						 : TB_VERDICT_DUPLICATE;
	if (place != TB_INSIDE)
		return place == TB_BEHIND ? TB_VERDICT_STALE_OP : TB_VERDICT_FUTURE_OP;
	if (tb_distance(p->op, sealed_op) <= 0)
		return TB_VERDICT_LATE;
	if (tag == TB_TAG_NEWER)
		return TB_VERDICT_STALE_OP;
	if (tag == TB_TAG_SAME)
		return TB_VERDICT_ADDED;
	return tb_over(control, slot->cookie, slot->op) ? TB_VERDICT_STORED : TB_VERDICT_FUTURE_OP;
}

/* Begins a sum; returns what the codes are multiplied by. spare is F, in doublings. */
static __always_inline __u32 tb_slot_start(struct tb_slot *slot, const struct tb_packet *p,
					   __s32 exponent, __u32 weight, __u32 spare)
{
	slot->cookie = p->cookie;
	slot->op = p->op;
	slot->ranks[0] = 0;
	slot->ranks[1] = 0;
	slot->ranks[2] = 0;
	slot->ranks[3] = 0;
	tb_rank_put(slot->ranks, p->sender);
	slot->count = 1;
	slot->units = TB_CODE_ZERO * (weight << spare);
	slot->exponent = exponent - 4 * (__s32)spare;
	slot->row = p->row;
	slot->counted = 0;
	return weight << spare;
}

/* All ones where x is below 0. In assembly, since a compiler would make a branch of it. */
static __always_inline __s64 tb_below(__s64 x)
{
	x >>= 63;
	asm volatile("" : "+r"(x));
	return x;
}

/*
 * Adds a contribution to the record of its sum. Exponents are what packets say: whatever is shifted by them is bounded
 * here, and without a branch: the verifier would follow each through the loops over the codes.
 */
static __always_inline void tb_slot_join(struct tb_slot *slot, const struct tb_packet *p,
					 __s32 exponent, __u32 weight, __u32 spare,
					 struct tb_fit *fit)
{
	__s64 above = ((__s64)exponent - slot->exponent) >> 2, over = above - spare, down;
	__s64 most = TB_DOWN_MOST >> !!(p->flags & TB_FLAG_HALVES), far;
	__u32 bits = tb_slot_bits(p);

	over &= ~tb_below(over);
	above -= over;
	slot->exponent += 4 * (__s32)over;
	fit->move = TB_MOVE_MOST + ((over - TB_MOVE_MOST) & tb_below(over - TB_MOVE_MOST));
	down = -(above & tb_below(above));
	above &= ~tb_below(above);
	far = down - most;
	far &= ~tb_below(far);
	down -= far;
	far = TB_FAR_MOST + ((far - TB_FAR_MOST) & tb_below(far - TB_FAR_MOST));
	weight &= ~tb_below(-(__s64)(bits >> 8 & ((1U << far) - 1)));
	fit->down = down & TB_DOWN_MOST;
	fit->add = bits & ((1U << fit->down) - 1);
	fit->weight = weight << (above & TB_DOWN_MOST);

	tb_rank_put(slot->ranks, p->sender);
	slot->count++;
	slot->units = (slot->units >> fit->move) + (TB_CODE_ZERO * fit->weight >> fit->down);
}

/*
 * After a packet has come in: 1 if the row has become complete by it, which is so once for a sum, however the live set
 * changes.
 */
static __always_inline __u32 tb_slot_count(struct tb_slot *slot, const __u64 *live)
{
	__u32 complete = (slot->counted ^ 1) & tb_ranks_within(live, slot->ranks);

	slot->counted |= complete;
	return complete;
}

#endif /* TB_SLOT_H */
