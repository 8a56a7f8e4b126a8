// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Loss detection within a flow (clock-23): one pass over the rows of the flows that are due. What it reads of rows is written
 * meanwhile.
 *
 * A flow is the rows of one op from one sender to one receiver, in an order that both know. A row is lost when a row
 * behind it arrived a reordering window ago. The receiver requests lost rows while the flow still runs. A requested row
 * takes a new place behind all others, so that a lost retransmission is detected like a lost row.
 *
 * Only the end of a flow needs a timer, the probe timeout (PTO, RFC 9002 section 6.2) of its sender. If the last row was
 * lost, and with it the mark that says that nothing more will come, the sender is asked for its mark (clock-30). A loss
 * at the end is often one of a burst, which lone packets have to outlast. So the first timeouts are equal, a question for a
 * mark has many copies, and a request more each time. Later timeouts double, until a row arrives.
 *
 * A sender that has not begun computes, as a rule. It is asked late and ever more rarely, and once more shortly before the
 * deadline, to say that it lives. Of many senders whose marks are missing nearly all are late, so few are asked together.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

/* Probes without an answer after which a flow may be given up: one of them, or its answer, may be lost, too. */
#define TB_PROBES 2
/* So many probe timeouts of a peer are equal, the first of a switch alone; then they double, this many times at most. */
#define TB_EQUAL 4
#define TB_DOUBLED 6
/* Senders that are asked for their marks together, in turn; before a deadline all are. */
#define TB_AT_ONCE 8
/* Rows that a switch is asked for at once, and that have not come, at most: each request is a row by itself. */
#define TB_OPEN 256
/*
 * Flows of so few rows may be lost as a whole. Their senders count as such that have begun: owners of results, and for a
 * half's first question ranks that owe contributions, or marks alone where rows go to a switch.
 */
#define TB_SHORT_RESULTS 16
#define TB_SHORT 3

/*
 * A fifth of the floor before the first answer, then at most five. The end of a short flow is soon over, with its answers:
 * at least a fortieth of the floor, and of a flow of more than 50 rows up to a tenth.
 */
TB_EXPORT __s64 tb_pto(const struct tb_answers *p, __u32 rows)
{
	__s64 least = p->floor * tb_most(50, tb_least(rows, 200)) / 2000;

	if (p->guess)
		return p->guess;
	return tb_least(5 * p->floor, tb_most(least, p->usual + 2 * p->varies));
}

/*
 * took after its request, first after the first of several (Karn). An answer that came too soon after the last was to one
 * before, so the timeout was too short. One without a usual time to compare with took the timeout. A lost request does not
 * count as a slow answer.
 */
TB_EXPORT void tb_answered(struct tb_answers *p, __s64 took, __s64 first)
{
	double off;

	if (first > took && (p->guess || took < p->usual / 2))
		took = tb_least(first, tb_most(took, p->guess ? p->guess : 5 * tb_pto(p, 0) / 4));
	p->guess = 0;
	if (!p->usual) {
		p->usual = took;
		p->varies = took / 2.0;
		return;
	}
	off = p->usual < took ? took - p->usual : p->usual - took;
	p->varies += (off - p->varies) / 4;
	p->usual += (took - p->usual) / 8;
}

static struct tb_awaited *tb_rows(const struct tb_incoming *f)
{
	return (struct tb_awaited *)f->row;
}

static struct tb_incoming *tb_flows(const struct tb_half *r)
{
	return (struct tb_incoming *)r->flows;
}

static const struct tb_terms *tb_terms_of(const struct tb_half *r)
{
	return (const struct tb_terms *)r->terms;
}

struct tb_incoming *tb_flow_of(const struct tb_half *r, __u32 rank)
{
	if (!r->flows)
		return 0;
	return &tb_flows(r)[(rank + r->count - tb_terms_of(r)->rank - 1) % r->count];
}

static struct tb_answers *tb_answers_of(const struct tb_half *r, const struct tb_incoming *f)
{
	const struct tb_terms *t = tb_terms_of(r);

	return &((struct tb_answers *)t->answers)[r->results * t->world + f->rank];
}

