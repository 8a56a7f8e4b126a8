/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * One packet, from frame to verdict: the rules of ebpf/ applied to the maps. The udp datapath compiles it for a process
 * (host_lib/core): a frame is a datagram there, and maps are memory. A result that no rule before its row's own has
 * anything to say of is checked there (tb_quiet).
 *
 * Locks: one at a time, and nothing is looked up or called while one is held. Packet pointers are taken anew
 * from the context after each loop over the codes, so that the verifier does not carry the loop's exits on.
 */
#ifndef TB_INGEST_H
#define TB_INGEST_H

#include "check.h"
#include "lanes.h"
#include "ledger.h"
#include "maps.h"
#include "nibbles.h"
#include "op.h"
#include "packet.h"
#include "parse.h"
#include "pass.h"
#include "peer.h"
#include "proof.h"
#include "ranks.h"
#include "reflect.h"
#include "result.h"
#include "slot.h"
#include "window.h"

/* Not a verdict: a rule has something to note, and was asked only whether it has. */
#define TB_TRACE 0x102

static __always_inline void tb_emit(__u32 kind, __u32 op, __u64 ns)
{
	struct tb_event event = { .kind = kind, .op = op, .ns = ns };

	bpf_ringbuf_output(TB_MAP(events), &event, sizeof(event), 0);
}

/* kernel-6 to kernel-8: whether the packet, which is for this host, is this job's and from a rank we know. */
static __always_inline __u32 tb_admit(const struct tb_control *control, const struct tb_peer *peer,
				      const struct tb_frame *f)
{
	__u32 sender = f->head->sender;

	if (tb_be32(f->head->cookie) != control->cookie)
		return TB_VERDICT_WRONG_COOKIE;
	if (sender == control->rank || sender >= control->ranks ||
	    !tb_registered(peer->address, peer->prefix))
		return TB_VERDICT_UNKNOWN_RANK;
	if (!tb_ip_from(f->ip, peer->address, peer->prefix))
		return TB_VERDICT_WRONG_ADDRESS;
	return TB_GO_ON;
}

/* kernel-18: probes are answered from here, and their echoes measured: neither touches an op. */
static __always_inline __u32 tb_probe(const struct tb_control *control, const struct tb_frame *f,
				      const struct tb_packet *p, __u64 sum, const __u64 *key)
{
	struct tb_peer_state *state;
	struct tb_lock *lock;
	__u32 told;
	__u64 now, sent;

	if (p->owner != control->rank)
		return TB_VERDICT_NOT_FOR_THIS_RANK;
	if (p->type == TB_TYPE_PROBE) {
		/* The answer's source is the probe's destination, which must not be the group. */
		if (!tb_ip_to(f->ip, control->address, control->prefix))
			return TB_VERDICT_WRONG_ADDRESS;
#ifdef TB_IPV6
		/* What the checksum of the echo is made over. */
		if (p->codes != TB_ROW_STEP || (void *)f->codes + TB_ROW_STEP > f->end)
			return TB_VERDICT_BAD_LENGTH;
#endif
		state = TB_LOOKUP(peer_states, p->sender);
		if (!state)
			return TB_VERDICT_UNKNOWN_RANK;
		tb_reflect(f, control->rank, TB_READ_ONCE(state->marked), sum, key);
		return TB_VERDICT_REFLECTED;
	}
	if ((void *)f->codes + TB_ROW_STEP > f->end)
		return TB_VERDICT_BAD_LENGTH;
	now = bpf_ktime_get_ns();
	sent = tb_be64(*(__be64 *)f->codes);
	state = TB_LOOKUP(peer_states, p->sender);
	lock = TB_LOOKUP(peer_locks, p->sender);
	if (!state || !lock)
		return TB_VERDICT_UNKNOWN_RANK;
	told = tb_be32(f->head->seq);
	bpf_spin_lock(&lock->lock);
	if (sent > state->echoed && sent <= now) { /* else it is of a probe given up, or recorded */
		state->echoed = sent;
		state->told =
			told; /* before the round trip, which says that there is something new */
		state->rtt_ns = now - sent;
	}
	bpf_spin_unlock(&lock->lock);
	return TB_VERDICT_ECHO_TAKEN;
}

