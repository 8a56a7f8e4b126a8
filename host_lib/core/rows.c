// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Rows of an op that are here, in one pass each: contributions to the own rows, and results of all. */
#include "core.h"

#include <string.h>

/* Ops running of which less than half has come from a rank that has sent all, until it is told so. */
#define TB_SHORT_OPS 2

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
			summed[rank] += tb_has(s->ranks, rank);
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

/* What the owners say in the flags of their results that are here; the own results say flags. */
static void tb_hear_owners(const struct tb_terms *t, const struct tb_own_op *o, struct tb_tally *y)
{
	const struct tb_result *records = (const struct tb_result *)t->results;
	const __u8 *owner = (const __u8 *)o->owner;
	const __s64 *source = (const __s64 *)o->source;
	tb_set here = {}, well = {};
	__u32 row;

	for (row = 0; row < o->rows; row++) {
		const struct tb_result *r = source[row] < 0 ? 0 : &records[source[row]];

		if (!r || r->op != o->label)
			continue;
		y->flags |= r->flags;
		here |= tb_rank(owner[row]);
		if (r->flags & TB_FLAG_QUORUM)
			well |= tb_rank(owner[row]);
	}
	y->owners = tb_count(here);
	y->well = tb_count(well);
}

/* A rank that has sent all is short of an op of which less than half came before requests. */
static void tb_enter_line(struct tb_books *l, __s64 due, __s64 came, __s64 again, int through)
{
	l->ops++;
	l->expected += due;
	l->taken += came;
	*(through ? &l->gaps : &l->open) += due - came;
	if (through)
		l->short_ops = 2 * tb_least(came, due - again) < due ? l->short_ops + 1 : 0;
}

/*
 * What a half that is over came to: enters it in the ledger, and says what judges and learns need (tb_tally). came: rows, by
 * rank. abstains: this rank brings none to the op. lines: of contributions, then of results, by rank.
 */
TB_EXPORT void tb_account(const struct tb_terms *t, const struct tb_own_op *o, int results,
			  int abstains, const __s64 *came, struct tb_books *lines,
			  struct tb_tally *y)
{
	tb_set stayed = tb_set_of(o->stayed), none = tb_set_of(o->abstained), there = none | stayed;
	tb_set live = tb_set_of(t->live), gone = tb_set_of(t->gone), voters = tb_set_of(t->voters);
	const struct tb_half *h = tb_half_of(o, results);
	tb_set absent = {}, lacking = {};
	__u32 p;

	memset(y, 0, sizeof(*y));
	for (p = 0; p < t->world; p++) {
		__s64 due = results ? tb_share(o, p) : o->own;
		int through = tb_sent(t, p, o->label, results) && (results || !tb_has(stayed, p));
		struct tb_books *l = &lines[results * t->world + p];

		if (p == t->rank || tb_has(gone, p) || (results ? !due : p >= t->ranks))
			continue;
		if (came[p])
			there |= tb_rank(p);
		if (!results && tb_has(none, p))
			continue;
		tb_enter_line(l, due, came[p], h->requested ? tb_flow_of(h, p)->again : 0, through);
		y->due += due;
		y->came += came[p];
		if (!came[p])
			absent |= tb_rank(p);
		if (came[p] || (through && (results || tb_has(live, p)))) {
			y->judged += due;
			y->judged_came += came[p];
		}
		if (through && l->short_ops >= TB_SHORT_OPS && p < t->ranks)
			lacking |= tb_rank(p);
	}
	memcpy(y->absent, &absent, sizeof(absent));
	memcpy(y->lacking, &lacking, sizeof(lacking));
	if (results)
		tb_hear_owners(t, o, y);
	if (o->own_in || abstains)
		there |= tb_rank(t->rank);
	y->quorum = 2 * tb_count(voters & there) > tb_count(voters);
}
