// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * When the halves of ops begin and end (clock-1, clock-3, clock-7 to clock-13).
 *
 * A turn is tb_begin_turn, then tb_next_op until it says TB_FOUND_NOTHING: what it says Python does, or answers. No clock is
 * read here: time passes between calls.
 */
#include "core.h"

#include <string.h>

/* How many times as long as an answer a silence may last: what is rare is seen too late. */
#define TB_MARGIN 2
/* An answer that has not come for so long counts as lost at most; a rank that waits for one looks as often at least. */
#define TB_ANSWER_MOST 50000000LL
#define TB_LOOK 1000000LL

/* An op as it is seen now. */
struct tb_sight {
	const struct tb_op *record; /* 0 while no packet has named it */
	tb_set contributed, published; /* ranks that have sent all of these, as their marks say */
	tb_set awaited[2]; /* ranks that a half waits for, and that have not sent all of it */
	tb_set gives; /* owners that have published, and answer: who left does for a while (clock-15) */
};

/* A half as it is seen now. */
struct tb_seen {
	__s64 progress; /* changes with every row that is taken */
	__s64 left; /* by how much it will rise until all rows of all that are waited for are in */
	__s64 launched; /* the own launch, if it matters */
	int finished; /* all that are waited for have sent everything */
};

static int tb_encoded(const struct tb_own_op *o)
{
	return o->sending == TB_SENDING_OVER;
}

const struct tb_op *tb_record(const struct tb_terms *t, const struct tb_own_op *o)
{
	const struct tb_op *record = &((const struct tb_op *)t->ops)[o->slot];

	return record->op == o->label && record->cookie == t->cookie ? record : 0;
}

static struct tb_sight tb_see(const struct tb_terms *t, const struct tb_own_op *o)
{
	tb_set owners = tb_set_of(t->owners), hold = {};
	struct tb_sight see = { .record = tb_record(t, o) };
	__u32 p;

	for (p = 0; p < t->world; p++) {
		tb_set one = tb_rank(p);

		if (p != t->rank && tb_share(o, p))
			hold |= one;
		if (tb_sent(t, p, o->label, 0))
			see.contributed |= one;
		if (tb_sent(t, p, o->label, 1))
			see.published |= one;
	}
	see.awaited[0] = tb_set_of(t->live) & ~tb_set_of(o->abstained) & ~see.contributed;
	see.awaited[1] = owners & hold & ~see.published;
	see.gives = (owners | tb_set_of(t->gone)) & hold & see.published;
	return see;
}

static int tb_foreseen_wrongly(const struct tb_own_op *o, const struct tb_sight *see)
{
	return see->record && see->record->layout != o->layout;
}

/* -- what may be waited past deadlines (clock-29) ------------------------------------------------------------------ */

/* What may be waited past deadlines. */
TB_EXPORT __s64 tb_saved(const struct tb_overtime *v, __s64 now)
{
	double saved = v->saved + v->share * tb_most(0, now - v->at);

	return saved < v->most ? (__s64)saved : v->most;
}

/* How long a rank that is missed at a deadline may well say nothing. */
TB_EXPORT __s64 tb_patience(const struct tb_overtime *v, const struct tb_half *h)
{
	__s64 told = tb_least(v->longest, TB_MARGIN * tb_most(v->answer, v->lack));

	return tb_most(tb_most(v->floor, h->lasts / 2), told);
}

/* Whether to wait one step past a deadline; heard: when rows came last, or anything of a rank that is missed. */
TB_EXPORT int tb_worth(const struct tb_overtime *v, const struct tb_half *h, __s64 now, __s64 heard,
		       __s64 reserve)
{
	return heard && now - heard <= tb_patience(v, h) &&
	       tb_saved(v, now) >= now - h->promised + h->tenth + reserve;
}

/* Takes off what a half has waited past its deadline. Time is paid for once, however many ops wait in it. */
TB_EXPORT void tb_charge(struct tb_overtime *v, const struct tb_half *h, __s64 now)
{
	__s64 cost;
	double saved;

	now = h->over ? h->over : now;
	if (!h->promised || now <= h->promised)
		return;
	cost = tb_most(0, now - tb_most(h->promised, v->until));
	saved = tb_saved(v, now) - (double)cost;
	v->saved = saved > 0 ? saved : 0;
	v->at = tb_most(now, v->at);
	v->until = tb_most(v->until, now);
	v->waited += cost;
}

