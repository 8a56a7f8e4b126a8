// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How halves end. Once contributions are in, an owner seals its rows, counts what came, judges what was lost, makes the means
 * and queues them for all. Once results are in, a rank counts and decodes them. The transport thread does so where it
 * sleeps, without Python; a turn does the same in parts, between which Python says what it has to say of lost rows.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* bpf(2): BPF_MAP_UPDATE_BATCH, of elements under their locks (BPF_F_LOCK). */
#define TB_UPDATE_BATCH 26
#define TB_LOCKED 4
/* Lost rows of one op from which on it is skipped or ends training: a small op may lose one packet. */
#define TB_FEWEST 8

static int tb_seal_map(const struct tb_source *s, __u32 first, __u32 count)
{
	struct {
		__u64 in, out, keys, values;
		__u32 count, fd;
		__u64 element_flags, flags;
	} batch = { .keys = s->keys + 4ULL * first,
		    .values = s->values,
		    .count = count,
		    .fd = s->locks,
		    .element_flags = TB_LOCKED };

	return count && syscall(SYS_bpf, TB_UPDATE_BATCH, &batch, sizeof(batch)) ? errno : 0;
}

/* Seals rows from seq on up to op, wherever slots are; then nothing is added to them any more. 0, or an errno. */
TB_EXPORT int tb_seal_rows(const struct tb_source *s, __u32 op, __u32 seq, __u32 rows)
{
	__u32 first = seq & (s->rows - 1), before_end, i;
	int error;

	if (s->tables) {
		tb_seal((struct tb_tables *)s->tables, op, seq, rows);
		return 0;
	}
	if (rows > s->rows)
		return EINVAL;
	for (i = 0; i < rows; i++)
		((__u32 *)s->values)[2 * i + 1] = op;
	before_end = tb_least(rows, s->rows - first);
	error = tb_seal_map(s, first, before_end);
	return error ? error : tb_seal_map(s, 0, rows - before_end);
}

/* Judges one op by rows, as they should be and as they came: what is called for. */
TB_EXPORT __u32 tb_judge_loss(const struct tb_owner *w, __s64 due, __s64 came)
{
	double loss = due ? 1 - (double)came / (double)due : 0;

	if (due - came < TB_FEWEST)
		return TB_ACTION_NONE;
	return loss > w->stop ? TB_ACTION_STOP : loss > w->skip ? TB_ACTION_SKIP : TB_ACTION_NONE;
}

/* Closes the first half: nothing more is added. abstains: this rank brings none to the op. 0, or an errno. */
TB_EXPORT int tb_close_first(const struct tb_owner *w, struct tb_own_op *o, int abstains, __s64 now)
{
	const struct tb_terms *t = (const struct tb_terms *)w->terms;
	const struct tb_op *r;
	struct tb_half *first = tb_half_of(o, 0);
	struct tb_tally *y = (struct tb_tally *)o->tally[0];
	__s64 *came = (__s64 *)o->came[0];
	int error = tb_seal_rows((const struct tb_source *)w->source, o->label, o->sum_seq, o->own);
	__u32 i;

	if (error)
		return error;
	tb_charge((struct tb_overtime *)t->overtime, first, now);
	first->phase = TB_PHASE_CLOSED;
	o->closed_at = now;
	o->unnoted = 1;
	r = tb_record(t, o);
	for (i = 0; r && i < TB_WORDS; i++)
		o->abstained[i] |= r->abstained[i];
	tb_summed(t, o, came);
	tb_account(t, o, 0, abstains, came, (struct tb_books *)w->books, y);
	o->action = tb_judge_loss(w, y->judged, y->judged_came);
	if (y->quorum)
		o->say |= TB_FLAG_QUORUM;
	if (o->action)
		o->say |= TB_FLAG_SKIP;
	if (o->action == TB_ACTION_STOP)
		o->say |= TB_FLAG_STOP;
	return 0;
}

/* The mark for the last packet of results that are queued next: all before them left before. */
static __u32 tb_published_by(struct tb_own_marks *m, const struct tb_own_op *o)
{
	if (tb_distance(m->published, m->told) > 0)
		m->told = m->published;
	if (m->told == o->previous)
		m->told = o->label;
	return m->told;
}

