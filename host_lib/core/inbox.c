// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What other ranks say in control packets. The library takes questions for rows (clock-23) and marks, and plain answers to
 * them itself, in a job without a key, and leaves all else to Python. The kernel has checked them, they are checked again.
 */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <sys/socket.h>

/* Taken at once from a socket: the rest stays readable, so that ops go on between two helpings of a flood. */
#define TB_HELPING 256

/* The next control packet: its bytes; 0: there is none; -1: it was of a stranger. */
TB_EXPORT int tb_take_word(struct tb_source *s, void *out, __u32 room)
{
	struct sockaddr_storage name;
	socklen_t size = sizeof(name);
	const struct tb_peer *peer;
	__be32 from[4];
	ssize_t count;

	if (s->tables)
		return tb_take_control((struct tb_tables *)s->tables, out);
	count = recvfrom(s->socket, out, room, MSG_DONTWAIT, (struct sockaddr *)&name, &size);
	if (count < 0)
		return 0;
	tb_source_of(&name, from);
	peer = (const struct tb_peer *)s->peers + ((const struct tb_header *)out)->sender;
	if (count >= TB_HEADER_BYTES && from[3] == peer->address && from[0] == peer->prefix[0] &&
	    from[1] == peer->prefix[1] && from[2] == peer->prefix[2])
		return count;
	s->strange++;
	return -1;
}

/*
 * Notes the rows that a rank asks for, which later rows have passed, or whose flow has ended. A rank that is sent to fast
 * asks before the own marks rise, which wait for the slowest.
 */
static void tb_take_request(struct tb_voice *v, const struct tb_own_op *o,
			    const struct tb_header *head, __u32 length)
{
	const struct tb_own_marks *m = (const struct tb_own_marks *)v->marks;
	int first_half = (head->flags & tb_be16(TB_FLAG_FIRST_HALF)) != 0;
	__u32 label = tb_be32(head->op), mark = first_half ? m->contributed : m->published;
	int leaving = o && (first_half ? o->sending == TB_SENDING_OVER : o->queued);

	if (!(leaving || tb_distance(label, mark) <= 0) ||
	    !tb_note_request(v, label, head->sender, first_half, tb_be16(head->layout),
			     tb_be16(head->row), tb_be16(head->rows), (const __u8 *)(head + 1),
			     length))
		v->control_refused++;
}

/* Whether the own rows have been handed over, so that their mark is to come. */
static int tb_is_coming(const struct tb_own_op *o)
{
	return o && o->sending == TB_SENDING_OVER && tb_half_of(o, 0)->phase != TB_PHASE_DONE;
}

/* Whether Python has more to say of them than that. */
static int tb_is_special(const struct tb_own_op *o)
{
	return o->switched || o->empty;
}

/* Takes a REPAIR, READY or GONE packet that counts; whether ops may move on by it: not by a question. */
TB_EXPORT int tb_heed(struct tb_voice *v, const struct tb_header *head, __u32 length)
{
	const struct tb_terms *t = (const struct tb_terms *)v->terms;
	__u32 label = tb_be32(head->op), flags = tb_be16(head->flags);
	struct tb_own_op *o = tb_own_of(t, label);

	length -= sizeof(*head);
	if (head->type == TB_TYPE_REPAIR) {
		if (head->rows)
			tb_take_request(v, o, head, length);
		else if (tb_is_coming(o) && !tb_is_special(o))
			tb_say_ready(v, head->sender, o);
		else
			tb_acknowledge(v, head->sender, label, tb_be16(head->layout));
		return 0;
	}
	if (!o || head->type == TB_TYPE_READY) /* its marks say all */
		return 1;
	o->stirred = 1;
	if (flags & TB_FLAG_ABSTAIN)
		o->abstained[head->sender >> 6] |= 1ULL << (head->sender & 63);
	tb_gone(tb_half_of(o, !(flags & TB_FLAG_FIRST_HALF)), head->sender, tb_be16(head->row),
		(const __u8 *)(head + 1), length);
	return 1;
}

/* Whether Python has to read it: it knows keys, and what else is to be said of an op whose results have not left. */
static int tb_is_for_python(const struct tb_voice *v, const struct tb_header *head, __u32 length)
{
	const struct tb_own_op *o;

	if (v->key || length < sizeof(*head))
		return 1;
	if (head->type == TB_TYPE_GONE)
		return (head->flags & tb_be16(TB_FLAG_OVERFLOW)) != 0;
	o = tb_own_of((const struct tb_terms *)v->terms, tb_be32(head->op));
	if (head->type == TB_TYPE_READY)
		return !o || o->switched || o->layout != tb_be16(head->layout) || head->flags;
	return head->type != TB_TYPE_REPAIR || (!head->rows && tb_is_coming(o) && tb_is_special(o));
}

static int tb_receive(struct tb_voice *v, const struct tb_header *head, __u32 length, __s64 now)
{
	const struct tb_terms *t = (const struct tb_terms *)v->terms;

	if (!tb_proven(head, length, NULL, NULL, 0) || tb_be32(head->cookie) != t->cookie ||
	    head->owner != t->rank || head->sender == t->rank || head->sender >= t->world) {
		v->control_refused++;
		return 0;
	}
	((__s64 *)t->spoke)[head->sender] = now;
	tb_spoke((struct tb_overtime *)t->overtime, (__s64 *)t->asked, head->sender, now);
	return tb_heed(v, head, length);
}

/* Reads what others say, and answers; what is left (TB_WOKEN_*): to read the rest, and a turn. */
TB_EXPORT __u32 tb_serve(struct tb_voice *v, __s64 now)
{
	struct tb_source *s = (struct tb_source *)v->source;
	__u32 room = sizeof(struct tb_header) + v->width, found = 0;
	int most = s->tables ? TB_CONTROL_QUEUE : TB_HELPING, length = 1;
	__u64 *packet = malloc(room);

	if (s->tables)
		tb_clear(v->controls);
	for (; packet && most && length; most--) {
		length = tb_take_word(s, packet, room);
		if (length <= 0)
			continue;
		if (!tb_is_for_python(v, (struct tb_header *)packet, length))
			found |= tb_receive(v, (struct tb_header *)packet, length, now) *
				 TB_WOKEN_TURN;
		else if (tb_leave_letter(v, packet, length))
			found |= TB_WOKEN_SERVE;
	}
	free(packet);
	tb_answer(v, now);
	return found;
}
