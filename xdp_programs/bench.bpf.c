// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The worker's program behind a turntable, for BPF_PROG_TEST_RUN only. A repeated packet measures nothing but
 * the refused duplicate, and one system call a packet measures the system call; the kernel keeps what a
 * program did to the packet between repeats, so the packet is moved on here, check included, before the same
 * inline body takes it: a few ns, which the benchmark's figures include.
 *
 * The UDP source port, which nothing else looks at, says how.
 */
#include "ingest.h"

#define TB_TURN_NOT 0 /* as it is: a duplicate */
#define TB_TURN_RANK 1 /* next rank; after the last the next row, after the last the next op */
#define TB_TURN_ROW 2 /* next row; after the last the next op */
#define TB_TURN_FORGET \
	3 /* same rank again, its bit taken out of the record (two CPUs on one slot) */
#define TB_TURN_LAP 4 /* next row; after the last the next rank, after the last the next op */

/* A probe that was reflected in the last round becomes the probe again. */
static __always_inline void tb_turn_back(const struct tb_frame *f)
{
	__u64 word;

	tb_reflect(f, f->head->owner, 0, tb_be64(f->head->check), 0);
	word = tb_word(f->head, 0);
	f->head->type = TB_TYPE_PROBE;
	f->head->check =
		tb_be64(tb_check_moved(tb_be64(f->head->check), 0, tb_word(f->head, 0) - word));
}

static __always_inline void tb_turn(const struct tb_frame *f, struct tb_control *control)
{
	struct tb_header *head = f->head;
	__u64 word1 = tb_word(head, 1), word2 = tb_word(head, 2), check;
	__u32 turn = tb_be16(f->udp->source), seq = tb_be32(head->seq), rank = head->sender,
	      lap = 0;
	struct tb_slot *record;

	if (turn == TB_TURN_NOT)
		return;
	if (turn == TB_TURN_FORGET) {
		record = TB_LOOKUP(slots, seq & (TB_SUM_ROWS - 1));
		if (record)
			record->ranks[tb_rank_word(rank)] &= ~tb_rank_bit(rank);
		return;
	}
	rank = rank + 2 < control->ranks ? rank + 1 : 0; /* the last rank is this one */
	if (turn != TB_TURN_RANK || !rank) {
		seq = (seq + 1) & (TB_SUM_ROWS - 1);
		head->seq = tb_be32(seq);
		lap = !seq;
	}
	if (turn == TB_TURN_RANK || (turn == TB_TURN_LAP && lap))
		head->sender = rank;
	if (lap && (turn != TB_TURN_LAP || !rank)) { /* as a host does that keeps up */
		control->released = tb_be32(head->op);
		head->op = tb_be32(control->released + 1);
	}
	check = tb_check_moved(tb_be64(head->check), 1, tb_word(head, 1) - word1);
	head->check = tb_be64(tb_check_moved(check, 2, tb_word(head, 2) - word2));
}

TB_PROGRAM tb_bench(struct xdp_md *ctx)
{
	struct tb_control *control = TB_LOOKUP(control, 0);
	struct tb_frame f;

	if (control && tb_frame_of(ctx, &f)) {
		if (f.head->type == TB_TYPE_ECHO)
			tb_turn_back(&f);
		else if (f.udp->dest == tb_be16(TB_PORT))
			tb_turn(&f, control);
	}
	tb_hand_over(ctx);
	return tb_ingest(ctx);
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