/* The own thread woke up so late: it waited for a core, if it was not stopped. */
TB_EXPORT void tb_woke(struct tb_overtime *v, __s64 late)
{
	if (late <= v->longest)
		v->latest = tb_most(v->latest, late);
}

/* -- a deadline, which moves on by a tenth if that will do (clock-7c) ---------------------------------------------- */

TB_EXPORT void tb_start_half(struct tb_half *h, __s64 start, __s64 lasts, __s64 most, __s64 floor)
{
	h->lasts = lasts;
	h->deadline = h->promised = start + h->lasts;
	h->limit = tb_most(h->deadline, start + most);
	h->tenth = tb_most(floor, h->lasts / 10);
}

static void tb_stop_half(struct tb_half *h)
{
	h->deadline = h->promised = h->lasts = h->limit = h->over = h->tenth = h->progress = 0;
}

/* The start of the last tenth, then the deadline itself. */
static __s64 tb_half_due(const struct tb_half *h, __s64 now)
{
	__s64 early = h->deadline - h->tenth;

	return h->deadline && now < early ? early : h->deadline;
}

/*
 * Since when all of these ranks leave a question open; now: one of them was not asked since it was heard of, since a rank
 * that computes says nothing while it does; 0: none was ever heard of.
 */
TB_EXPORT __s64 tb_silence(const struct tb_terms *t, const __u64 *ranks, __s64 now)
{
	const __s64 *asked = (const __s64 *)t->asked;
	__s64 found = 0, heard;
	__u32 p;

	for (p = 0; p < t->ranks; p++) {
		heard = tb_heard(t, p);
		if (tb_has(ranks, p) && heard)
			found = tb_most(found, tb_most(heard, asked[p] ? asked[p] : now));
	}
	return found;
}

static int tb_worth_waiting(const struct tb_terms *t, const struct tb_half *h,
			    const tb_set *awaited, int rows, __s64 now)
{
	const struct tb_overtime *v = (const struct tb_overtime *)t->overtime;

	return tb_worth(v, h, now, rows ? now : tb_silence(t, (const __u64 *)awaited, now), 0) ||
	       (h->open && tb_worth(v, h, now, now, v->reserve));
}

/*
 * Whether a deadline has passed, moving it on if rows rose by what is left since the last look, or if it is worth it. late:
 * the launch came after it, so that there was no look in the last tenth; else this thread was busy, and rows may be on
 * their way.
 */
static int tb_expired(const struct tb_terms *t, struct tb_half *h, const tb_set *awaited,
		      const struct tb_seen *s, int late, __s64 now)
{
	__s64 before = h->progress - 1;
	int moved;

	if (!h->deadline || now < h->deadline) {
		if (h->deadline && now >= h->deadline - h->tenth && before < 0)
			h->progress = s->progress + 1;
		return 0;
	}
	moved = before >= 0 ? tb_most(1, s->left) <= s->progress - before : !late;
	if (!moved && awaited)
		moved = tb_worth_waiting(t, h, awaited, before >= 0 && before < s->progress, now);
	h->progress = s->progress + 1;
	if (!moved)
		return 1;
	h->deadline = tb_least(now + h->tenth, h->limit);
	return now >= h->limit;
}

/* -- whether a half is over ---------------------------------------------------------------------------------------- */

/* Whether no rank brought rows, as all say: a loss scale overflows on all ranks, say. */
int tb_nobody_had_any(const struct tb_terms *t, const struct tb_own_op *o)
{
	tb_set live = tb_set_of(t->live), voters = tb_set_of(t->voters),
	       said = tb_set_of(o->abstained);

	return o->empty && tb_count(live) && !tb_count(live & ~said) &&
	       tb_count(voters & (said | tb_rank(t->rank))) > tb_count(voters) / 2;
}

/*
 * Whether results are repaired: not those of an op that left no trace here, since the others are far ahead. Nor those of
 * an op to which all say that they bring nothing.
 */
static int tb_repairable(const struct tb_terms *t, const struct tb_own_op *o,
			 const struct tb_sight *see)
{
	return !(o->overtaken && !see->record) && !tb_nobody_had_any(t, o);
}