/* kernel-11: fields of rows. */
static __always_inline __u32 tb_row_rules(const struct tb_control *control,
					  const struct tb_header *head, const struct tb_packet *p)
{
	__u32 map_id =
		tb_distance(p->op, control->map_since) >= 0 ? control->map_id : control->map_before;

	if (p->codes > TB_WIDTH)
		return TB_VERDICT_BAD_LENGTH;
	if (p->row >= p->rows)
		return TB_VERDICT_SLOT_OUT_OF_RANGE;
	if (tb_be32(head->map_id) != map_id)
		return TB_VERDICT_WRONG_MAP;
	if (p->type == TB_TYPE_CONTRIBUTION && head->weight - 1U >= control->weight_cap)
		return TB_VERDICT_BAD_WEIGHT;
	return TB_GO_ON;
}

/* kernel-12: the sender's latest marks; TB_GO_ON but where it is deferred. */
static __always_inline __u32 tb_peer_note(const struct tb_packet *p, const struct tb_header *head,
					  int deferred)
{
	struct tb_peer_state *state = TB_LOOKUP(peer_states, p->sender);
	struct tb_marks marks;
	struct tb_lock *lock;
	__u64 now;

	tb_marks_of(&marks, head);
	if (!state || !tb_peer_news(state, p, &marks))
		return TB_GO_ON;
	if (deferred)
		return TB_TRACE;
	lock = TB_LOOKUP(peer_locks, p->sender);
	if (!lock)
		return TB_GO_ON;
	now = bpf_ktime_get_ns();
	bpf_spin_lock(&lock->lock);
	tb_peer_take(state, p, &marks, now);
	bpf_spin_unlock(&lock->lock);
	return TB_GO_ON;
}

/* kernel-14, before any lock; rows look again under theirs. Results need no record, only their place. */
static __always_inline __u32 tb_window_rules(const struct tb_control *control,
					     const struct tb_packet *p)
{
	int sum = p->type == TB_TYPE_CONTRIBUTION;
	__u32 place;

	if (tb_distance(p->op, control->first_op) < 0)
		return sum ? TB_VERDICT_STALE_OP : TB_VERDICT_STALE_RESULT;
	if (sum)
		place = tb_window(p->seq, TB_READ_ONCE(control->sum_base), control->sum_rows);
	else
		place = tb_window(p->seq, TB_READ_ONCE(control->result_base), TB_RESULT_ROWS);
	if (place == TB_BEHIND)
		return sum ? TB_VERDICT_STALE_OP : TB_VERDICT_STALE_RESULT;
	if (place == TB_AHEAD || (p->type != TB_TYPE_RESULT && tb_op_ahead(control, p->op)))
		return sum ? TB_VERDICT_FUTURE_OP : TB_VERDICT_FUTURE_RESULT;
	return TB_GO_ON;
}

/* What becomes of a packet of which no record can be had, since a newer op has it. */
static __always_inline __u32 tb_op_gone(const struct tb_packet *p)
{
	if (p->type == TB_TYPE_RESULT)
		return TB_GO_ON;
	return p->type == TB_TYPE_CONTRIBUTION ? TB_VERDICT_STALE_OP : TB_VERDICT_STALE_RESULT;
}

/* kernel-15: who is heard, and when. codes is 0 where the packet says nothing about V; deferred: see tb_rules. */
static __always_inline __u32 tb_op_note(const struct tb_control *control, const struct tb_packet *p,
					struct tb_op *op, __u32 codes, int deferred)
{
	__u32 slot = tb_op_slot(p->op), tag, news, events = 0;
	struct tb_arrival *arrival;
	struct tb_lock *lock;
	int fits, live;
	__u64 now = 0;