/* Writes headers of results, of which the last has the mark. */
static void tb_head_results(const struct tb_owner *w, const struct tb_own_op *o, __u32 last)
{
	const struct tb_terms *t = (const struct tb_terms *)w->terms;
	const struct tb_given *g = (const struct tb_given *)o->made;
	struct tb_own_marks *m = (struct tb_own_marks *)w->marks;
	struct tb_stamp *s = (struct tb_stamp *)g->heads;
	struct tb_header head = tb_begin_word((const struct tb_voice *)w->voice, TB_TYPE_RESULT,
					      o->label, o->layout);
	struct tb_run run = { 0, o->own, last, o->result_seq, t->rank, o->own };

	head.flags = tb_be16(o->say);
	head.map_id = tb_be32(o->map_id);
	s->head = (__u64)&head;
	s->key = g->key;
	s->mark = tb_published_by(m, o);
	tb_stamp(s, &run, 1);
	s->head = 0;
}

/* Rows that a rank contributed to, in a piece. NULL: there is no memory for them. */
static __u8 *tb_usable(const struct tb_given *g, __u32 count)
{
	__u8 *copies = malloc((__u64)count * g->stride), *at = copies;
	__u32 i;

	for (i = 0; copies && i < g->rows; i++)
		if (((const __u8 *)g->usable)[i]) {
			memcpy(at, (const __u8 *)g->packets + (__u64)i * g->stride, g->stride);
			at += g->stride;
		}
	return copies;
}

/* Queues count results, the last at a place, for every aim. 0, or ENOMEM. */
static int tb_queue(const struct tb_owner *w, struct tb_own_op *o, __u32 count, __u32 last,
		    __s64 now)
{
	const struct tb_terms *t = (const struct tb_terms *)w->terms;
	const struct tb_given *g = (const struct tb_given *)o->made;
	__u64 runs[3 * TB_MAX_RANKS];
	__u8 *owned = 0;
	__s64 until;
	__u32 i;

	if (count)
		tb_head_results(w, o, last);
	if (count && count < o->own) {
		owned = tb_usable(g, count);
		if (!owned)
			return ENOMEM;
	}
	for (i = 0; i < o->aims; i++) {
		runs[3 * i] = o->aim[i];
		runs[3 * i + 1] = owned ? (__u64)owned : g->packets;
		runs[3 * i + 2] = count;
	}
	/* as long as receivers may wait for them past their deadlines, as far as can be told from here */
	until = now + o->worth + tb_saved((const struct tb_overtime *)t->overtime, now);
	tb_pump_soon((struct tb_line *)w->line);
	return tb_submit((struct tb_line *)w->line, TB_RESULTS, o, o->label, until, g->stride,
			 o->largest, runs, count ? o->aims : 0, owned);
}

/* Hands out the results, which are made, but for rows to which no rank contributed. 0, or ENOMEM. */
TB_EXPORT int tb_hand_out(const struct tb_owner *w, struct tb_own_op *o, __s64 now)
{
	const struct tb_given *g = (const struct tb_given *)o->made;
	int alone = ((const struct tb_terms *)w->terms)->ranks == 1;
	__u32 count = 0, last = 0, i;

	for (i = 0; i < o->own; i++)
		if (((const __u8 *)g->usable)[i]) {
			last = i;
			count++;
		}
	o->missing = o->own - count;
	if (!alone && tb_queue(w, o, count, last, now))
		return ENOMEM;
	o->results = o->made;
	o->queued = 1;
	if (alone)
		tb_results_left((const struct tb_line *)w->line, o, now);
	return 0;
}

