/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The record of an op (kernel-14, kernel-15): who has been heard, since when, and how much is in. An op exists as
 * soon as a packet names it. The record is read without a lock (its tag is one word, written last when it is started
 * and read first) and written under the op's lock, where the tag is looked at again. Only results are counted without it.
 *
 * Records are few steps' worth, the rows in flight may be hundreds' (they have windows of their own). So a label opens
 * a record only within the ring's length after the newest op that is over here, whose record may go; else one packet
 * could take the record of an op in progress. Results further ahead, and those of an op whose record is gone, are rows
 * like others: a rank that was stopped finds them in its memory. They leave no trace in records.
 */
#ifndef TB_OP_H
#define TB_OP_H

#include "compat.h"

#include "abi.h"
#include "order.h"
#include "packet.h"
#include "ranks.h"
#include "window.h"

/* What a packet has to tell an op's record. */
#define TB_NEWS_HEARD 1
#define TB_NEWS_ABSTAINED 2
#define TB_NEWS_CONTRIBUTED 4
#define TB_NEWS_PUBLISHED 8
#define TB_NEWS_BEGUN 16

/* The first two fields of a record. */
union tb_op_key {
	__u64 word;
	struct {
		__u32 cookie;
		__u32 op;
	};
};

/* How many results are in, and of what: one word, so that they can be counted without the lock. */
union tb_op_results {
	__u64 word;
	struct {
		__u32 tag;
		__u32 in;
	};
};

/* Whether records do not reach as far as this label. */
static __always_inline int tb_op_ahead(const struct tb_control *control, __u32 op)
{
	return tb_distance(op, TB_READ_ONCE(control->released)) > TB_OP_STEPS << TB_OP_INDEX_BITS;
}

/*
 * As tb_tag, but a newer op's record is one no further ahead than records reach: in one comparison, since the verifier
 * follows each. Beyond that it is one that nobody has used for half the circle of labels, an old one.
 */
static __always_inline __u32 tb_op_tag_of(const struct tb_control *control,
					  const struct tb_packet *p, union tb_op_key key)
{
	__u32 reach = TB_READ_ONCE(control->released) + (TB_OP_STEPS << TB_OP_INDEX_BITS) - p->op;

	if (key.cookie != p->cookie)
		return TB_TAG_OLD;
	if (key.op == p->op)
		return TB_TAG_SAME;
	return key.op - p->op - 1 < reach ? TB_TAG_NEWER : TB_TAG_OLD;
}

static __always_inline __u32 tb_op_tag(const struct tb_control *control, const struct tb_op *op,
				       const struct tb_packet *p)
{
	union tb_op_key key = { .word = TB_READ_ONCE(*(const tb_u64 *)op) };

	return tb_op_tag_of(control, p, key);
}

/* The same without the op's lock. What is read through the record that comes back is no older than the tag. */
static __always_inline struct tb_op *tb_op_look(const struct tb_control *control, struct tb_op *op,
						const struct tb_packet *p, __u32 *tag)
{
	union tb_op_key key = { .word = TB_READ_ONCE(*(const tb_u64 *)op) };

	*tag = tb_op_tag_of(control, p, key);
	return (void *)op + tb_after(key.word);
}

/* Under the op's lock. Arrivals are not cleared: one is valid only if its rank's heard bit is set. */
static __always_inline void tb_op_start(struct tb_op *op, const struct tb_packet *p, __u32 codes,
					__u64 now)
{
	union tb_op_key key = { .cookie = p->cookie, .op = p->op };
	union tb_op_results none = { .tag = p->cookie ^ p->op };
	int i;

	op->opened_ns = now;
#pragma unroll
	for (i = 0; i < TB_RANK_WORDS; i++) {
		op->heard[i] = 0;
		op->tail_contributed[i] = 0;
		op->tail_published[i] = 0;
		op->abstained[i] = 0;
		op->begun[i] = 0;
	}
	op->majority_ns[0] = 0;
	op->majority_ns[1] = 0;
	op->heard_live = 0;
	op->rows = 0;
	op->rows_complete = 0;
	TB_WRITE_ONCE(*(tb_u64 *)&op->results_tag, none.word);
	op->progress = 0;
	op->late = 0;
	op->late_results = 0;
	op->layout = p->layout;
	op->codes = codes;
	op->first_sender = p->sender;
	tb_store_release(op, key.word);
}

/*
 * How often to retry subtracting our 1. A try fails when another CPU changes the word at the same time. If all fail, that
 * op counts one row too many.
 */
#define TB_OP_TRIES 64

/*
 * A result has been taken: how many are in with it, or 0 if the record is another op's. One that becomes another op's
 * between look and addition gets back what it had, unless it has been started anew once more.
 */