/* Why a half is over that still insists, past its deadline, on rows that can be had (clock-35); else notes until when. */
static int tb_insist(const struct tb_terms *t, struct tb_own_op *o, const struct tb_half *h,
		     const struct tb_sight *see, int late, __s64 now)
{
	__s64 until = 0;

	if (o->switched)
		until = late ? o->admitted + TB_ANSWER_MOST : 0;
	else if (h == tb_half_of(o, 1) && h->flows)
		until = h->open ? h->over + t->insist : 0;
	else if (h == tb_half_of(o, 1) && late && tb_count(see->gives) && tb_repairable(t, o, see))
		until = h->over + 1;
	if (now >= until)
		return TB_WHY_DEADLINE;
	o->due = tb_earlier(o->due, until);
	return TB_WHY_NOTHING;
}

/* Whether nothing came for q since everybody had finished (clock-7b, clock-12). */
static int tb_quiet(const struct tb_terms *t, struct tb_half *h, const struct tb_seen *s, __s64 now)
{
	if (!s->finished || s->progress != h->quiet_at || !h->quiet) {
		h->quiet = s->finished ? now : 0;
		h->quiet_at = s->progress;
		return 0;
	}
	return now - h->quiet >= t->silence;
}

/* Why a half is over that is not complete; else notes when to look again. */
static int tb_wait_for(const struct tb_terms *t, struct tb_own_op *o, struct tb_half *h,
		       const struct tb_sight *see, struct tb_seen *s, __s64 now)
{
	int late = h->deadline > 0 && h->deadline < s->launched;
	/* what a box is late by says nothing about processors */
	const tb_set *awaited = o->switched ? 0 : &see->awaited[h == tb_half_of(o, 1)];

	s->finished = s->finished && !h->open;
	if (h->over)
		return tb_insist(t, o, h, see, late, now);
	if (tb_quiet(t, h, s, now))
		return TB_WHY_QUIET;
	if (late) /* what such a launch waits for others counts from itself (clock-13) */
		h->promised = tb_most(h->promised, s->launched);
	if (tb_expired(t, h, awaited, s, late, now)) {
		h->over = now;
		return tb_insist(t, o, h, see, late, now);
	}
	if (h->quiet)
		o->due = tb_earlier(o->due, h->quiet + t->silence);
	o->due = tb_earlier(o->due, tb_half_due(h, now));
	return TB_WHY_NOTHING;
}

/*
 * Whether the count of complete rows can be believed. A row counts once: it may have become complete without a rank that
 * became live in the middle of the op.
 */
static int tb_really(const struct tb_terms *t, const struct tb_own_op *o, const struct tb_op *r)
{
	__u32 i;

	if ((__s64)r->opened_ns > t->live_since)
		return 1;
	for (i = 0; i < o->own; i++) {
		const struct tb_slot *s =
			&((const struct tb_slot *)t->slots)[(o->sum_seq + i) & t->sum_mask];

		if (s->cookie != t->cookie || s->op != o->label ||
		    tb_count(tb_set_of(t->live) & ~tb_set_of(s->ranks)))
			return 0;
	}
	return 1;
}

/* Whether all own rows hold a contribution of every rank that is waited for. */
static int tb_rows_in(const struct tb_terms *t, const struct tb_own_op *o, const struct tb_op *r)
{
	return r && r->rows_complete >= (__s32)o->own && tb_really(t, o, r);
}

/* Whether nothing is to come any more for the own rows of an open half. */
int tb_all_in(const struct tb_terms *t, const struct tb_own_op *o)
{
	struct tb_sight see = tb_see(t, o);

	return !tb_half_of(o, 0)->phase && o->own && (tb_encoded(o) || t->self_late) &&
	       !tb_foreseen_wrongly(o, &see) && tb_rows_in(t, o, see.record);
}

/* Whether all results are here of an op that waits for nothing else. */
int tb_results_in(const struct tb_terms *t, const struct tb_own_op *o)
{
	const struct tb_op *r = tb_record(t, o);

	return !tb_half_of(o, 1)->phase && tb_encoded(o) && r && r->layout == o->layout &&
	       __atomic_load_n(&r->results_in, __ATOMIC_ACQUIRE) >=
		       o->rows - (o->switched ? 0 : o->own);
}