/* A switch owns all rows of an op. It keeps nothing to be asked for, so the own rows are sent to it again. */
static int tb_of_switch(const struct tb_half *r, const struct tb_incoming *f)
{
	return f->rank >= tb_terms_of(r)->ranks;
}

static int tb_arrived(const struct tb_half *r, const struct tb_incoming *f, __u32 listed)
{
	const struct tb_terms *t = tb_terms_of(r);
	const struct tb_own_op *o = (const struct tb_own_op *)r->own_op;

	if (r->results) {
		__u32 seq = o->result_seq + ((const __s32 *)f->listed)[listed];
		const struct tb_presence *p =
			&((const struct tb_presence *)t->presence)[seq & t->result_mask];

		return p->op == o->label && p->cookie == t->cookie;
	} else {
		__u32 seq = o->sum_seq + listed;
		const struct tb_slot *s = &((const struct tb_slot *)t->slots)[seq & t->sum_mask];

		return s->cookie == t->cookie && s->op == o->label &&
		       (TB_READ_ONCE(s->ranks[f->rank >> 6]) >> (f->rank & 63) & 1);
	}
}

/* Whether a row's place is at most that: among rows that left once, and among retransmissions. */
static int tb_behind(const struct tb_incoming *f, __u32 i, const __s32 *highest)
{
	__s32 place = tb_rows(f)[i].place;

	return place ? place <= highest[1] : (__s32)i <= highest[0];
}

/* What a look finds. */
struct tb_found {
	__u32 here;
	__u32 missing;
	__u32 out;
	__s32 highest[2];
	__s64 asked; /* when the last of the rows that are out was requested; 0: none is */
};

/* Which rows are here; learns from answers. While a flow runs, these wait in its queues. */
static struct tb_found tb_find(const struct tb_half *r, struct tb_incoming *f, __s64 now)
{
	struct tb_found found = { .highest = { -1, -1 } };
	__s64 asked = 0, first = 0;
	__u32 i, listed = f->first;
	int came = 0;

	for (i = 0; i < f->rows; i++, listed = listed + 1 < f->rows ? listed + 1 : 0) {
		struct tb_awaited *row = &tb_rows(f)[i];

		row->here = row->here || tb_arrived(r, f, listed);
		row->lost = 0;
		if (row->here) {
			__s32 place = row->place ? row->place : i;

			found.here++;
			found.highest[1] = tb_most(found.highest[1], place);
			if (!row->place)
				found.highest[0] = i;
			if (!row->out)
				continue;
			row->out = 0;
			f->mended++;
			came = 1;
			if (f->ended && row->first >= f->ended) {
				asked = tb_most(asked, row->asked);
				first = tb_most(first, row->first);
			}
		} else if (!row->gone) {
			found.missing++;
			found.out += row->out;
			if (row->out)
				found.asked = tb_most(found.asked, row->asked);
		}
	}
	if (f->ended && !tb_of_switch(r, f))
		found.highest[0] = f->rows - 1;
	if (asked)
		tb_answered(tb_answers_of(r, f), now - asked, now - first);
	if (came) {
		f->since = now;
		f->expired = 0;
	}
	return found;
}

/* A half ends: the rows that have completed it are answers, too, and the quickest as a rule. */
TB_EXPORT void tb_learn_last(struct tb_half *r, __s64 now)
{
	__u32 i;

	for (i = 0; r->requested && i < tb_terms_of(r)->world; i++)
		if (tb_flows(r)[i].again)
			tb_find(r, &tb_flows(r)[i], now);
}

/*
 * The rows that a row behind them has passed for the reordering window count as passed. A retransmission overtakes rows
 * that have not left yet, so it passes retransmissions only.
 */
static void tb_pass(struct tb_incoming *f, const __s32 *highest, __s64 now, __s64 window)
{
	if (f->noted && now - f->noted >= window) {
		memcpy(f->passed, f->highest, sizeof(f->passed));
		f->noted = 0;
	}
	if (f->noted || !memcmp(highest, f->passed, sizeof(f->passed)))
		return;
	memcpy(window ? f->highest : f->passed, highest, sizeof(f->passed));
	f->noted = window ? now : 0;
}

/* A timeout after so many that have expired, the first of which are equal. */
static __s64 tb_longer(__s64 first, __u32 expired, __u32 equal)
{
	return first << (expired < equal ? 0 : tb_least(expired - equal + 1, TB_DOUBLED));
}

