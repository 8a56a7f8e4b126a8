// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Control packets: how they are written, and questions for what is lost. A REPAIR packet asks for rows of one list of an op.
 * Header: rows of that list, row the place of the first bit. Body: a bitmap, most significant bit first; a set bit is a
 * missing row. With rows 0 it asks for marks only. GONE names rows that do not exist alike; without rows it brings marks.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define TB_BODY 8192 /* bytes of a bitmap at most: more rows than a list has */
/* Copies of a question for a mark: they outlast a burst of losses, and are fewer bytes than a row. */
#define TB_COPIES 8

struct tb_word *tb_new_word(__u32 rank, const void *packet, __u32 length)
{
	struct tb_word *w = malloc(sizeof(*w) + length);

	if (!w)
		return 0;
	w->after = 0;
	w->rank = rank;
	w->length = length;
	memcpy(w->packet, packet, length);
	return w;
}

int tb_put_word(struct tb_words *q, __u32 rank, const void *packet, __u32 length)
{
	struct tb_word *w = tb_new_word(rank, packet, length);

	if (!w)
		return 0;
	*(q->first ? &q->last->after : &q->first) = w;
	q->last = w;
	return 1;
}

/* The oldest is let go of. */
void tb_drop_word(struct tb_words *q)
{
	struct tb_word *w = q->first;

	q->first = w->after;
	free(w);
}

/* A number for a control packet: above all before it, also those of the process before. */
TB_EXPORT __u64 tb_next_stamp(struct tb_voice *v)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return v->stamp = tb_most(v->stamp + 1, now.tv_sec * 1000000000LL + now.tv_nsec);
}

/*
 * Writes a control packet for a rank, to be sent once; its bytes. It has a stamp in a job with a key, in the place of fields
 * that only rows have.
 */
TB_EXPORT __u32 tb_write_word(struct tb_voice *v, __u32 rank, const struct tb_header *head,
			      const void *body, __u32 length, void *out)
{
	__u32 padded = (length + TB_ROW_STEP - 1) / TB_ROW_STEP * TB_ROW_STEP;
	struct tb_header *packet = out;
	__be64 stamp;

	*packet = *head;
	packet->owner = rank;
	if (v->key) {
		stamp = tb_be64(tb_next_stamp(v));
		memcpy(&packet->exponent, &stamp, sizeof(stamp));
	}
	if (length) /* else there may be none */
		memcpy(packet + 1, body, length);
	memset((__u8 *)(packet + 1) + length, 0, padded - length);
	tb_prove_packet(packet, packet + 1, padded, (const __u64 *)v->key);
	return sizeof(*packet) + padded;
}

/* A header of this rank with its marks and advertisements. */
struct tb_header tb_begin_word(const struct tb_voice *v, __u32 type, __u32 label, __u32 layout)
{
	const struct tb_own_marks *m = (const struct tb_own_marks *)v->marks;
	struct tb_header head = *(const struct tb_header *)v->head;

	head.type = type;
	head.op = tb_be32(label);
	head.layout = tb_be16(layout);
	head.contributed = tb_be32(m->contributed);
	head.published = tb_be32(m->published);
	return head;
}

/* Tells a rank at the next pump, which is due at once. */
static void tb_tell(struct tb_voice *v, __u32 rank, const struct tb_header *head, const void *body,
		    __u32 length, __u32 copies)
{
	__u64 packet[(TB_HEADER_BYTES + TB_BODY) / 8];

	for (; copies; copies--)
		tb_say((struct tb_line *)v->line, rank, packet,
		       tb_write_word(v, rank, head, body, length, packet));
	tb_pump_soon((struct tb_line *)v->line);
}

/* The same of rows by rising places, in as many packets as they take: how many these are. */
__u32 tb_tell_places(struct tb_voice *v, __u32 rank, struct tb_header *head, const __s64 *places,
		     __u32 count, __u32 copies)
{
	__u32 taken, size, packets = 0;
	__u8 body[TB_BODY];

	for (; count; places += taken, count -= taken, packets++) {
		taken = tb_bitmap(places, count, body, tb_least(v->width, TB_BODY), &size);
		head->row = tb_be16(places[0]);
		tb_tell(v, rank, head, body, size, copies);
	}
	return packets;
}

