// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Rows that others have requested (clock-23): those of the newest op leave first, each once per request, as copies that are
 * marked as repeated, within a share of what the path to the asker takes.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

/* Part of the pace to a rank that answers to it may take; lost results are insisted on, and have more. */
#define TB_SHARE 0.1
#define TB_RESULTS_MORE 5
#define TB_DEPTH (256 << 10) /* bytes of answers to a rank that are saved up at most */
/* Requests that are kept; beyond them the oldest op's are forgotten: they come again, or were in vain. */
#define TB_REQUESTS 1024

struct tb_request {
	struct tb_request *after;
	__u32 label, asker, layout, rows, left;
	int first_half;
	__u64 bits[]; /* places to be sent */
};

struct tb_asked {
	struct tb_words letters; /* control packets that Python is to read */
	struct tb_request *head;
	__u32 ranks;
	struct {
		double tokens;
		__s64 at;
	} budgets[]; /* by rank */
};

/* A list of rows that this rank can send again. */
struct tb_rows {
	const __u8 *packets, *usable;
	const __u64 *states, *key;
	__u32 rows, stride, first; /* first: the place of the packet that is first in memory */
};

/* NULL: no memory. */
TB_EXPORT struct tb_asked *tb_asked_open(__u32 ranks)
{
	struct tb_asked *a = calloc(1, sizeof(*a) + ranks * sizeof(*a->budgets));
	__u32 rank;

	if (!a)
		return 0;
	a->ranks = ranks;
	for (rank = 0; rank < ranks; rank++)
		a->budgets[rank].tokens = TB_DEPTH;
	return a;
}

static struct tb_asked *tb_asked_of(const struct tb_voice *v)
{
	return (struct tb_asked *)v->requests;
}

static void tb_forget(struct tb_voice *v, struct tb_request *q)
{
	struct tb_request **at = &tb_asked_of(v)->head;

	while (*at != q)
		at = &(*at)->after;
	*at = q->after;
	v->waiting--;
	free(q);
}

/* Keeps a control packet for Python; 0: there is no memory, and it is lost. */
int tb_leave_letter(struct tb_voice *v, const void *packet, __u32 length)
{
	int kept = tb_put_word(&tb_asked_of(v)->letters, 0, packet, length);

	v->letters += kept;
	return kept;
}

/* The oldest of them: its bytes; 0: there is none. */
TB_EXPORT __u32 tb_next_letter(struct tb_voice *v, void *out)
{
	struct tb_asked *a = tb_asked_of(v);
	const struct tb_word *letter = a->letters.first;
	__u32 length;

	if (!letter)
		return 0;
	length = letter->length;
	memcpy(out, letter->packet, length);
	tb_drop_word(&a->letters);
	v->letters--;
	return length;
}

TB_EXPORT void tb_asked_close(struct tb_asked *a)
{
	struct tb_request *q;

	while (a->letters.first)
		tb_drop_word(&a->letters);
	while ((q = a->head)) {
		a->head = q->after;
		free(q);
	}
	free(a);
}

/* The request of the newest op (sign 1) or the oldest (-1) whose asker is not held; of several the first. */
static struct tb_request *tb_first_of(const struct tb_asked *a, int sign, const __u64 *held)
{
	struct tb_request *q, *best = 0;

	for (q = a->head; q; q = q->after)
		if (!(held && tb_has(held, q->asker)) &&
		    (!best || sign * tb_distance(q->label, best->label) > 0))
			best = q;
	return best;
}

/*
 * Takes a request: the body is a bitmap of places from row on, most significant bit first. Rows of one list for one rank
 * are put together. Returns 0 where it asks for nothing, or beyond the list, or there is no memory.
 */
TB_EXPORT int tb_note_request(struct tb_voice *v, __u32 label, __u32 asker, int first_half,
			      __u32 layout, __u32 row, __u32 rows, const __u8 *body, __u32 length)
{
	struct tb_asked *a = tb_asked_of(v);
	struct tb_request *q, **at = &a->head;
	__u32 i, place, bits = tb_bits(body, length);

	if (!bits || row + bits > rows || asker >= a->ranks)
		return 0;
	for (q = a->head; q; q = q->after)
		if (q->label == label && q->asker == asker && q->first_half == first_half)
			break;
	if (q && (q->layout != layout || q->rows != rows)) {
		tb_forget(v, q);
		q = 0;
	}
	if (!q) {
		q = calloc(1, sizeof(*q) + (rows + 63) / 64 * sizeof(*q->bits));
		if (!q)
			return 0;
		*q = (struct tb_request){ .label = label,
					  .asker = asker,
					  .layout = layout,
					  .rows = rows,
					  .first_half = first_half };
		while (*at)
			at = &(*at)->after;
		*at = q;
		v->waiting++;
	}
	for (i = 0; i < bits; i++) {
		place = row + i;
		if (!tb_bit(body, i) || q->bits[place >> 6] >> (place & 63) & 1)
			continue;
		q->bits[place >> 6] |= 1ULL << (place & 63);
		q->left++;
	}
	if (v->waiting > TB_REQUESTS)
		tb_forget(v, tb_first_of(a, -1, 0));
	return 1;
}

