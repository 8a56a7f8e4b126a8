// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Two CPUs that do one action each at the same moment, over and over: for BPF_PROG_TEST_RUN only. The first byte of a
 * frame says which of the two CPUs it is. The second one puts a state into the maps; they meet, act and meet again; then
 * it takes the state. So its caches have the memory, and stores of the first CPU are seen late, as out of order as can be.
 * A CPU that waits in vain for a while is repeated.
 */
#include "ingest.h"

#define TB_PAIR_PACKET 0
#define TB_PAIR_SEAL 1
#define TB_PAIR_EXPECT 2
#define TB_PAIR_CONTROL 3

#define TB_PAIR_PATIENCE 512
#define TB_PAIR_DELAYS 256
/* From the type in the Ethernet header to the last of sixteen codes. */
#define TB_PAIR_FROM 12
#define TB_PAIR_BYTES 110

/* What actions change, see tests/interleave/tables.py. */
struct tb_pair_state {
	__u64 sealed;
	struct tb_control control;
	struct tb_slot slot;
	__u64 sums[8];
	struct tb_result record;
	struct tb_presence presence;
	__u64 results[2];
	struct tb_expect_results expected;
	struct tb_op op;
	struct tb_arrival arrivals[3];
	struct tb_peer_state peers[3];
};

struct tb_meeting {
	__u32 ready[2]; /* the state is there; the other one is not used */
	__u32 here[2];
	__u32 gone[2];
	__u32 delay[2];
	__u32 verdict[2];
	__u32 kind[2];
	__u32 at[2]; /* of a move of the host: byte of the control record */
	__u64 value[2];
	__u64 seen[2]; /* presence of the result row right after the action */
	__u8 frame[2][112];
	struct tb_pair_state state;
};

static __always_inline int tb_pair_wait(const __u32 *flag)
{
	__u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < TB_PAIR_PATIENCE; i++)
		if (TB_READ_ONCE(*flag))
			return 1;
	return 0;
}

static __always_inline void tb_pair_copy(void *map, void *state, __u32 bytes, int take)
{
	__u64 *to = take ? state : map;
	const __u64 *from = take ? map : state;
	__u32 i;

	if (!map)
		return;
#pragma unroll
	for (i = 0; i < bytes / 8; i++)
		to[i] = from[i];
}

static __always_inline void tb_pair_seal(__u32 op)
{
	struct tb_slot_lock *lock = TB_LOOKUP(slot_locks, TB_PAIR_SLOT);

	if (!lock)
		return;
	bpf_spin_lock(&lock->lock);
	lock->sealed_op = op;
	bpf_spin_unlock(&lock->lock);
}

static __always_inline void tb_pair_state(struct tb_pair_state *s, int take)
{
	struct tb_slot_lock *lock = TB_LOOKUP(slot_locks, TB_PAIR_SLOT);
	__u32 i;

	if (!take)
		tb_pair_seal(s->sealed);
	else if (lock)
		s->sealed = lock->sealed_op;
	tb_pair_copy(TB_LOOKUP(control, 0), &s->control, sizeof(s->control), take);
	tb_pair_copy(TB_LOOKUP(slots, TB_PAIR_SLOT), &s->slot, sizeof(s->slot), take);
	tb_pair_copy(TB_LOOKUP(sums, TB_PAIR_SLOT), s->sums, sizeof(s->sums), take);
	tb_pair_copy(TB_LOOKUP(result_records, TB_PAIR_ROW), &s->record, sizeof(s->record), take);
	tb_pair_copy(TB_LOOKUP(presence, TB_PAIR_ROW), &s->presence, sizeof(s->presence), take);
	tb_pair_copy(TB_LOOKUP(results, TB_PAIR_ROW), s->results, sizeof(s->results), take);
	tb_pair_copy(TB_LOOKUP(expect_results, TB_PAIR_RECORD), &s->expected, sizeof(s->expected),
		     take);
	tb_pair_copy(TB_LOOKUP(ops, TB_PAIR_RECORD), &s->op, sizeof(s->op), take);
#pragma unroll
	for (i = 0; i < 3; i++) {
		tb_pair_copy(TB_LOOKUP(arrivals, TB_PAIR_RECORD * TB_MAX_RANKS + 1 + i),
			     &s->arrivals[i], sizeof(s->arrivals[i]), take);
		tb_pair_copy(TB_LOOKUP(peer_states, 1 + i), &s->peers[i], sizeof(s->peers[i]),
			     take);
	}
}

static __always_inline void tb_pair_host(struct tb_control *control, __u32 kind, __u32 at,
					 __u64 value)
{
	__u64 *word;

	if (kind == TB_PAIR_SEAL) {
		tb_pair_seal(value);
	} else if (kind == TB_PAIR_EXPECT) {
		word = TB_LOOKUP(expect_results, TB_PAIR_RECORD);
		if (word)
			TB_WRITE_ONCE(*word, value);
	} else if (at <= sizeof(*control) - 4) {
		TB_WRITE_ONCE(*(__u32 *)((void *)control + at), value);
	}
}

TB_PROGRAM tb_pairs(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct tb_control *control = TB_LOOKUP(control, 0);
	__u32 me, i, codes = 0, sender = TB_UNKNOWN_SENDER, verdict = TB_GO_ON;
	struct tb_meeting *meeting;
	__u64 *present;
	__u32 *turn;

	if (data + 1 > end || !control)
		return XDP_DROP;
	me = *(__u8 *)data & 1;
	turn = TB_LOOKUP(turns, me);
	if (!turn)
		return XDP_DROP;
	meeting = TB_LOOKUP(meetings, *turn);
	if (!meeting)
		return XDP_DROP;
	if (!TB_READ_ONCE(meeting->gone[me])) {
		if (me && !TB_READ_ONCE(meeting->ready[0])) {
			tb_pair_state(&meeting->state, 0);
			TB_WRITE_ONCE(meeting->ready[0], 1);
		}
		if (bpf_xdp_store_bytes(ctx, TB_PAIR_FROM, meeting->frame[me], TB_PAIR_BYTES))
			return XDP_DROP;
		if (!tb_pair_wait(&meeting->ready[0]))
			return XDP_DROP;
		TB_WRITE_ONCE(meeting->here[me], 1);
		if (!tb_pair_wait(&meeting->here[!me]))
			return XDP_DROP;
#pragma clang loop unroll(disable)
		for (i = 0; i < TB_PAIR_DELAYS;
		     i++) /* read anew: the verifier follows a bound that is a constant */
			if (i >= TB_READ_ONCE(meeting->delay[me]))
				break;
		if (meeting->kind[me] != TB_PAIR_PACKET) {
			tb_pair_host(control, meeting->kind[me], meeting->at[me],
				     meeting->value[me]);
		} else {
			verdict = tb_parse(ctx, TB_PORT, control->address, control->prefix,
					   control->group, TB_WIDTH, &codes);
			if (verdict == TB_GO_ON)
				verdict = tb_judge(ctx, control, codes, &sender);
		}
		present = TB_LOOKUP(presence, TB_PAIR_ROW);
		if (present)
			meeting->seen[me] = TB_READ_ONCE(*present);
		meeting->verdict[me] = verdict;
		TB_WRITE_ONCE(meeting->gone[me], 1);
	}
	if (!tb_pair_wait(&meeting->gone[!me]))
		return XDP_DROP;
	if (me)
		tb_pair_state(&meeting->state, 1);
	TB_WRITE_ONCE(*turn, *turn + 1);
	return XDP_DROP;
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