/*
 * Later rows tell what is lost until the flow has ended, and answers wait behind these. At a switch rows may be on their way
 * for a while then.
 */
static __s64 tb_timeout(const struct tb_half *r, const struct tb_incoming *f, __s64 asked)
{
	int box = tb_of_switch(r, f);

	if (!f->ended)
		return TB_NEVER;
	asked = tb_most(asked, box ? tb_most(f->moved, f->ended) : f->ended);
	return asked +
	       tb_longer(tb_pto(tb_answers_of(r, f), f->rows), f->expired, box ? 1 : TB_EQUAL);
}

/* Rows of a flow that runs come by themselves; of one that has ended, by requests only. */
static __s64 tb_next_look(const struct tb_half *r, const struct tb_incoming *f, __s64 now)
{
	return now + (f->ended ? r->look : r->step);
}

static void tb_request(struct tb_half *r, struct tb_incoming *f, __s64 now)
{
	__u32 listed, at;

	for (listed = 0; listed < f->rows; listed++) {
		struct tb_awaited *row;

		at = listed >= f->first ? listed - f->first : listed + f->rows - f->first;
		row = &tb_rows(f)[at];
		if (!row->lost)
			continue;
		f->again += !row->place;
		row->place = f->next++;
		r->requested++;
		row->out = 1;
		row->asked = now;
		row->first = row->first ? row->first : now;
	}
	f->since = f->since ? f->since : now;
	f->due = tb_least(tb_next_look(r, f, now), tb_timeout(r, f, now));
}

/*
 * From now on a switch is to release rows with what is in (clock-28): every rank asks for its own share of them first, and
 * for all that are missing where a probe timeout expires.
 */
static void tb_release(struct tb_half *r, struct tb_incoming *f, __s64 now)
{
	r->release = f->released = 1;
	f->ended = f->ended ? f->ended : now;
	f->expired = 0;
	f->due = now;
}

static int tb_lost(const struct tb_half *r, const struct tb_incoming *f, __u32 i, int expired)
{
	const struct tb_awaited *row = &tb_rows(f)[i];

	if (!tb_of_switch(r, f))
		return tb_behind(f, i, f->passed) || (expired && row->out);
	return expired ||
	       (f->released ? !row->out && i % r->parts == r->part : tb_behind(f, i, f->passed));
}

static void tb_detect(struct tb_half *r, struct tb_incoming *f, struct tb_found *found, __s64 now)
{
	struct tb_answers *path = tb_answers_of(r, f);
	int box = tb_of_switch(r, f), expired = 0, noted = 0;
	__s64 window = box ? tb_most(path->window, tb_terms_of(r)->floor / 10) : path->window;
	__s32 room = TB_OPEN - found->out;
	__u32 i;

	if (!found->missing) {
		f->over = f->ended != 0;
		f->due = now + r->step;
		return;
	}
	if (r->late || (f->ended && f->questions)) /* a mark that had to be asked for passes all */
		window = 0;
	tb_pass(f, found->highest, now, window);
	if ((found->asked || box) && now >= tb_timeout(r, f, found->asked)) {
		f->expired++;
		f->probed = 1;
		expired = !(box && r->short_of && !f->released);
		if (expired)
			room = TB_OPEN;
		else
			tb_release(r, f, now);
	}
	if (!box && f->ended && found->asked && now - tb_most(f->since, f->ended) >= r->patience &&
	    f->expired > TB_PROBES) {
		f->over = 1;
		path->guess = tb_least(5 * path->floor, 2 * tb_pto(path, f->rows));
		return;
	}
	for (i = 0; i < f->rows; i++) {
		struct tb_awaited *row = &tb_rows(f)[i];

		if (row->here || row->gone)
			continue;
		row->lost = (!box || room > 0) && tb_lost(r, f, i, expired);
		f->requests += row->lost;
		room -= row->lost;
		noted |= f->noted && tb_behind(f, i, f->highest);
	}
	f->due = tb_next_look(r, f, now);
	if (noted)
		f->due = tb_least(f->due, f->noted + window);
	if (found->asked || box)
		f->due = tb_least(f->due, tb_timeout(r, f, found->asked));
	if (f->requests)
		tb_request(r, f, now);
}