	op = tb_op_look(control, op, p, &tag);
	if (tag != TB_TAG_SAME) {
		if (p->type == TB_TYPE_RESULT && tb_op_ahead(control, p->op))
			return TB_GO_ON;
		if (deferred)
			return TB_TRACE;
		lock = TB_LOOKUP(op_locks, slot);
		if (!lock)
			return TB_VERDICT_STALE_OP;
		now = bpf_ktime_get_ns();
		bpf_spin_lock(&lock->lock);
		tag = tb_op_tag(control, op, p);
		if (tag == TB_TAG_OLD)
			tb_op_start(op, p, codes, now);
		bpf_spin_unlock(&lock->lock);
		if (tag == TB_TAG_NEWER)
			return tb_op_gone(p);
		if (tag == TB_TAG_OLD)
			tb_emit(TB_EVENT_OPENED, p->op, now);
	}
	if (op->layout != p->layout || (codes && TB_READ_ONCE(op->codes) != codes)) {
		if (deferred)
			return TB_TRACE;
		lock = TB_LOOKUP(op_locks, slot);
		if (!lock)
			return TB_VERDICT_LAYOUT_MISMATCH;
		bpf_spin_lock(&lock->lock);
		tag = tb_op_tag(control, op, p);
		fits = op->layout == p->layout;
		/* Opened by a packet without rows: the first row says how long they are. */
		if (fits && tag == TB_TAG_SAME && codes && !op->codes)
			op->codes = codes;
		fits = fits && (!codes || op->codes == codes);
		bpf_spin_unlock(&lock->lock);
		/* A newer op may have taken the record since the tag was looked at. */
		if (tag != TB_TAG_SAME)
			return tb_op_gone(p);
		if (!fits)
			return TB_VERDICT_LAYOUT_MISMATCH;
	}
	news = tb_op_news(op, p);
	if (!news)
		return TB_GO_ON;
	if (deferred)
		return TB_TRACE;
	lock = TB_LOOKUP(op_locks, slot);
	arrival = TB_LOOKUP(arrivals, slot * TB_MAX_RANKS + (p->sender & (TB_MAX_RANKS - 1)));
	if (!lock || !arrival)
		return TB_GO_ON;
	live = tb_rank_in(control->live, p->sender);
	if (!now)
		now = bpf_ktime_get_ns();
	bpf_spin_lock(&lock->lock);
	if (tb_op_tag(control, op, p) == TB_TAG_SAME)
		events = tb_op_take(op, arrival, p, news, control, live, now);
	bpf_spin_unlock(&lock->lock);
	if (events & 1 << TB_EVENT_MAJORITY)
		tb_emit(TB_EVENT_MAJORITY, p->op, now);
	if (events & 1 << TB_EVENT_TAIL)
		tb_emit(TB_EVENT_TAIL, p->op, now);
	if (events & 1 << TB_EVENT_RESULTS_TAIL)
		tb_emit(TB_EVENT_RESULTS_TAIL, p->op, now);
	return TB_GO_ON;
}

/*
 * kernel-14: a row behind the window came too late for its op, but deadlines are learned from true arrival times: it
 * leaves its stamp, and only that, while the op's record lasts. So does the word that stands for rows that were not
 * sent because they would have come too late. A rank that has left all others behind (two ranks, one of them suspect)
 * is through with an op before anything of it came: then what is late opens the record.
 */
static __always_inline void tb_op_late(const struct tb_control *control, const struct tb_packet *p,
				       struct tb_op *op, __u32 codes)
{
	__u32 slot = tb_op_slot(p->op), news, tag;
	struct tb_arrival *arrival;
	struct tb_lock *lock;
	__u64 now;

	op = tb_op_look(control, op, p, &tag);
	if (tag == TB_TAG_OLD && tb_distance(p->op, TB_READ_ONCE(control->released)) <= 0) {
		lock = TB_LOOKUP(op_locks, slot);
		if (!lock)
			return;
		now = bpf_ktime_get_ns();
		bpf_spin_lock(&lock->lock);
		tag = tb_op_tag(control, op, p);
		if (tag == TB_TAG_OLD) {
			tb_op_start(op, p, codes, now);
			tag = TB_TAG_SAME;
		}
		bpf_spin_unlock(&lock->lock);
	}
	if (tag != TB_TAG_SAME || op->layout != p->layout)
		return;
	if (p->type == TB_TYPE_CONTRIBUTION)
		op->late++;
	else if (p->type == TB_TYPE_RESULT)
		op->late_results++;
	news = tb_op_news(op, p) & ~TB_NEWS_ABSTAINED;
	if (!news)
		return;
	lock = TB_LOOKUP(op_locks, slot);
	arrival = TB_LOOKUP(arrivals, slot * TB_MAX_RANKS + (p->sender & (TB_MAX_RANKS - 1)));
	if (!lock || !arrival)
		return;
	now = bpf_ktime_get_ns();
	bpf_spin_lock(&lock->lock);
	if (tb_op_tag(control, op, p) == TB_TAG_SAME)
		tb_op_take(op, arrival, p, news, control, 0, now);
	bpf_spin_unlock(&lock->lock);
}