/* What an owner waits for (clock-7 to clock-9). */
static int tb_contributions(const struct tb_terms *t, struct tb_own_op *o,
			    const struct tb_sight *see, __s64 now)
{
	const struct tb_op *r = see->record;
	int own_in = tb_encoded(o) || t->self_late;
	struct tb_seen s = { .progress = r ? r->progress : 0 };

	if (t->ranks == 1 ? tb_encoded(o) : own_in && tb_rows_in(t, o, r))
		return TB_WHY_COMPLETE;
	s.finished = own_in && !tb_count(see->awaited[0]);
	s.left = (__s64)o->own * tb_count(tb_set_of(t->live) & ~tb_set_of(o->abstained)) -
		 s.progress;
	return tb_wait_for(t, o, tb_half_of(o, 0), see, &s, now);
}

/* Results that are here, of these ranks. */
static __s64 tb_present(const struct tb_terms *t, const struct tb_own_op *o, tb_set owners)
{
	const struct tb_presence *presence = (const struct tb_presence *)t->presence;
	__s64 found = 0;
	__u32 i;

	for (i = 0; i < o->rows; i++) {
		const struct tb_presence *p = &presence[(o->result_seq + i) & t->result_mask];

		found += p->op == o->label && p->cookie == t->cookie &&
			 tb_has(owners, ((const __u8 *)o->owner)[i]);
	}
	return found;
}

/* Those of others: rows that came when their op was too far ahead for a record, or whose record has gone, are there. */
static __s64 tb_came(const struct tb_terms *t, const struct tb_own_op *o,
		     const struct tb_sight *see)
{
	return see->record ? see->record->results_in : tb_present(t, o, ~tb_rank(t->rank));
}

/* Rows that live owners have, but those of this rank. */
static __s64 tb_owned(const struct tb_terms *t, const struct tb_own_op *o)
{
	__s64 rows = 0;
	__u32 p;

	for (p = 0; p < t->ranks; p++)
		rows += tb_has(t->owners, p) ? tb_share(o, p) : 0;
	return rows;
}

/* Whether a rank that has said goodbye, and is not waited for, may still answer for its results (clock-15). */
static int tb_owed(const struct tb_terms *t, const struct tb_own_op *o, const struct tb_sight *see)
{
	tb_set gone = see->gives & tb_set_of(t->gone);
	__u32 p;

	for (p = 0; p < t->ranks; p++)
		if (tb_has(gone, p) && !tb_flow_over(tb_half_of(o, 1), p))
			return tb_repairable(t, o, see);
	return 0;
}

/* What a receiver waits for (clock-11 to clock-13). */
static int tb_results(const struct tb_terms *t, struct tb_own_op *o, const struct tb_sight *see,
		      __s64 now)
{
	tb_set owners = tb_set_of(t->owners);
	struct tb_seen s = { .launched = o->admitted };

	s.progress = tb_came(t, o, see);
	if (s.progress >= o->rows - (o->switched ? 0 : o->own))
		return TB_WHY_COMPLETE;
	if (o->switched) { /* a row that is missing can be asked for until the deadline */
		s.left = o->rows - s.progress;
		return tb_wait_for(t, o, tb_half_of(o, 1), see, &s, now);
	}
	s.finished = !tb_count(see->awaited[1]);
	s.left = tb_owned(t, o) - s.progress;
	if (s.left <= 0 && tb_count(owners) < t->ranks - 1 && !tb_owed(t, o, see) &&
	    tb_present(t, o, owners) >= tb_owned(t, o))
		return TB_WHY_COMPLETE;
	return tb_wait_for(t, o, tb_half_of(o, 1), see, &s, now);
}

/* Notes from when on a switch is to release rows: its deadline has passed. Without own rows nothing can be asked for. */
static void tb_release_late(const struct tb_terms *t, struct tb_own_op *o,
			    const struct tb_sight *see, __s64 now)
{
	struct tb_half *first = tb_half_of(o, 0), *second = tb_half_of(o, 1);
	struct tb_seen s = { .progress = tb_came(t, o, see) };

	s.left = o->rows - s.progress;
	if (!o->own_in || s.left <= 0 || second->release)
		return;
	second->release = (second->deadline > 0 && second->deadline < o->admitted) ||
			  tb_expired(t, first, 0, &s, 1, now);
	if (second->release)
		o->listen = 0;
	else
		o->due = tb_earlier(o->due, tb_half_due(first, now));
}