static __always_inline __u32 tb_op_result_in(struct tb_op *op, const struct tb_packet *p)
{
	tb_u64 *word = (tb_u64 *)&op->results_tag;
	union tb_op_results was = { .word = TB_READ_ONCE(*word) }, one = { .in = 1 };
	__u32 tag = p->cookie ^ p->op, other;
	__u64 seen;
	int i;

	if (was.tag != tag)
		return 0;
	was.word = __sync_fetch_and_add(word, one.word);
	if (was.tag == tag)
		return was.in + 1;
	other = was.tag;
	was.in++;
#pragma clang loop unroll(disable)
	for (i = 0; i < TB_OP_TRIES && was.tag == other; i++) {
		seen = __sync_val_compare_and_swap(word, was.word, was.word - one.word);
		if (seen == was.word)
			break;
		was.word = seen;
	}
	return 0;
}

/*
 * The last percent of an owner's rows (max(1, rows / 100) of them), or a mark that says that everything was
 * sent. Multiplied out: a division costs more than all the rest of this.
 */
static __always_inline int tb_in_tail(const struct tb_packet *p, __u32 mark)
{
	__u32 left = p->rows - p->row;

	return left <= 1 || left * 100 <= p->rows || tb_distance(mark, p->op) >= 0;
}

/* In place of rows: there would have been some now, but they come too late for everybody. */
static __always_inline int tb_says_late(const struct tb_packet *p)
{
	return p->type == TB_TYPE_READY && p->flags & TB_FLAG_LATE;
}

static __always_inline __u32 tb_op_news(const struct tb_op *op, const struct tb_packet *p)
{
	__u32 news = 0;

	if (!tb_rank_in(op->heard, p->sender))
		news |= TB_NEWS_HEARD;
	if (p->flags & TB_FLAG_ABSTAIN && !tb_rank_in(op->abstained, p->sender))
		news |= TB_NEWS_ABSTAINED;
	if ((p->type == TB_TYPE_CONTRIBUTION || tb_says_late(p)) &&
	    !tb_rank_in(op->begun, p->sender))
		news |= TB_NEWS_BEGUN;
	if (p->type == TB_TYPE_CONTRIBUTION && tb_in_tail(p, p->contributed) &&
	    !tb_rank_in(op->tail_contributed, p->sender))
		news |= TB_NEWS_CONTRIBUTED;
	if (p->type == TB_TYPE_RESULT && tb_in_tail(p, p->published) &&
	    !tb_rank_in(op->tail_published, p->sender))
		news |= TB_NEWS_PUBLISHED;
	return news;
}

/* Arrival times are in us after the op was opened, plus one: 0 means not yet. */
static __always_inline __u32 tb_since(const struct tb_op *op, __u64 now)
{
	return now > op->opened_ns ? (now - op->opened_ns) / 1000 + 1 : 1;
}

/*
 * Under the op's lock: takes the news that are still news, and returns the events they make as a bitmap of
 * 1 << TB_EVENT_x. need counts this rank's own launch: [0] is the majority with it, [1] without.
 */
static __always_inline __u32 tb_op_take(struct tb_op *op, struct tb_arrival *arrival,
					const struct tb_packet *p, __u32 news,
					const struct tb_control *control, int live, __u64 now)
{
	__u32 events = 0, since = tb_since(op, now);

	if (news & TB_NEWS_HEARD && !tb_rank_in(op->heard, p->sender)) {
		tb_rank_put(op->heard, p->sender);
		arrival->first_us = since;
		arrival->contributed_us = 0;
		arrival->published_us = 0;
		arrival->row_us = 0;
		if (live) {
			op->heard_live++;
			if (!op->majority_ns[0] && op->heard_live + 1 >= control->need) {
				op->majority_ns[0] = now;
				events |= 1 << TB_EVENT_MAJORITY;
			}
			if (!op->majority_ns[1] && op->heard_live >= control->need) {
				op->majority_ns[1] = now;
				events |= 1 << TB_EVENT_MAJORITY;
			}
		}
	}
	if (news & TB_NEWS_BEGUN && !tb_rank_in(op->begun, p->sender)) {
		tb_rank_put(op->begun, p->sender);
		arrival->row_us = since;
	}
	if (news & TB_NEWS_ABSTAINED)
		tb_rank_put(op->abstained, p->sender);
	if (news & TB_NEWS_CONTRIBUTED && !tb_rank_in(op->tail_contributed, p->sender)) {
		tb_rank_put(op->tail_contributed, p->sender);
		arrival->contributed_us = since;
		if (live && tb_ranks_within(control->live, op->tail_contributed))
			events |= 1 << TB_EVENT_TAIL;
	}
	if (news & TB_NEWS_PUBLISHED && !tb_rank_in(op->tail_published, p->sender)) {
		tb_rank_put(op->tail_published, p->sender);
		arrival->published_us = since;
		if (live && tb_ranks_within(control->live, op->tail_published))
			events |= 1 << TB_EVENT_RESULTS_TAIL;
	}
	return events;
}

#endif /* TB_OP_H */
