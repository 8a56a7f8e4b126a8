// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * From the launch of an op until its own rows are in the send queue. Python writes down what it takes, in the thread that
 * launches; the rest needs no interpreter.
 */
#include "core.h"

#include <errno.h>

/* An op was launched, by one thread at a time; it is taken at the next look. */
TB_EXPORT void tb_hand(struct tb_terms *t, struct tb_own_op *o)
{
	__u64 newest = __atomic_load_n(&t->handed, __ATOMIC_RELAXED);

	do
		o->handed = newest;
	while (!__atomic_compare_exchange_n(&t->handed, &newest, (__u64)o, 0, __ATOMIC_RELEASE,
					    __ATOMIC_RELAXED));
}

/* Ops that were handed over are in flight from now on, the oldest first. */
void tb_take_handed(struct tb_terms *t)
{
	__u64 newest = __atomic_exchange_n(&t->handed, 0, __ATOMIC_ACQUIRE), oldest = 0, next;
	struct tb_own_op *o;

	for (; newest; newest = next) {
		o = (struct tb_own_op *)newest;
		next = o->handed;
		o->handed = oldest;
		oldest = newest;
	}
	for (; oldest; oldest = o->handed) {
		o = (struct tb_own_op *)oldest;
		if (!tb_own_of(t, o->label))
			tb_enter(t, o);
		o->sending = TB_SENDING_LAUNCHED;
		o->stirred = 0; /* a look follows */
		o->listen = 0;
	}
}

/* Own rows are coded, and leave; 0, or an errno. */
TB_EXPORT int tb_send_own(const struct tb_owner *w, struct tb_own_op *o, __s64 now)
{
	const struct tb_terms *t = (const struct tb_terms *)w->terms;
	struct tb_expect_results *expected = (struct tb_expect_results *)w->expected + o->slot;
	struct tb_header head = tb_begin_word((const struct tb_voice *)w->voice,
					      TB_TYPE_CONTRIBUTION, o->label, o->layout);
	struct tb_stamp *s = (struct tb_stamp *)o->heads;
	struct tb_run runs[TB_MAX_RANKS];
	__u64 flows[3 * TB_MAX_RANKS];
	__u32 count = 0, i, p, rows;

	head.flags = tb_be16(o->form);
	head.map_id = tb_be32(o->map_id);
	for (i = 1; i < t->ranks; i++) { /* in turn, beginning with the next rank (clock-17) */
		p = (t->rank + i) % t->ranks;
		rows = tb_share(o, p);
		if (tb_has(t->gone, p))
			continue;
		if (!rows || tb_sent(t, p, o->label, 1)) { /* it hears of every op (clock-2) */
			tb_say_ready((struct tb_voice *)w->voice, p, o);
			continue;
		}
		runs[count] = (struct tb_run){ .first = ((const __s64 *)o->starts)[p],
					       .count = rows,
					       .last = rows - 1,
					       .seq = ((const __u32 *)o->seqs)[p],
					       .owner = p,
					       .rows = rows };
		flows[3 * count] = p;
		flows[3 * count + 1] = s->packets + (__u64)runs[count].first * s->stride;
		flows[3 * count + 2] = rows;
		count++;
	}
	s->head = (__u64)&head;
	s->key = o->tag_key;
	s->mark = o->label;
	tb_stamp(s, runs, count);
	s->head = 0;
	if (tb_submit((struct tb_line *)w->line, TB_CONTRIBUTIONS, o, o->label,
		      (o->start ? o->start : o->admitted) + t->stage_max, s->stride, o->burst,
		      flows, count, NULL))
		return ENOMEM;
	tb_pump_soon((struct tb_line *)w->line);
	o->own_present = !tb_half_of(o, 0)->phase;
	o->own_in = now;
	o->given = s->packets;
	o->sending = TB_SENDING_OVER;
	expected->rows = o->rows - o->own;
	__atomic_store_n(&expected->op, o->label, __ATOMIC_RELEASE);
	return 0;
}

/* count: rises with every op that is coded. */
__u32 tb_launch_all(const struct tb_owner *w, struct tb_sleep *s, __s64 now, __u32 *count)
{
	const struct tb_terms *t = (const struct tb_terms *)w->terms;
	struct tb_own_op *o = (struct tb_own_op *)t->first;
	struct tb_work *work;
	__u32 found;

	for (; o; o = (struct tb_own_op *)o->after) {
		if (o->sending == TB_SENDING_OVER)
			continue;
		if (o->sending != TB_SENDING_LAUNCHED || !o->code || o->overtaken ||
		    tb_half_of(o, 0)->phase)
			return 0;
		work = (struct tb_work *)o->code;
		o->coding = o->coding ? o->coding : now;
		found = tb_pieces(work, w->memory, s);
		if (found)
			return found; /* it goes on where it was */
		if (s)
			now = tb_clock();
		if (work->failed ||
		    tb_send_own(w, o, now)) { /* not finite, as a rule: Python says so */
			o->code = 0;
			return TB_WOKEN_TURN;
		}
		(*count)++;
		if (s && s->direct)
			tb_pump_alone((struct tb_line *)s->line, tb_clock());
	}
	return 0;
}

/* Codes and sends all that are ready: what only Python can do first, or 0. */
TB_EXPORT __u32 tb_launch(const struct tb_owner *w, struct tb_sleep *s, __s64 now)
{
	__u32 count = 0, found = tb_launch_all(w, s, now, &count);

	tb_away(s, TB_AWAY_MIDST, found);
	return found;
}