/* -- clocks -------------------------------------------------------------------------------------------------------- */

/*
 * Looks whether a majority has shown up (clock-1, clock-3), and notes when; once started, a clock stands. Returns when it
 * starts at the latest; 0: it has, or only others can start it.
 */
TB_EXPORT __s64 tb_start_clock(const struct tb_terms *t, struct tb_own_op *o, __s64 now)
{
	const struct tb_op *r = tb_record(t, o);
	__s64 fewer = r ? r->majority_ns[0] : 0, start = r ? r->majority_ns[1] : 0;

	if (o->start) {
		o->start = tb_most(o->start, o->held);
		return 0;
	}
	if (o->sending) {
		start = tb_earlier(start, o->admitted + t->start_max);
		if (((const struct tb_control *)t->control)->need <=
		    1) /* the own launch is a majority */
			start = tb_earlier(start, o->admitted);
		else if (fewer)
			start = tb_earlier(start, tb_most(fewer, o->admitted));
	}
	if (start && start <= now) {
		o->start = tb_most(start, o->held);
		return 0;
	}
	return tb_half_of(o, 1)->phase ? 0 : start;
}

/* While a live rank holds, no clock runs; all start anew from the end of the hold (clock-16). */
TB_EXPORT void tb_stand_still(struct tb_own_op *o, __s64 now)
{
	int sealed = tb_half_of(o, 0)->phase != TB_PHASE_OPEN;

	o->held = now;
	if (!sealed)
		o->start = 0;
	if (!sealed || o->switched)
		tb_stop_half(tb_half_of(o, 0));
	if (sealed)
		tb_stop_half(tb_half_of(o, 1));
}

/* Notes that all others were through with an op before this rank sent rows: no more comes (clock-13, clock-20). */
static void tb_overtaken(const struct tb_terms *t, struct tb_own_op *o, const struct tb_sight *see,
			 __s64 now)
{
	tb_set through = see->gives & tb_set_of(t->owners);

	if (o->overtaken || !o->sending || tb_encoded(o) || !tb_count(through) ||
	    tb_count(see->awaited[1] | (through & ~see->contributed)))
		return;
	o->start = o->start ? o->start : tb_most(1, now - 4 * t->stage_max);
	o->overtaken = 1;
}

/* Starts the deadline of a half with its clock: by then the ops before have taught what they can. */
static void tb_starts(const struct tb_terms *t, const struct tb_own_op *o, int results)
{
	struct tb_half *h = tb_half_of(o, results);

	if (o->start && !h->deadline)
		tb_start_half(h, o->start, tb_lasts(t, o, results), (1 + results) * t->stage_max,
			      t->floor);
}

/* -- a turn -------------------------------------------------------------------------------------------------------- */

/* Whether ranks have said since the last look that they have sent all of it. */
static int tb_rose(struct tb_own_op *o, const struct tb_sight *see)
{
	tb_set *marks = (tb_set *)o->marks;
	int rose = tb_count((marks[0] ^ see->contributed) | (marks[1] ^ see->published)) > 0;

	marks[0] = see->contributed;
	marks[1] = see->published;
	return rose;
}

/* Flows of which a mark has risen are to be looked at now. */
void tb_hear(struct tb_terms *t)
{
	struct tb_own_op *o = (struct tb_own_op *)t->first;
	struct tb_sight see;

	for (; o; o = (struct tb_own_op *)o->after) {
		see = tb_see(t, o);
		if (tb_rose(o, &see))
			o->listen = t->listen = 1;
	}
}