/* The list that is asked for; 0: it is not kept, or is another one. */
static int tb_find_rows(const struct tb_terms *t, const struct tb_request *q, struct tb_rows *l)
{
	const struct tb_own_op *o = tb_own_of(t, q->label);
	const struct tb_given *g = (const struct tb_given *)t->given;
	__s64 start;

	if (q->first_half) {
		if (!o || !o->given || o->switched || o->layout != q->layout)
			return 0;
		start = ((const __s64 *)o->starts)[q->asker];
		*l = (struct tb_rows){ .packets = (const __u8 *)o->given + start * o->stride,
				       .states = (const __u64 *)o->states + 4 * start,
				       .key = (const __u64 *)o->tag_key,
				       .rows = ((const __s64 *)o->shares)[q->asker],
				       .stride = o->stride,
				       .first = ((const __s64 *)o->firsts)[q->asker] };
		return l->rows == q->rows;
	}
	if (o && o->results)
		g = (const struct tb_given *)o->results;
	while (g && g->label != q->label)
		g = (const struct tb_given *)g->after;
	if (!g || g->layout != q->layout)
		return 0;
	*l = (struct tb_rows){ .packets = (const __u8 *)g->packets,
			       .usable = (const __u8 *)g->usable,
			       .states = (const __u64 *)g->states,
			       .key = (const __u64 *)g->key,
			       .rows = g->rows,
			       .stride = g->stride };
	return l->rows == q->rows;
}

/*
 * Takes the first so many places out of a request: copies of rows that exist, and the places of the others, which are gone.
 * How many exist. l: all zero where there is no list.
 */
static __u32 tb_copy(struct tb_request *q, const struct tb_rows *l, __u32 count, __u8 *copies,
		     __s64 *gone)
{
	__u32 place, at, n = 0;

	q->left -= count;
	for (place = 0; count; place++) {
		if (!(q->bits[place >> 6] >> (place & 63) & 1))
			continue;
		q->bits[place >> 6] &= ~(1ULL << (place & 63));
		count--;
		at = l->rows ? (place + l->rows - l->first) % l->rows : 0;
		if (!l->rows || (l->usable && !l->usable[at])) {
			*gone++ = place;
			continue;
		}
		memcpy(copies, l->packets + (__u64)at * l->stride, l->stride);
		tb_add_flags(copies, l->stride, 1, l->states + 4 * (__u64)at, TB_FLAG_REPEAT,
			     l->key);
		copies += l->stride;
		n++;
	}
	return n;
}

/* Bytes that may be sent to a rank now, of so many bytes per second. */
static double tb_budget(struct tb_asked *a, __u32 rank, double pace, __s64 now)
{
	double *tokens = &a->budgets[rank].tokens;

	if (now > a->budgets[rank].at) {
		*tokens += (now - a->budgets[rank].at) * 1e-9 * pace;
		*tokens = *tokens < TB_DEPTH ? *tokens : TB_DEPTH;
		a->budgets[rank].at = now;
	}
	return *tokens;
}

/* Tells an asker which rows there are not. */
static void tb_tell_gone(struct tb_voice *v, const struct tb_request *q, const __s64 *gone,
			 __u32 count)
{
	struct tb_header head = tb_begin_word(v, TB_TYPE_GONE, q->label, q->layout);

	head.rows = tb_be16(count);
	head.flags = tb_be16(tb_said(v, q->label) | (q->first_half ? TB_FLAG_FIRST_HALF : 0));
	v->repair_gone += tb_tell_places(v, q->asker, &head, gone, count, 1);
}

/* Hands answers to the send queue, as far as budgets go. */
TB_EXPORT void tb_answer(struct tb_voice *v, __s64 now)
{
	struct tb_asked *a = tb_asked_of(v);
	const struct tb_terms *t = (const struct tb_terms *)v->terms;
	struct tb_line *l = (struct tb_line *)v->line;
	double pace = tb_pace(l) / tb_most(1, t->ranks - 1), share, lacking;
	__u64 held[TB_WORDS] = {};
	struct tb_request *q;
	struct tb_rows rows;
	__u32 count, burst, n;
	__u8 *copies;
	__s64 *gone;

	v->again = 0;
	while ((q = tb_first_of(a, 1, held))) {
		if (!tb_find_rows(t, q, &rows))
			rows = (struct tb_rows){};
		share = TB_SHARE * (q->first_half ? 1 : TB_RESULTS_MORE) *
			tb_rate(l, q->asker, pace);
		count = rows.rows ? tb_least(q->left,
					     tb_budget(a, q->asker, share, now) / rows.stride)
				  : q->left;
		copies = count ? malloc(count * (rows.stride + sizeof(*gone))) : 0;
		if (!copies) {
			burst = tb_least(q->left, v->largest);
			lacking = burst * rows.stride - a->budgets[q->asker].tokens;
			v->again = tb_earlier(v->again,
					      now + tb_most(0, (__s64)(lacking / share * 1e9)) + 1);
			held[q->asker >> 6] |= 1ULL << (q->asker & 63);
			continue;
		}
		a->budgets[q->asker].tokens -= (double)count * rows.stride;
		gone = (__s64 *)(copies + (__u64)count * rows.stride);
		n = tb_copy(q, &rows, count, copies, gone);
		tb_tell_gone(v, q, gone, count - n);
		tb_pump_soon(l);
		tb_submit_copies(l, q->label, q->asker, now + t->stage_max, rows.stride, v->largest,
				 copies, n);
		if (!q->left)
			tb_forget(v, q);
	}
}