/* By what all flows of a half wait for marks. */
struct tb_silence {
	__s64 last; /* when a row of any of them came last */
	__s64 call; /* when there is still time for an answer before the deadline; TB_NEVER: that is not known */
};

/* While rows of others come, a sender of which nothing has come is not missed. A deadline that moved on is another one. */
static void tb_await(const struct tb_half *r, struct tb_incoming *f, const struct tb_silence *s)
{
	__s64 late = 2 * tb_terms_of(r)->floor;
	__s64 since = f->came ? f->waited : tb_most(f->waited, s->last);
	int begun = f->came || (r->results && f->rows && f->rows <= TB_SHORT_RESULTS);
	__u32 asked = begun || f->questions > r->rounds ? f->questions : r->rounds;
	int soon = begun || (f->rows <= TB_SHORT && !asked);
	__s64 first = soon ? tb_pto(tb_answers_of(r, f), f->rows) : late;
	__s64 usual = since + tb_least(tb_longer(first, asked, begun ? TB_EQUAL : 1), 8 * late);

	f->mark = tb_least(usual, tb_most(s->call, tb_most(since + tb_terms_of(r)->floor / 5,
							   f->called + late)));
}

/* Its sender, whose turn it is, is asked for the mark, or others are. */
static void tb_ask(const struct tb_half *r, struct tb_incoming *f, const struct tb_silence *s,
		   __s64 now, int asked)
{
	f->waited = now;
	f->questions += asked;
	f->asked = asked;
	if (asked && now >= s->call)
		f->called = now;
	tb_await(r, f, s);
}

/* Those who were asked most rarely first. */
static int tb_ask_some(struct tb_half *r, const struct tb_silence *s, __s64 now, __u32 silent)
{
	__u32 left = now >= s->call || silent < TB_AT_ONCE ? silent : TB_AT_ONCE, i;

	r->rounds += left > 0;
	for (silent = left; left; left--) {
		struct tb_incoming *next = 0;

		for (i = 0; i < r->count; i++) {
			struct tb_incoming *f = &tb_flows(r)[i];

			if (f->silent && !f->asked && (!next || f->questions < next->questions))
				next = f;
		}
		next->asked = 1;
	}
	for (i = 0; i < r->count; i++) {
		if (tb_flows(r)[i].silent)
			tb_ask(r, &tb_flows(r)[i], s, now, tb_flows(r)[i].asked);
	}
	return silent > 0;
}

static void tb_half_stands(struct tb_half *r)
{
	__u32 i;

	r->due = TB_NEVER;
	r->open = 0;
	r->closed = 0;
	for (i = 0; i < r->count; i++) {
		const struct tb_incoming *f = &tb_flows(r)[i];

		r->closed += f->ended && f->over;
		if (!f->awaited || f->over)
			continue;
		r->open |= f->ended != 0;
		r->due = tb_least(r->due, tb_least(f->due, f->mark));
	}
}

static void tb_first_look(const struct tb_half *r, struct tb_incoming *f,
			  const struct tb_silence *s, __s64 now, int asks)
{
	f->known = 1;
	f->next = f->rows;
	f->passed[0] = f->passed[1] = f->highest[0] = f->highest[1] = -1;
	f->mark = TB_NEVER;
	f->called = -TB_NEVER;
	f->due = now + r->step;
	if (asks && !tb_of_switch(r, f))
		tb_ask(r, f, s, now, 0);
}

