// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The switch's program behind a turntable, for BPF_PROG_TEST_RUN only (see bench.bpf.c). A released row leaves as a
 * result, so the turntable keeps what the next packet has to be, by CPU, and writes it anew; all ranks send the same
 * codes, whose mean they are, so that the codes can stay. Its few ns are in the benchmark's figures.
 */
#include "aggregate.h"

#define TB_TURN_NOT 0 /* the same again */
#define TB_TURN_RANK 1 /* next rank; after the last the next row */
#define TB_TURN_ROW 2 /* next row */

struct tb_turn {
	__u64 head[TB_HEADER_BYTES / 8];
	__be32 source;
	__be32 destination;
	__u32 turn;
	__u32 ranks;
};

static __always_inline void tb_turn_on(struct tb_turn *turn)
{
	struct tb_header *head = (struct tb_header *)turn->head;
	__u64 word1 = tb_word(head, 1), word2 = tb_word(head, 2), check;

	if (turn->turn == TB_TURN_NOT)
		return;
	if (turn->turn == TB_TURN_RANK && head->sender + 1U < turn->ranks) {
		head->sender++;
	} else {
		if (turn->turn == TB_TURN_RANK)
			head->sender = 0;
		head->seq = tb_be32(tb_be32(head->seq) + 1);
	}
	check = tb_check_moved(tb_be64(head->check), 1, tb_word(head, 1) - word1);
	head->check = tb_be64(tb_check_moved(check, 2, tb_word(head, 2) - word2));
}

TB_PROGRAM tb_switch_bench(struct xdp_md *ctx)
{
	struct tb_turn *turn = TB_LOOKUP(switch_turn, bpf_get_smp_processor_id());
	struct tb_frame f;
	int i;

	if (turn && turn->ranks && tb_frame_of(ctx, &f)) {
#pragma unroll
		for (i = 0; i < TB_HEADER_BYTES / 8; i++)
			((tb_u64 *)f.head)[i] = turn->head[i];
		f.ip->saddr = turn->source;
		f.ip->daddr = turn->destination;
		tb_turn_on(turn);
	}
	return tb_relay(ctx);
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
