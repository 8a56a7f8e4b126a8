// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Rows of an op that are here, in one pass each: contributions to the own rows, and results of all. */
#include "core.h"

#include <string.h>

/* How many of the own rows hold a contribution, by rank. */
TB_EXPORT void tb_summed(const struct tb_terms *t, const struct tb_own_op *o, __s64 *summed)
{
	const struct tb_slot *slots = (const struct tb_slot *)t->slots, *s;
	__u32 i, rank;

	memset(summed, 0, t->ranks * sizeof(*summed));
	for (i = 0; i < o->own; i++) {
		s = &slots[(o->sum_seq + i) & t->sum_mask];
		if (s->cookie != t->cookie || s->op != o->label)
			continue;
		for (rank = 0; rank < t->ranks; rank++)
			summed[rank] += tb_in(s->ranks, rank);
	}
}

/* Notes where results of others lie, read once; how many there are, and by owner. */
TB_EXPORT __u32 tb_gather(const struct tb_terms *t, const struct tb_own_op *o, __s64 *by_owner)
{
	const struct tb_presence *presence = (const struct tb_presence *)t->presence;
	const __u8 *owner = (const __u8 *)o->owner;
	__s64 *source = (__s64 *)o->source;
	__u32 row, at, here, found = 0;

	memset(by_owner, 0, t->world * sizeof(*by_owner));
	for (row = 0; row < o->rows; row++) {
		if (owner[row] == t->rank)
			continue;
		at = (o->result_seq + row) & t->result_mask;
		here = presence[at].op == o->label && presence[at].cookie == t->cookie;
		source[row] = here ? (__s64)at : -1;
		by_owner[owner[row]] += here;
		found += here;
	}
	return found;
}

/* Own rows lie among the own results, or nowhere where no rank contributed. */
TB_EXPORT void tb_point_own(const struct tb_terms *t, const struct tb_own_op *o)
{
	const __s32 *rows = tb_listed(o, t->rank);
	const float *made = (const float *)o->own_scale;
	float *scale = (float *)o->row_scale;
	__s64 *source = (__s64 *)o->source;
	__u32 i;

	for (i = 0; i < o->own; i++) {
		source[rows[i]] = ((const __u8 *)o->usable)[i] ? -2 - (__s64)i : -1;
		scale[rows[i]] = made[i];
	}
}

/*
 * Reads the records of results that were found here: scales, and of a switch contributors and next exponents, too. A row
 * whose record is another op's by now was overwritten before use, and is here no more. form: of a switch, TB_FLAG_SWITCHED
 * or TB_FLAG_SUMS, which all rows must have; 0: of ranks, none of them. Returns how many are here no more.
 */
TB_EXPORT __u32 tb_read(const struct tb_terms *t, const struct tb_own_op *o, __u32 form)
{
	const struct tb_result *records = (const struct tb_result *)t->results, *r;
	__s16 *exponent = (__s16 *)o->row_exponent;
	__u16 *count = (__u16 *)o->row_count;
	__s64 *source = (__s64 *)o->source;
	__u32 row, lost = 0;

	for (row = 0; row < o->rows; row++) {
		if (source[row] < -1)
			continue;
		if (form) {
			count[row] = 0;
			exponent[row] = TB_EXPONENT_NONE;
		}
		if (source[row] < 0)
			continue;
		r = &records[source[row]];
		if (r->op != o->label || !r->count || r->count > t->ranks ||
		    (r->flags & (TB_FLAG_SWITCHED | TB_FLAG_SUMS)) != form) {
			source[row] = -1;
			lost++;
			continue;
		}
		memcpy((float *)o->row_scale + row, &r->scale, sizeof(r->scale));
		if (form) {
			count[row] = r->count;
			exponent[row] = r->exponent;
		}
	}
	return lost;
}

/* Header flags of the results that are here, by owner; -1: there are none. */
TB_EXPORT void tb_flags(const struct tb_terms *t, const struct tb_own_op *o, __s64 *flags)
{
	const struct tb_result *records = (const struct tb_result *)t->results;
	const __u8 *owner = (const __u8 *)o->owner;
	const __s64 *source = (const __s64 *)o->source;
	__u32 row;

	memset(flags, 0xff, t->world * sizeof(*flags));
	for (row = 0; row < o->rows; row++)
		if (source[row] >= 0 && records[source[row]].op == o->label) {
			if (flags[owner[row]] < 0)
				flags[owner[row]] = 0;
			flags[owner[row]] |= records[source[row]].flags;
		}
}
