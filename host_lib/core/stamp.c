// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Headers of packets whose payloads are in place. One is made late, just before its burst leaves: marks, deadlines and
 * lateness change until then. It is a copy of a template with what differs from packet to packet.
 */
#include "core.h"

#include <string.h>

#include "check.h"
#include "tag.h"

#define TB_EPOCH_BIT ((__u64)tb_be16(TB_FLAG_EPOCH) << 16) /* in the first word */

/* The check or tag behind a payload that left state. */
static void tb_prove(struct tb_header *head, const __u64 *state, const __u64 *key)
{
	__u64 a2 = state[0], b2 = state[1], a3 = state[2], b3 = state[3], pairs = 0;
	struct tb_tag_state opened;
	tb_u64 *first = (tb_u64 *)head;

	if (key) {
		*first = (*first & ~TB_EPOCH_BIT) | key[TB_KEY_HEAD - 1];
		tb_tag_open(&opened, head, key);
		head->check =
			tb_be64(tb_tag_close(&opened, state[0] + tb_tag_head(head, state[1], key)));
		return;
	}
	TB_CHECK_HEADER(head);
	(void)pairs;
	head->check = tb_be64(tb_check_mix(a2, a3, b2, b3));
}

TB_EXPORT void tb_prove_packet(struct tb_header *head, const void *payload, __u32 length,
			       const __u64 *key)
{
	__u64 a2 = 0, b2 = 0, a3 = 0, b3 = 0, pairs = 0, hash = 0;
	__u32 i, words = length / 8;

	for (i = 0; key && i < words; i++)
		hash += tb_tag_word(tb_word(payload, i), key[TB_KEY_WORDS + i]);
	for (i = 0; !key && i < words; i += 2)
		TB_CHECK_PAIR(payload, i);
	(void)pairs;
	tb_prove(head, (__u64[]){ key ? hash : a2, key ? length : b2, a3, b3 }, key);
}

TB_EXPORT int tb_proven(const struct tb_header *packet, __u32 length, const __u64 *even,
			const __u64 *odd, __u32 most)
{
	struct tb_header head;
	const __u64 *key;

	if (length < sizeof(head) || length % TB_ROW_STEP || packet->version != TB_VERSION)
		return 0;
	head = *packet;
	key = head.flags & tb_be16(TB_FLAG_EPOCH) ? odd : even;
	length -= sizeof(head);
	if (key && length > most)
		return 0;
	tb_prove_packet(&head, packet + 1, length, key);
	return head.check == packet->check;
}

/* A column of s; one that is not there is NULL. */
#define TB_COLUMN(type, name) const type *name = (const void *)s->name

TB_EXPORT void tb_stamp(const struct tb_stamp *s, const struct tb_run *runs, __u32 count)
{
	TB_COLUMN(__u64, states);
	TB_COLUMN(__u32, places);
	TB_COLUMN(__u32, groups);
	TB_COLUMN(__u16, exponents);
	TB_COLUMN(__u16, needs);
	TB_COLUMN(__u32, scales);
	TB_COLUMN(__u16, counts);
	TB_COLUMN(__u8, weights);
	const struct tb_run *run;
	struct tb_header base;
	__u32 i;

	memcpy(&base, (const void *)s->head, sizeof(base));
	for (run = runs; run < runs + count; run++) {
		base.owner = run->owner;
		base.rows = tb_be16(run->rows);
		for (i = 0; i < run->count; i++) {
			__u64 p = run->first + i, v = groups ? groups[p] : p;
			struct tb_header *head = (void *)(s->packets + p * s->stride);

			*head = base;
			head->seq = tb_be32(run->seq + places[p]);
			head->row = tb_be16(i);
			if (exponents)
				head->exponent = tb_be16(exponents[v]);
			if (needs)
				head->need = tb_be16(needs[v]);
			if (scales)
				head->scale = tb_be32(scales[v]);
			if (counts)
				head->count = tb_be16(counts[v]);
			if (weights)
				head->weight = weights[v];
			if (i == run->last && head->type == TB_TYPE_CONTRIBUTION)
				head->contributed = tb_be32(s->mark);
			else if (i == run->last)
				head->published = tb_be32(s->mark);
			tb_prove(head, states + 4 * p, (const void *)s->key);
		}
	}
}

TB_EXPORT void tb_add_flags(__u8 *packets, __u32 stride, __u32 count, const __u64 *states,
			    __u32 flags, const __u64 *key)
{
	struct tb_header *head;
	__u64 p;

	for (p = 0; p < count; p++) {
		head = (void *)(packets + p * stride);
		head->flags |= tb_be16(flags);
		tb_prove(head, states + 4 * p, key);
	}
}