/* The same without Python, for an op of which nothing is to be said before; whether it was done. */
static int tb_close_one(const struct tb_owner *w, struct tb_terms *t, struct tb_own_op *o,
			__s64 now)
{
	const struct tb_tally *y = (const struct tb_tally *)o->tally[0];
	tb_code *pass = (tb_code *)w->code;
	__s64 result;
	void *error;

	if (t->suspects || !o->own_in || !o->mean || o->own > w->most)
		return 0;
	if (t->live_since > o->admitted) /* a rank is back, to which results were not to go */
		return 0;
	tb_half_of(o, 0)->why = TB_WHY_COMPLETE;
	tb_learn_last(tb_half_of(o, 0), now);
	if (tb_close_first(w, o, 0, now) ||
	    tb_count(tb_set_of(y->absent) | tb_set_of(o->abstained)))
		return 0;
	o->listen = t->listen = 1; /* to the results of others */
	return !pass(&result, &error, o->mean, 0, o->own, w->memory) && !tb_hand_out(w, o, now);
}

/* Closes all ops of which all rows are in, as far as that needs no Python; how many are left to a turn. */
int tb_close_alone(const struct tb_owner *w, __s64 now)
{
	struct tb_terms *t = (struct tb_terms *)w->terms;
	struct tb_own_op *o = (struct tb_own_op *)t->first;
	int left = 0;

	for (; o; o = (struct tb_own_op *)o->after)
		left += tb_all_in(t, o) && !tb_close_one(w, t, o, now);
	return left;
}

/* Reads after this come after reads before it, also as other processors write. */
TB_EXPORT void tb_order(const struct tb_source *s)
{
	if (s->tables)
		tb_fence((struct tb_tables *)s->tables);
	else
		__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Closes the second half: notes which results are here, and what that comes to. */
static void tb_close_second(const struct tb_owner *w, struct tb_own_op *o, __s64 now)
{
	const struct tb_terms *t = (const struct tb_terms *)w->terms;
	__s64 *came = (__s64 *)o->came[1];

	o->collected_at = now;
	tb_learn_last(tb_half_of(o, 1), now);
	tb_charge((struct tb_overtime *)t->overtime, tb_half_of(o, 1), now);
	tb_point_own(t, o);
	o->present = tb_gather(t, o, came);
	/* presence was read; rows are read after it */
	tb_order((const struct tb_source *)w->source);
	o->overwritten = tb_read(t, o, o->switched ? w->form : 0);
	if (o->switched)
		came[t->ranks] -= o->overwritten;
	o->nothing = !o->switched && !o->present && tb_nobody_had_any(t, o);
	if (!o->nothing)
		tb_account(t, o, 1, 0, came, (struct tb_books *)w->books,
			   (struct tb_tally *)o->tally[1]);
}

/* The same, and decodes them; what cannot wait, or 0: then it is done. */
static __u32 tb_decode(const struct tb_owner *w, struct tb_own_op *o, struct tb_sleep *s, __s64 now)
{
	__u32 found;

	if (!o->collected_at)
		tb_close_second(w, o, now);
	found = o->decode ? tb_pieces((struct tb_work *)o->decode, w->memory, s) : 0;
	o->decoded = !found;
	return found;
}

/* Counts and decodes results: what of TB_WOKEN_* cannot wait, and it goes on in the next call; 0: all is decoded. */
TB_EXPORT __u32 tb_finish(const struct tb_owner *w, struct tb_own_op *o, struct tb_sleep *s,
			  __s64 now)
{
	__u32 found = tb_decode(w, o, s, now);

	tb_away(s, TB_AWAY_MIDST, found);
	return found;
}

/* The oldest op of which all results are in, and which waits for nothing else; NULL: none is. */
struct tb_own_op *tb_complete(const struct tb_terms *t)
{
	struct tb_own_op *o = (struct tb_own_op *)t->first;

	while (o && !((o->queued || !o->own) && tb_results_in(t, o)))
		o = (struct tb_own_op *)o->after;
	return o;
}

/* Decodes its results, as far as that needs no Python: what cannot wait. */
__u32 tb_finish_alone(const struct tb_owner *w, struct tb_own_op *o, struct tb_sleep *s, __s64 now)
{
	/* one that has no deputy has no thread either, and no time passes (tailbound_lab/simulate) */
	return o->decode && !o->decoded ? tb_decode(w, o, s->deputy ? s : NULL, now) : 0;
}