int tb_recover(struct tb_half *r, __s64 now, int asks, __s64 deadline)
{
	struct tb_silence s = { 0, deadline ? deadline - 3 * tb_terms_of(r)->floor / 5 : TB_NEVER };
	__u32 i, silent = 0;
	int found = 0;

	for (i = 0; i < r->count; i++)
		s.last = tb_most(s.last, tb_most(tb_flows(r)[i].moved, tb_flows(r)[i].ended));
	for (i = 0; i < r->count; i++) {
		struct tb_incoming *f = &tb_flows(r)[i];
		struct tb_found here;

		f->requests = f->silent = f->asked = 0;
		if (!f->awaited)
			continue;
		if (!f->known)
			tb_first_look(r, f, &s, now, asks);
		if (f->finished && !f->ended) {
			f->ended = f->due = now;
			f->mark = TB_NEVER;
		}
		if (r->release && !f->released && tb_of_switch(r, f))
			tb_release(r, f, now);
		if (f->over || now < tb_least(f->due, f->mark))
			continue;
		here = tb_find(r, f, now);
		if (here.here != f->came && ((asks && !f->ended) || tb_of_switch(r, f))) {
			f->came = here.here;
			f->questions = 0;
			f->moved = f->waited = now;
		}
		if (asks && !f->ended && !tb_of_switch(r, f)) {
			tb_await(r, f, &s);
			f->silent = now >= f->mark;
			silent += f->silent;
		}
		tb_detect(r, f, &here, now);
		found |= f->requests > 0;
	}
	found |= tb_ask_some(r, &s, now, silent);
	tb_half_stands(r);
	return found;
}

/* -- flows --------------------------------------------------------------------------------------------------------- */

/* A switch that sums has all rows, and ranks have none then. */
void tb_begin_flows(struct tb_half *r)
{
	const struct tb_terms *t = tb_terms_of(r);
	const struct tb_own_op *o = (const struct tb_own_op *)r->own_op;
	__u32 p;

	r->count = t->world;
	r->flows = (__u64)calloc(r->count, sizeof(struct tb_incoming));
	r->due = TB_NEVER;
	for (p = 0; r->flows && p < t->world; p++) {
		struct tb_incoming *f = tb_flow_of(r, p);

		f->rank = p;
		if (p == t->rank || o->switched != (p == t->ranks))
			continue;
		f->rows = r->results ? tb_share(o, p) : o->own;
		f->first = r->results ? 0 : ((const __s64 *)o->places)[p];
		f->listed = r->results ? (__u64)tb_listed(o, p) : 0;
		f->row = (__u64)calloc(f->rows + 1, sizeof(struct tb_awaited));
		if (!f->row)
			tb_free_flows(r);
	}
}

void tb_free_flows(struct tb_half *r)
{
	__u32 i;

	for (i = 0; r->flows && i < r->count; i++)
		free(tb_rows(&tb_flows(r)[i]));
	free(tb_flows(r));
	r->flows = 0;
}

/* Whether nothing more is requested of a rank. */
int tb_flow_over(const struct tb_half *r, __u32 rank)
{
	const struct tb_incoming *f = tb_flow_of(r, rank);

	return f && f->known && (f->over || !f->awaited);
}

/* A rank has none of these rows: they are not awaited. The body is a bitmap of places from row on. */
TB_EXPORT void tb_gone(struct tb_half *r, __u32 rank, __u32 row, const __u8 *body, __u32 length)
{
	struct tb_incoming *f = tb_flow_of(r, rank);
	__u32 i, bits = tb_bits(body, length);

	if (!f || !f->known || !bits || row + bits > f->rows)
		return;
	f->due = 0;
	for (i = 0; i < bits; i++)
		if (tb_bit(body, i))
			tb_rows(f)[(row + i + f->rows - f->first) % f->rows].gone = 1;
	tb_half_stands(r);
}

/* A bitmap of rising places from the first on, as far as it fits: how many it has. */
TB_EXPORT __u32 tb_bitmap(const __s64 *places, __u32 count, __u8 *body, __u32 most, __u32 *size)
{
	__u32 n, bit = 0;

	memset(body, 0, most);
	for (n = 0; n < count && places[n] - places[0] < 8 * (__s64)most; n++) {
		bit = places[n] - places[0];
		body[bit / 8] |= 0x80 >> bit % 8;
	}
	*size = bit / 8 + 1;
	return n;
}

/* Places of a flow in list order that are to be requested now; how many. */
TB_EXPORT __u32 tb_requests(const struct tb_half *r, __u32 rank, __s64 *places)
{
	const struct tb_incoming *f = tb_flow_of(r, rank);
	__u32 listed, n = 0;

	for (listed = 0; f && listed < f->rows; listed++) {
		const struct tb_awaited *row = &tb_rows(
			f)[listed >= f->first ? listed - f->first : listed + f->rows - f->first];

		if (row->lost && row->out)
			places[n++] = listed;
	}
	return n;
}