/* Keeps what is said of the own gradient of an op (Flag bits). */
TB_EXPORT void tb_remember(struct tb_voice *v, __u32 label, __u32 flags)
{
	__u32 i = 0;

	while (i < TB_SAID_MOST && !(v->said[i] && v->said_of[i] == label))
		i++;
	if (i == TB_SAID_MOST) {
		i = v->saying++ % TB_SAID_MOST;
		v->said_of[i] = label;
		v->said[i] = 0;
	}
	v->said[i] |= flags;
}

TB_EXPORT __u32 tb_said(const struct tb_voice *v, __u32 label)
{
	__u32 i = 0;

	while (i < TB_SAID_MOST && v->said_of[i] != label)
		i++;
	return i < TB_SAID_MOST ? v->said[i] : 0;
}

/* Tells a rank that the own rows of an op are on their way. */
void tb_say_ready(struct tb_voice *v, __u32 rank, const struct tb_own_op *o)
{
	struct tb_header head = tb_begin_word(v, TB_TYPE_READY, o->label, o->layout);

	head.seq = tb_be32(o->result_seq);
	tb_tell(v, rank, &head, NULL, 0, 1);
}

/* Tells a rank how far this one is: the marks say it. And that it abstained: a word may be lost. */
void tb_acknowledge(struct tb_voice *v, __u32 rank, __u32 label, __u32 layout)
{
	struct tb_header head = tb_begin_word(v, TB_TYPE_GONE, label, layout);

	head.flags = tb_be16(tb_said(v, label));
	tb_tell(v, rank, &head, NULL, 0, 1);
}

/* Tells all others how far this one is, by a word about an op. */
void tb_tell_all(struct tb_voice *v, const struct tb_own_op *o)
{
	const struct tb_terms *t = (const struct tb_terms *)v->terms;
	__u32 p;

	for (p = 0; p < t->ranks; p++)
		if (p != t->rank && !tb_has(t->gone, p))
			tb_acknowledge(v, p, o->label, o->layout);
}

/*
 * The published mark is the newest op before which nothing is outstanding. The last row of an op tells it, as a rule. Where
 * an op had none, or left before the one before it, a word does.
 */
TB_EXPORT void tb_publish(struct tb_voice *v)
{
	const struct tb_own_op *p = (const struct tb_own_op *)((struct tb_terms *)v->terms)->first;
	struct tb_own_marks *m = (struct tb_own_marks *)v->marks;
	const struct tb_own_op *told = NULL;

	for (; p && tb_half_of(p, 0)->phase == TB_PHASE_DONE;
	     p = (const struct tb_own_op *)p->after) {
		if (tb_distance(p->label, m->published) > 0)
			m->published = p->label;
		told = p->own ? p : told;
	}
	if (told && tb_distance(told->label, m->told) > 0) {
		m->told = told->label;
		tb_tell_all(v, told);
	}
}

/*
 * Asks a switch for results by sending it the own rows again, with FLUSH where it is to release them. Of the first
 * such time it is noted how many results had come.
 */
