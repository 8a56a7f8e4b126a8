// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Two CPUs that do one action each at the same moment, over and over: for BPF_PROG_TEST_RUN only. Both run this program
 * with a packet of their own, whose Ethernet destination says which of the two it is and how far it has come; the kernel
 * keeps that between repeats. They meet before every action and after it. Who waits in vain for a while is repeated.
 */
#include "ingest.h"

#define TB_PAIR_PACKET 0
#define TB_PAIR_SEAL 1
#define TB_PAIR_EXPECT_RESULTS 2
#define TB_PAIR_CONTROL 3

#define TB_PAIR_PATIENCE 512
#define TB_PAIR_DELAYS 256
/* From the type in the Ethernet header to the last of sixteen codes. */
#define TB_PAIR_FROM 12
#define TB_PAIR_BYTES 110

/* What one CPU does in one meeting. */
struct tb_pair_turn {
	__u32 kind;
	__u32 index; /* of slot, op record or, for a packet, result row; in control the byte */
	__u64 value;
	__u64 old; /* of a word of control, which is put back afterwards */
	__u8 frame[112];
	__u64 pad[13];
};

struct tb_pair_meeting {
	__u32 here[2];
	__u32 gone[2];
	__u32 delay[2];
	__u32 verdict[2];
	__u64 seen[2]; /* presence of the pair's result row right after a packet */
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

static __always_inline void tb_pair_host(const struct tb_pair_turn *turn)
{
	struct tb_slot_lock *lock;
	__u64 *word;
	void *control;

	if (turn->kind == TB_PAIR_SEAL) {
		lock = TB_LOOKUP(slot_locks, turn->index);
		if (!lock)
			return;
		bpf_spin_lock(&lock->lock);
		lock->sealed_op = turn->value;
		bpf_spin_unlock(&lock->lock);
	} else if (turn->kind == TB_PAIR_EXPECT_RESULTS) {
		word = TB_LOOKUP(expect_results, turn->index);
		if (word)
			TB_WRITE_ONCE(*word, turn->value);
	} else {
		control = TB_LOOKUP(control, 0);
		if (control && turn->index <= sizeof(struct tb_control) - 4)
			TB_WRITE_ONCE(*(__u32 *)(control + turn->index), turn->value);
	}
}

static __always_inline void tb_pair_packet(struct xdp_md *ctx, __u32 *verdict)
{
	struct tb_control *control = TB_LOOKUP(control, 0);
	__u32 sender = TB_UNKNOWN_SENDER, codes = 0;

	if (!control)
		return;
	*verdict = tb_parse(ctx, TB_PORT, control->address, control->prefix, control->group, TB_WIDTH,
			    &codes);
	if (*verdict == TB_GO_ON)
		*verdict = tb_judge(ctx, control, codes, &sender);
}

TB_PROGRAM tb_pairs(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct tb_pair_meeting *meeting;
	struct tb_pair_turn *turn;
	__u32 at, me, i, verdict = TB_GO_ON;
	__u64 *present;

	if (data + 8 > end)
		return XDP_DROP;
	at = *(__u32 *)data;
	me = *(__u8 *)(data + 4) & 1;
	meeting = TB_LOOKUP(meetings, at);
	turn = TB_LOOKUP(turns, 2 * at + me);
	if (!meeting || !turn)
		return XDP_DROP;
	if (!TB_READ_ONCE(meeting->gone[me])) {
		if (turn->kind == TB_PAIR_PACKET &&
		    bpf_xdp_store_bytes(ctx, TB_PAIR_FROM, turn->frame, TB_PAIR_BYTES))
			return XDP_DROP;
		TB_WRITE_ONCE(meeting->here[me], 1);
		if (!tb_pair_wait(&meeting->here[!me]))
			return XDP_DROP;
#pragma clang loop unroll(disable)
		for (i = 0; i < TB_PAIR_DELAYS; i++) /* read anew: the verifier follows a bound that is a constant */
			if (i >= TB_READ_ONCE(meeting->delay[me]))
				break;
		if (turn->kind == TB_PAIR_PACKET)
			tb_pair_packet(ctx, &verdict);
		else
			tb_pair_host(turn);
		present = TB_LOOKUP(presence, turn->index);
		if (present)
			meeting->seen[me] = TB_READ_ONCE(*present);
		meeting->verdict[me] = verdict;
		TB_WRITE_ONCE(meeting->gone[me], 1);
	}
	if (!tb_pair_wait(&meeting->gone[!me]))
		return XDP_DROP;
	if (turn->kind == TB_PAIR_CONTROL) {
		void *control = TB_LOOKUP(control, 0);

		if (control && turn->index <= sizeof(struct tb_control) - 4)
			TB_WRITE_ONCE(*(__u32 *)(control + turn->index), turn->old);
	}
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + 8 <= end)
		*(__u32 *)data = at + 1;
	return XDP_DROP;
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