static __always_inline void tb_codes_add(__u64 *sums, const struct tb_packet *p,
					 const struct tb_frame *f, const struct tb_fit *fit)
{
	if (fit->move)
		tb_lanes_move(sums, fit->move);
	if (p->flags & TB_FLAG_HALVES)
		tb_halves_add(sums, f->codes, f->end, fit->weight, fit->add, fit->down);
	else
		tb_lanes_add(sums, f->codes, f->end, fit->weight, fit->add, fit->down);
}

static __always_inline void tb_codes_store(__u64 *sums, const struct tb_packet *p,
					   const struct tb_frame *f, __u32 weight)
{
	if (p->flags & TB_FLAG_HALVES)
		tb_halves_store(sums, f->codes, f->end, weight);
	else
		tb_lanes_store(sums, f->codes, f->end, weight);
}

/* kernel-16: a contribution into its slot. Nobody sees the sum while it changes: the host seals before it reads. */
static __always_inline __u32 tb_contribution(struct xdp_md *ctx, const struct tb_control *control,
					     const struct tb_packet *p, struct tb_op *op)
{
	__u32 slot = p->seq & (control->sum_rows - 1), spare;
	__u32 verdict, place, weight, complete = 0, done = 0;
	struct tb_slot_lock *lock = TB_LOOKUP(slot_locks, slot);
	struct tb_slot *record = TB_LOOKUP(slots, slot);
	__u64 *sums = TB_LOOKUP(sums, slot);
	struct tb_lock *op_lock;
	struct tb_frame f;
	struct tb_fit fit;
	__s32 exponent;

	if (!lock || !record || !sums || !tb_frame_of(ctx, &f))
		return TB_VERDICT_SLOT_OUT_OF_RANGE;
	exponent = (__s16)tb_be16(f.head->exponent);
	weight = f.head->weight;
	spare = tb_slot_spare(control, weight);

	bpf_spin_lock(&lock->lock);
	place = tb_window(p->seq, TB_READ_ONCE(control->sum_base), control->sum_rows);
	verdict = tb_slot_judge(control, record, lock->sealed_op, p, place);
	if (tb_likely(verdict == TB_VERDICT_ADDED)) {
		tb_slot_join(record, p, exponent, weight, spare, &fit);
		tb_codes_add(sums, p, &f, &fit);
	} else if (verdict == TB_VERDICT_STORED) {
		weight = tb_slot_start(record, p, exponent, weight, spare);
		tb_codes_store(sums, p, &f, weight);
	}
	/* Not before the loops: the verifier would follow them for each answer. */
	if (verdict == TB_VERDICT_ADDED || verdict == TB_VERDICT_STORED)
		complete = tb_slot_count(record, control->live);
	bpf_spin_unlock(&lock->lock);

	if (verdict == TB_VERDICT_LATE)
		op->late++;
	if (verdict != TB_VERDICT_ADDED && verdict != TB_VERDICT_STORED)
		return verdict;
	op->progress++;
	if (!complete && TB_READ_ONCE(op->rows))
		return verdict;
	op_lock = TB_LOOKUP(op_locks, tb_op_slot(p->op));
	if (!op_lock)
		return verdict;
	bpf_spin_lock(&op_lock->lock);
	if (tb_op_tag(control, op, p) == TB_TAG_SAME) {
		if (!op->rows)
			op->rows = p->rows;
		op->rows_complete += (__s32)complete;
		done = complete && op->rows_complete == (__s32)op->rows;
	}
	bpf_spin_unlock(&op_lock->lock);
	if (done)
		tb_emit(TB_EVENT_COMPLETE, p->op, bpf_ktime_get_ns());
	return verdict;
}