/* The next thing to be done for an op at a look; asked: what Python has said. */
static int tb_look(const struct tb_terms *t, struct tb_own_op *o, __s64 now)
{
	struct tb_half *first = tb_half_of(o, 0), *second = tb_half_of(o, 1);
	struct tb_sight see = tb_see(t, o);

	if (!o->asked) {
		if (tb_rose(o, &see) || o->stirred || t->everything)
			o->listen = 0;
		o->due = t->holds ? 0 : tb_start_clock(t, o, now);
		if (!t->holds)
			tb_overtaken(t, o, &see, now);
		o->asked = 1;
	}
	if (o->asked == 1) {
		o->asked = 2;
		if (o->sending && !second->phase && tb_foreseen_wrongly(o, &see) &&
		    !o->mismatched) {
			o->mismatched = 1;
			return TB_FOUND_MISMATCH;
		}
		if (o->sending && !tb_encoded(o))
			return TB_FOUND_SEND;
	}
	if (o->unnoted &&
	    !(t->alone && o->queued)) /* else it is to be learned from, which can wait */
		return TB_FOUND_SEAL;
	if (!first->phase && !o->own)
		first->phase = TB_PHASE_DONE;
	/* before the launch nothing can be said of an op that was foreseen wrongly */
	if (!first->phase && (o->sending || !tb_foreseen_wrongly(o, &see))) {
		tb_starts(t, o, 0);
		first->why = tb_contributions(t, o, &see, now);
		if (first->why) {
			tb_learn_last(first, now);
			return TB_FOUND_SEAL;
		}
	}
	if (!first->phase || second->phase || !tb_encoded(o))
		return TB_FOUND_NOTHING;
	tb_starts(t, o, 1);
	if (o->switched) {
		tb_starts(t, o, 0);
		tb_release_late(t, o, &see, now);
	}
	second->why = tb_results(t, o, &see, now);
	if (!second->why)
		return TB_FOUND_NOTHING;
	tb_learn_last(second, now);
	return TB_FOUND_FINISH;
}

/* The next thing to be done for one op, whose label is noted. */
TB_EXPORT int tb_move(struct tb_terms *t, struct tb_own_op *o, __s64 now)
{
	int found = tb_look(t, o, now);

	t->label = o->label;
	return found;
}

TB_EXPORT void tb_begin_turn(struct tb_terms *t, int everything, int holds)
{
	tb_take_handed(t);
	t->at = t->first;
	t->entered = 0;
	t->everything = everything;
	t->holds = holds;
	t->alone = 0;
	t->due = 0;
}

/* The next op of a turn for which something is to be done: label, and what. Another call goes on with the same op. */
TB_EXPORT int tb_next_op(struct tb_terms *t, __s64 now)
{
	struct tb_own_op *o;
	int found;

	for (o = (struct tb_own_op *)t->at; o; o = (struct tb_own_op *)(t->at = o->after)) {
		if (!t->entered)
			o->asked = 0;
		t->entered = 1;
		found = tb_move(t, o, now);
		if (found) {
			o->listen = 0;
			return found;
		}
		o->stirred = 0;
		t->due = tb_earlier(t->due, o->due);
		t->entered = 0;
	}
	return TB_FOUND_NOTHING;
}

/* The newest op that a live rank has named, or this one if none is newer. */
TB_EXPORT __u32 tb_newest(const struct tb_terms *t, __u32 newest)
{
	const struct tb_peer_state *s = (const struct tb_peer_state *)t->states;
	__u32 p;

	for (p = 0; p < t->ranks; p++)
		if (tb_has(t->live, p) && s[p].cookie == t->cookie &&
		    tb_distance(s[p].newest, newest) > 0)
			newest = s[p].newest;
	return newest;
}

/* Whether something has changed of an op since it was looked at: all of its rows have left, say. */
TB_EXPORT int tb_stirred(const struct tb_terms *t)
{
	const struct tb_own_op *o = (const struct tb_own_op *)t->first;

	for (; o; o = (const struct tb_own_op *)o->after)
		if (o->stirred)
			return 1;
	return 0;
}

/* An op is in flight from now on, behind those that were handed over before; its halves are empty. */
TB_EXPORT void tb_enter(struct tb_terms *t, struct tb_own_op *o)
{
	__u64 *at = &t->first;

	tb_take_handed(t);
	while (*at)
		at = &((struct tb_own_op *)*at)->after;
	*at = (__u64)o;
	o->stirred = 1;
}

/* It is no more. */
TB_EXPORT void tb_leave(struct tb_terms *t, struct tb_own_op *o)
{
	__u64 *at = &t->first;

	tb_take_handed(t);
	while (*at && *at != (__u64)o)
		at = &((struct tb_own_op *)*at)->after;
	if (*at)
		*at = o->after;
	tb_free_flows(tb_half_of(o, 0));
	tb_free_flows(tb_half_of(o, 1));
}

/* -- lost rows (clock-23, clock-30) -------------------------------------------------------------------------------- */

