// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A rank's tables: buffers in, seals, keys, events and control packets out.
 *
 * One thread takes buffers in, others do the rest; none of them runs Python while it has the mutex, so that the receiver
 * never waits for an interpreter's lock.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "packet.h"

__thread struct tb_tables *tb_here;

#ifdef TB_SIGNATURE
__attribute__((section("tailbound"), used)) static const char tb_signature[] = TB_SIGNATURE;
#endif

TB_EXPORT void tb_close(struct tb_tables *t)
{
	struct tb_word *w;

	while ((w = t->taken)) {
		t->taken = w->after;
		free(w);
	}
	free(t->spare);
	pthread_mutex_destroy(&t->mutex);
	free(t);
}

/* maps are in the order of TB_WORKER_MAPS; they, state and the ring of events outlive the tables. NULL: no memory. */
TB_EXPORT struct tb_tables *tb_open(const struct tb_map *maps, __u32 width, __u32 result_rows,
				    struct tb_state *state, void *events)
{
	struct tb_tables *t = calloc(1, sizeof(*t));
	__u64 bytes = TB_HEADER_BYTES + (__u64)width;

	if (!t)
		return 0;
#define TB_MAP_GIVEN(name) t->name = *maps++;
	TB_WORKER_MAPS(TB_MAP_GIVEN)
	t->width = width;
	t->result_rows = result_rows;
	t->state = state;
	t->events = events;
	t->taken = t->last = calloc(1, sizeof(*t->taken));
	t->spare = calloc(1, bytes);
	pthread_mutex_init(&t->mutex, 0);
	if (t->taken && t->spare)
		return t;
	tb_close(t);
	return 0;
}

/* For Python; a full queue loses it, counted, as a full socket would. */
static void tb_pass_on(struct tb_tables *t, const void *packet, __u32 length)
{
	struct tb_state *s = t->state;
	__s64 end = s->control_head;
	struct tb_word *w = 0;

	if (end - __atomic_load_n(&s->control_tail, __ATOMIC_ACQUIRE) < TB_CONTROL_QUEUE)
		w = tb_new_word(0, packet, length);
	if (!w) {
		s->controls_lost++;
		return;
	}
	t->last->after = w;
	t->last = w;
	__atomic_store_n(&s->control_head, end + 1, __ATOMIC_RELEASE);
}

/* auth-2: in a job with a key a packet carries its tag. */
static int tb_packet_in(struct tb_tables *t, void *packet, __u32 length, tb_ip_header *ip)
{
	struct xdp_md ctx = { .data = packet, .data_end = (char *)packet + length, .ip = ip };
	const struct tb_control *control = (void *)t->control.values;
	int action = TB_READ_ONCE(control->tagged) ? tb_tagged(&ctx) : tb_checked(&ctx);

	if (action == XDP_PASS)
		tb_pass_on(t, packet, length);
	return action;
}

TB_EXPORT int tb_take_in(struct tb_tables *t, __u8 *data, __u32 length, __u32 segment,
			 const __be32 *source, __u64 now, int marked, struct tb_echo *echoes,
			 int room)
{
	tb_ip_header ip = { .tos = marked ? TB_ECN_CE : 0 };
	__u32 start = 0, size, step = segment ? segment : length;
	int reflected = 0, action;

	memcpy(ip.source, source, sizeof(ip.source));
	pthread_mutex_lock(&t->mutex);
	tb_here = t;
	t->now = now;
	do {
		size = length - start < step ? length - start : step;
		if (start & 7 && size <= TB_HEADER_BYTES + t->width) {
			/* Packets have multiples of 8 bytes: behind another size only the last segment can be one. */
			memcpy(t->spare, data + start, size);
			action = tb_packet_in(t, t->spare, size, &ip);
			memcpy(data + start, t->spare, size);
		} else {
			action = tb_packet_in(t, data + start, size, &ip);
		}
		if (action == XDP_TX && reflected < room)
			echoes[reflected++] = (struct tb_echo){ start, size };
		start += size;
	} while (start < length);
	pthread_mutex_unlock(&t->mutex);
	return reflected;
}

void tb_seal(struct tb_tables *t, __u32 op, __u32 seq, __u32 rows)
{
	struct tb_slot_lock *locks = (void *)t->slot_locks.values;
	__u64 ring = t->slot_locks.entries, i;

	pthread_mutex_lock(&t->mutex);
	for (i = 0; i < rows && i < ring; i++)
		locks[(seq + i) & (ring - 1)].sealed_op = op;
	pthread_mutex_unlock(&t->mutex);
}

/* A key of so many words comes in force in the place of that of two epochs before. */
TB_EXPORT void tb_put_key(struct tb_tables *t, __u32 epoch, const __u64 *key, __u32 words)
{
	pthread_mutex_lock(&t->mutex);
	memcpy(t->keys.values + epoch % t->keys.entries * t->keys.bytes, key, 8ULL * words);
	pthread_mutex_unlock(&t->mutex);
}

TB_EXPORT void tb_fence(struct tb_tables *t)
{
	pthread_mutex_lock(&t->mutex);
	pthread_mutex_unlock(&t->mutex);
}

TB_EXPORT __u64 tb_clear(int fd)
{
	__u64 written;

	return fd >= 0 && read(fd, &written, sizeof(written)) > 0 ? written : 0;
}

__u32 tb_take_control(struct tb_tables *t, void *out)
{
	struct tb_state *s = t->state;
	struct tb_word *w;

	if (s->control_tail == __atomic_load_n(&s->control_head, __ATOMIC_ACQUIRE))
		return 0;
	w = t->taken->after;
	free(t->taken);
	t->taken = w;
	memcpy(out, w->packet, w->length);
	__atomic_store_n(&s->control_tail, s->control_tail + 1, __ATOMIC_RELEASE);
	return w->length;
}