/* kernel-17: a result into its row. Of a quiet one the check is made here, in the pass that copies it where that may be. */
static __always_inline __u32 tb_result(struct xdp_md *ctx, const struct tb_control *control,
				       const struct tb_packet *p, struct tb_op *op, int quiet,
				       const __u64 *key)
{
	__u32 position = p->seq & (TB_RESULT_ROWS - 1), verdict, place, in;
	struct tb_lock *lock = TB_LOOKUP(result_locks, position);
	struct tb_expect_results *expected = TB_LOOKUP(expect_results, tb_op_slot(p->op));
	struct tb_result *record = TB_LOOKUP(result_records, position);
	struct tb_presence *present = TB_LOOKUP(presence, position);
	union {
		struct tb_presence value;
		__u64 word;
	} here = { .value = { .op = p->op, .cookie = p->cookie } };
	__u64 *codes = TB_LOOKUP(results, position);
	__u32 rows, copied = 0;
	struct tb_frame f;
	__u64 check, rounds = 0;

	if (!lock || !expected || !record || !present || !codes || !tb_frame_of(ctx, &f))
		return TB_VERDICT_SLOT_OUT_OF_RANGE;
	if (quiet) {
		rounds = tb_pass_rounds(f.codes, f.end);
		if (!rounds)
			return TB_VERDICT_BAD_LENGTH;
	}
	check = tb_be64(f.head->check);

	bpf_spin_lock(&lock->lock);
	place = tb_window(p->seq, TB_READ_ONCE(control->result_base), TB_RESULT_ROWS);
	verdict = tb_result_judge(control, record, p, place);
	if (tb_likely(quiet)) {
		if (tb_likely(verdict == TB_VERDICT_RESULT_TAKEN)) { /* over what is over */
			copied = 1;
			if (tb_pass(codes, f.head, f.codes, f.end, rounds, TB_PASS_KEEP, key) !=
			    check)
				verdict = TB_WRONG;
		} else if (tb_pass(codes, f.head, f.codes, f.end, rounds, TB_PASS_LOOK, key) !=
			   check) {
			verdict = TB_WRONG;
		}
	}
	if (tb_likely(verdict == TB_VERDICT_RESULT_TAKEN)) {
		tb_result_take(record, p, f.head);
		if (!tb_likely(copied))
			tb_codes_copy(codes, f.codes, f.end);
		/* Not later: were this CPU held up in between, a repeat would be a duplicate of a row that nobody sees. */
		tb_store_release(present, here.word);
	}
	bpf_spin_unlock(&lock->lock);

	if (verdict != TB_VERDICT_RESULT_TAKEN)
		return verdict;
	in = tb_op_result_in(op, p);
	rows = TB_READ_ONCE(expected->rows);
	if (rows && in >= rows && TB_READ_ONCE(expected->op) == p->op)
		tb_emit(TB_EVENT_RESULTS_COMPLETE, p->op, bpf_ktime_get_ns());
	return verdict;
}

/* kernel-9 and kernel-18. TB_GO_ON for what is neither wrong nor a probe; *sender stays UNKNOWN until the check has passed. */
static __always_inline __u32 tb_verify(struct xdp_md *ctx, const struct tb_control *control,
				       struct tb_frame *f, const struct tb_packet *p,
				       const __u64 *key, __u32 *sender)
{
	__u64 check = tb_be64(f->head->check); /* before the loop: see lanes.h */
	__u64 sum = tb_proof_sum(f->head, f->codes, f->end, key);

	if (!tb_frame_of(ctx, f))
		return TB_VERDICT_BAD_LENGTH;
	if (tb_proof(sum, f->head, key) != check)
		return TB_WRONG;
	*sender = p->sender;
	if (p->type == TB_TYPE_PROBE || p->type == TB_TYPE_ECHO)
		return tb_probe(control, f, p, sum, key);
	return TB_GO_ON;
}

/* What a row behind its window is: a repeat, if it lies there still, or stale. */
static __always_inline __u32 tb_behind(const struct tb_control *control, const struct tb_packet *p,
				       __u32 verdict)
{
	__u32 slot = p->seq & (control->sum_rows - 1), position = p->seq & (TB_RESULT_ROWS - 1);
	struct tb_slot_lock *sum_lock = TB_LOOKUP(slot_locks, slot);
	struct tb_lock *result_lock = TB_LOOKUP(result_locks, position);
	struct tb_slot *sum = TB_LOOKUP(slots, slot);
	struct tb_result *result = TB_LOOKUP(result_records, position);

	if (!sum_lock || !result_lock || !sum || !result)
		return verdict;
	if (p->type == TB_TYPE_RESULT) {
		bpf_spin_lock(&result_lock->lock);
		verdict = tb_result_judge(control, result, p, TB_BEHIND);
		bpf_spin_unlock(&result_lock->lock);
	} else {
		bpf_spin_lock(&sum_lock->lock);
		verdict = tb_slot_judge(control, sum, sum_lock->sealed_op, p, TB_BEHIND);
		bpf_spin_unlock(&sum_lock->lock);
	}
	return verdict;
}