static void tb_open_half(const struct tb_terms *t, const struct tb_own_op *o, int results)
{
	struct tb_half *h = tb_half_of(o, results);
	__s64 longest = tb_least(TB_ANSWER_MOST, tb_most(t->floor, o->usual / 4));
	__s64 deadline = tb_half_of(o, 1)->deadline;

	h->terms = (__u64)t;
	h->own_op = (__u64)o;
	h->results = results;
	h->patience = results ? tb_most(longest, t->insist) : longest;
	h->late = deadline > 0 && deadline < o->admitted;
	h->step = tb_most(t->floor, o->usual) / 10;
	h->look = tb_least(TB_LOOK, h->step / 4);
	if (o->usual <= t->floor) /* it says nothing of how short the flows are */
		h->step = h->look;
	tb_begin_flows(h);
}

/* The flow of a switch ends when all that bring rows have sent them; short_of: it is known that a rank brings none. */
static void tb_awaits_switch(const struct tb_terms *t, const struct tb_own_op *o, struct tb_half *h,
			     const struct tb_sight *see)
{
	tb_set live = tb_set_of(t->live), stayed = tb_set_of(o->stayed);
	struct tb_incoming *f = tb_flow_of(h, t->ranks);
	__u32 p;

	h->short_of = tb_count(live) < t->ranks - 1 || tb_count(stayed | tb_set_of(o->abstained));
	h->parts = 1 + tb_count(live);
	for (h->part = p = 0; p < t->rank; p++)
		h->part += tb_has(live, p);
	f->awaited = o->own_in != 0;
	f->finished = o->left && !tb_count(see->awaited[0] & ~stayed);
}

/* Notes whose flows are awaited. */
static void tb_awaits(const struct tb_terms *t, const struct tb_own_op *o, struct tb_half *h,
		      int results)
{
	struct tb_sight see = tb_see(t, o);
	tb_set ended = results && !o->switched ? see.published : see.contributed, awaited;
	__u32 p;

	if (o->switched) /* marks alone: rows go to the switch */
		awaited = ~tb_set_of(t->gone);
	else if (results)
		awaited = see.awaited[1] | (tb_repairable(t, o, &see) ? see.gives : see.awaited[1]);
	else
		awaited = tb_set_of(t->live) & ~tb_set_of(o->abstained) &
			  ~(tb_set_of(o->stayed) & ended);
	for (p = 0; p < t->ranks; p++) {
		struct tb_incoming *f = tb_flow_of(h, p);

		f->awaited = p != t->rank && tb_has(awaited, p);
		f->finished = tb_has(ended, p);
	}
	if (o->switched && t->world > t->ranks)
		tb_awaits_switch(t, o, h, &see);
}

/* Which half of an op has flows that are awaited; -1: none. */
static int tb_listening(const struct tb_terms *t, const struct tb_own_op *o)
{
	struct tb_sight see = tb_see(t, o);

	if (tb_half_of(o, 1)->phase)
		return -1;
	if (o->switched)
		return 1;
	if (!tb_half_of(o, 0)->phase)
		return o->overtaken || !o->own || tb_foreseen_wrongly(o, &see) ? -1 : 0;
	return tb_encoded(o) ? 1 : -1;
}

/*
 * Looks at the flows of an op: what to request while they run and once these have ended, and whom to ask for marks in a
 * silence. Marks only once the own rows have left: until then this rank holds up the others. Returns the half of which
 * something is to be asked; 0: none.
 */
TB_EXPORT __u64 tb_listen_to(struct tb_terms *t, struct tb_own_op *o, __s64 now)
{
	int results = tb_listening(t, o), found = 0;
	struct tb_half *h;
	__u32 open, closed, release;

	if (results < 0) {
		o->listen = TB_NEVER;
		return 0;
	}
	h = tb_half_of(o, results);
	open = h->open;
	closed = h->closed;
	release = h->release;
	if (!h->flows)
		tb_open_half(t, o, results);
	if (h->flows) {
		tb_awaits(t, o, h, results);
		found = tb_recover(h, now, tb_encoded(o), h->deadline);
	}
	o->listen = h->due;
	o->stirred |= open != h->open || release != h->release ||
		      (closed != h->closed && tb_count(tb_set_of(t->gone))); /* they owe rows */
	return found ? (__u64)h : 0;
}
