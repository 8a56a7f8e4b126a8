// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* How long halves of ops may last, as this rank has learned and the others advertise (clock-6, clock-11, clock-26). */
#include "core.h"

/* Ranks that have not been heard for more steps do not count. */
#define TB_HEARD_WITHIN 2

/* D1 that this rank advertises, and those of ranks that were heard in the last steps, rising; how many. */
static __u32 tb_advertised(const struct tb_terms *t, const struct tb_own_op *o, tb_set ranks,
			   __s64 *values)
{
	__u32 oldest = ((o->label >> TB_OP_INDEX_BITS) - TB_HEARD_WITHIN) << TB_OP_INDEX_BITS;
	__u32 count = 0, p, i;

	if (t->advertised)
		values[count++] = t->advertised;
	for (p = 0; p < t->ranks; p++) {
		const struct tb_peer_state *s = &((const struct tb_peer_state *)t->states)[p];
		__s64 value = TB_READ_ONCE(s->deadline) * (TB_TIME_UNIT_US * 1000LL);

		if (!tb_has(ranks, p) || s->cookie != t->cookie || !value ||
		    tb_distance(TB_READ_ONCE(s->newest), oldest) < 0)
			continue;
		for (i = count++; i && values[i - 1] > value; i--)
			values[i] = values[i - 1];
		values[i] = value;
	}
	if (!count)
		values[count++] = t->stage_max;
	return count;
}

/*
 * Ranks advertise D1 of their largest ops; a smaller one takes off what its transfer is shorter by here. A rank without
 * rows of such ops has nothing of its own to go by.
 */
static __s64 tb_fitted(const struct tb_terms *t, const struct tb_own_op *o, __s64 advertised)
{
	if (o->stage_one && !o->known)
		return o->stage_one;
	if (o->stage_one)
		advertised += tb_least(0, o->stage_one - t->advertised);
	return tb_least(tb_most(t->floor, advertised), t->stage_max);
}

/* The longest D1 of an op among ranks whose contributions are waited for, or whose results, the own one included. */
TB_EXPORT __s64 tb_longest(const struct tb_terms *t, const struct tb_own_op *o, int results)
{
	__s64 values[TB_MAX_RANKS + 1], longest;

	longest = values[tb_advertised(t, o, tb_set_of(results ? t->owners : t->live), values) - 1];
	return t->deadline_1 ? tb_least(longest, t->stage_max) : tb_fitted(t, o, longest);
}

TB_EXPORT __s64 tb_lasts(const struct tb_terms *t, const struct tb_own_op *o, int results)
{
	__s64 values[TB_MAX_RANKS + 1], longest;

	if (o->cold) /* until scales are agreed on */
		return (1 + results) * t->stage_max;
	if (results) { /* owners' deadlines lie inside, once moved on as one dead rank makes them (clock-7c) */
		longest = tb_longest(t, o, 1);
		return tb_least(longest + tb_most(t->floor, longest / 10) + o->usual,
				2 * t->stage_max);
	}
	if (t->deadline_1)
		return t->deadline_1;
	return tb_fitted(t, o, values[(tb_advertised(t, o, tb_set_of(t->live), values) - 1) / 2]);
}