/*
 * kernel-10 to kernel-15, in their order; TB_GO_ON only for rows. Deferred: of a row whose check is yet to be made. Then
 * TB_GO_ON says that they let it go on and leave no trace of it, and anything else that they would do more.
 */
static __always_inline __u32 tb_rules(const struct tb_control *control, const struct tb_frame *f,
				      const struct tb_packet *p, struct tb_op *op, int deferred)
{
	int row = p->type == TB_TYPE_CONTRIBUTION || p->type == TB_TYPE_RESULT;
	__u32 verdict;

	/* Two ifs: the verifier looks at a third less of the widest program than with one comparison. */
	if (p->type == TB_TYPE_RESULT) {
		if (p->owner != p->sender)
			return TB_VERDICT_NOT_FOR_THIS_RANK;
	} else if (p->owner != control->rank) {
		return TB_VERDICT_NOT_FOR_THIS_RANK;
	}
	if (row) {
		verdict = tb_row_rules(control, f->head, p);
		if (verdict != TB_GO_ON)
			return verdict;
	}
	verdict = tb_peer_note(p, f->head, deferred);
	if (verdict != TB_GO_ON)
		return verdict;
	if (!row && p->type != TB_TYPE_READY)
		return TB_VERDICT_CONTROL_PASSED;

	verdict = tb_window_rules(control, p);
	if (verdict != TB_GO_ON) {
		if (deferred || !(row || tb_says_late(p)) ||
		    (verdict != TB_VERDICT_STALE_OP && verdict != TB_VERDICT_STALE_RESULT))
			return verdict;
		if (row)
			verdict = tb_behind(control, p, verdict);
		if (verdict == TB_VERDICT_STALE_OP || verdict == TB_VERDICT_STALE_RESULT)
			tb_op_late(control, p, op, row ? p->codes : 0);
		return verdict;
	}
	verdict = tb_op_note(control, p, op, row ? p->codes : 0, deferred);
	return verdict == TB_GO_ON && !row ? TB_VERDICT_CONTROL_PASSED : verdict;
}

/*
 * Whether the check can be made in the pass that takes the codes in: of a result of nearly the program's width that has
 * nothing to tell but these.
 */
static __always_inline int tb_quiet(const struct tb_control *control, const struct tb_frame *f,
				    const struct tb_packet *p, struct tb_op *op)
{
	return TB_WIDTH <= TB_PASS_WIDTH && p->type == TB_TYPE_RESULT &&
	       tb_pass_rounds(f->codes, f->end) && tb_rules(control, f, p, op, 1) == TB_GO_ON;
}

/*
 * kernel-5: whether the job's process is there, as its socket shows, which the kernel closes however it ends. If not, the
 * job is over for all packets. Asked for what is no row: rare, and never long in coming from peers that take part.
 */
static __always_inline int tb_lives(struct xdp_md *ctx, struct tb_control *control)
{
	if (TB_READ_ONCE(control->active) != TB_ACTIVE_WITH_SOCKET ||
	    tb_socket_at(ctx, control->address, control->prefix, TB_PORT))
		return 1;
	TB_WRITE_ONCE(control->active, 0);
	TB_WRITE_ONCE(control->tagged, 0);
	return 0;
}