static void tb_send_again(struct tb_voice *v, const struct tb_half *h, __u32 rank,
			  const __s64 *places, __u32 count, __s64 now)
{
	const struct tb_terms *t = (const struct tb_terms *)v->terms;
	struct tb_own_op *o = (struct tb_own_op *)h->own_op;
	const __u64 *states = (const __u64 *)o->states;
	__u8 *copies = malloc((__u64)count * o->stride);
	const struct tb_op *r = tb_record(t, o);
	__u32 i, flags = TB_FLAG_REPEAT | (h->release ? TB_FLAG_FLUSH : 0);

	if (!copies)
		return;
	for (i = 0; i < count; i++) {
		__u8 *copy = copies + (__u64)i * o->stride;

		memcpy(copy, (const __u8 *)o->given + places[i] * o->stride, o->stride);
		tb_add_flags(copy, o->stride, 1, states + 4 * places[i], flags, 0);
	}
	*(h->release ? &v->rows_flushed : &v->rows_sent_again) += count;
	tb_submit_copies((struct tb_line *)v->line, o->label, rank, now + t->stage_max, o->stride,
			 o->largest, copies, count);
	tb_pump_soon((struct tb_line *)v->line);
	if (!h->release || o->closed_at)
		return;
	o->closed_at = now;
	o->came_by = r ? r->results_in : 0;
}

static void tb_request_rows(struct tb_voice *v, const struct tb_half *h,
			    const struct tb_incoming *f, struct tb_header head, __s64 now)
{
	__s64 *places = malloc(f->requests * sizeof(*places));
	__u32 count = places ? tb_requests(h, f->rank, places) : 0;

	head.rows = tb_be16(f->rows);
	head.flags = h->results ? 0 : tb_be16(TB_FLAG_FIRST_HALF);
	if (f->rank >= ((const struct tb_terms *)v->terms)->ranks)
		tb_send_again(v, h, f->rank, places, count, now);
	else
		v->repair_asked += tb_tell_places(v, f->rank, &head, places, count,
						  1 << tb_least(f->expired, 2));
	free(places);
}

/*
 * A rank has been asked for a word; it was last heard of at heard. What rose since it was asked before was no answer: how long
 * one takes is said by words alone.
 */
TB_EXPORT void tb_question(__s64 *open, __u32 rank, __s64 now, __s64 heard)
{
	if (!open[rank] || open[rank] < heard)
		open[rank] = now;
}

/* A rank said something: what it was asked before it has answered. */
TB_EXPORT void tb_spoke(struct tb_overtime *v, __s64 *open, __u32 rank, __s64 now)
{
	__s64 since = open[rank];
	__u32 i;

	open[rank] = 0;
	if (!since || now - since > v->longest)
		return;
	v->answers[v->answered++ % TB_KEPT_ANSWERS] = now - since;
	v->answer = 0;
	for (i = 0; i < TB_KEPT_ANSWERS; i++)
		v->answer = tb_most(v->answer, v->answers[i]);
}

/* Asks for the rows of a half that are lost, and for marks that are missing (clock-23). */
static void tb_ask_half(struct tb_voice *v, const struct tb_half *h, __s64 now)
{
	const struct tb_terms *t = (const struct tb_terms *)v->terms;
	const struct tb_own_op *o = (const struct tb_own_op *)h->own_op;
	const struct tb_incoming *f = (const struct tb_incoming *)h->flows, *end = f + h->count;
	struct tb_header head = tb_begin_word(v, TB_TYPE_REPAIR, o->label, o->layout);

	for (; f && f < end; f++) {
		if (f->requests)
			tb_request_rows(v, h, f, head, now);
		if (f->asked) {
			tb_question((__s64 *)t->asked, f->rank, now, tb_heard(t, f->rank));
			tb_tell(v, f->rank, &head, NULL, 0, f->came ? TB_COPIES : 1);
			v->asked++;
		}
	}
}

/* Looks at the flows of all ops that are due, and asks for what they lack. */
TB_EXPORT void tb_ask_others(struct tb_voice *v, __s64 now)
{
	struct tb_terms *t = (struct tb_terms *)v->terms;
	struct tb_own_op *o;
	const struct tb_half *h;

	t->listen = 0;
	for (o = (struct tb_own_op *)t->first; o; o = (struct tb_own_op *)o->after) {
		h = now >= o->listen ? (const struct tb_half *)tb_listen_to(t, o, now) : NULL;
		if (o->listen < TB_NEVER)
			t->listen = tb_earlier(t->listen, o->listen);
		if (h)
			tb_ask_half(v, h, now);
	}
}