/* kernel-5 to kernel-18. *sender stays UNKNOWN until the check has passed. */
static __always_inline __u32 tb_judge(struct xdp_md *ctx, struct tb_control *control, __u32 codes,
				      __u32 *sender)
{
	struct tb_packet p;
	struct tb_peer *peer;
	struct tb_frame f;
	const __u64 *key = 0;
	struct tb_op *op;
	__u32 verdict;
	int quiet;

	if (!TB_READ_ONCE(control->active))
		return TB_VERDICT_INACTIVE;
	if (!tb_frame_of(ctx, &f))
		return TB_VERDICT_BAD_LENGTH;
#ifndef TB_TAGGED
	if (TB_READ_ONCE(control->tagged))
		return TB_VERDICT_INACTIVE;
#endif
	peer = TB_LOOKUP(peers, f.head->sender);
	if (!peer)
		return TB_VERDICT_UNKNOWN_RANK;
	verdict = tb_admit(control, peer, &f);
	if (verdict != TB_GO_ON)
		return verdict;
	tb_packet_of(&p, f.head, codes);
	if (p.flags & TB_FLAG_HALVES)
		p.codes *= 2; /* so that both kinds of rows of an op have as many */
	op = TB_LOOKUP(ops, tb_op_slot(p.op));
	if (!op)
		return TB_VERDICT_STALE_OP;
#ifdef TB_TAGGED
	key = TB_LOOKUP(keys, p.flags & TB_FLAG_EPOCH ? 1 : 0);
	if (!key)
		return TB_VERDICT_FORGED;
#endif
	quiet = tb_quiet(control, &f, &p, op);
	if (!tb_likely(quiet)) {
		if (p.type != TB_TYPE_CONTRIBUTION && p.type != TB_TYPE_RESULT &&
		    !tb_lives(ctx, control))
			return TB_VERDICT_INACTIVE;
		verdict = tb_verify(ctx, control, &f, &p, key, sender);
		if (verdict == TB_GO_ON)
			verdict = tb_rules(control, &f, &p, op, 0);
		if (verdict != TB_GO_ON)
			return verdict;
	}
	if (p.type == TB_TYPE_CONTRIBUTION)
		verdict = tb_contribution(ctx, control, &p, op);
	else
		verdict = tb_result(ctx, control, &p, op, quiet, key);
	if (verdict != TB_WRONG)
		*sender = p.sender;
	return verdict;
}

#if !defined(TB_TAGGED) && !defined(TB_USER)
/*
 * auth-2: in a job with a key the program of tagged.bpf.c takes a packet in. This returns only where there is no such
 * program: then nothing is taken in (tb_judge).
 */
static __always_inline void tb_hand_over(struct xdp_md *ctx)
{
	const struct tb_control *control = TB_LOOKUP(control, 0);

	if (control && TB_READ_ONCE(control->tagged))
		((long (*)(void *, void *, __u32))(long)TB_TAIL_CALL)(ctx, TB_MAP(programs), 0);
}
#endif

/*
 * kernel-26: packets of a rank that came with CE, whatever became of them. Echoes apart: they are answers of the peer's
 * kernel, which no rate of the rank slows.
 */
static __always_inline void tb_count_mark(__u32 sender, __u32 verdict)
{
	struct tb_peer_state *state;

	if (sender >= TB_MAX_RANKS || verdict == TB_VERDICT_ECHO_TAKEN)
		return;
	state = TB_LOOKUP(peer_states, sender);
	if (state)
		__sync_fetch_and_add(&state->marked, 1);
}

/* kernel-21, the one way out: every packet of ours is counted once, and its verdict says what the kernel does. */
static __always_inline int tb_ingest(struct xdp_md *ctx)
{
	struct tb_control *control = TB_LOOKUP(control, 0);
	__u32 sender = TB_UNKNOWN_SENDER, codes = 0, tos = 0, verdict;
	struct tb_ledger *row;

	if (!control)
		return XDP_PASS;
	verdict = tb_parse(ctx, TB_PORT, control->address, control->prefix, control->group,
			   TB_WIDTH, &codes);
	if (verdict == TB_FOREIGN)
		return XDP_PASS;
	if (verdict == TB_GO_ON) {
		struct tb_frame f;

		if (tb_frame_of(ctx, &f))
			tos = tb_ip_tos(f.ip);
		verdict = tb_judge(ctx, control, codes, &sender);
	}
	if (!tb_likely((tos & TB_ECN_MASK) != TB_ECN_CE))
		tb_count_mark(sender, verdict);
	row = TB_LOOKUP(ledger, tb_ledger_row(bpf_get_smp_processor_id(), sender));
	if (row)
		tb_ledger_count(row, verdict);
	return tb_action(verdict);
}

#endif /* TB_INGEST_H */
