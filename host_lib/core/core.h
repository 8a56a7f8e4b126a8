/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What files of the library have of each other. What Python alone calls is TB_EXPORT where it is (kernel/core.py). */
#ifndef TB_CORE_H
#define TB_CORE_H

#include "compat.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "Tailbound needs 64-bit little-endian Linux: run it on x86-64 or arm64"
#endif

#include <time.h>

#include "ip.h"
#include "records.h"

/* For which processors a function is compiled; the best one is taken at loading. Sanitizers are not ready by then. */
#if defined(__x86_64__) && !defined(TB_SANITIZED)
#define TB_FOR_PROCESSORS __attribute__((target_clones("avx2", "default")))
#else
#define TB_FOR_PROCESSORS
#endif

#define TB_EXPORT __attribute__((visibility("default")))

/* A time that does not come, ns. */
#define TB_NEVER (1LL << 62)
/* Words of a bitmap of ranks. */
#define TB_WORDS (TB_MAX_RANKS / 64)

static inline __s64 tb_least(__s64 a, __s64 b)
{
	return a < b ? a : b;
}

static inline double tb_lower(double a, double b)
{
	return a < b ? a : b;
}

static inline __s64 tb_most(__s64 a, __s64 b)
{
	return a > b ? a : b;
}

static inline __s64 tb_earlier(__s64 a, __s64 b)
{
	return a && b ? tb_least(a, b) : a | b;
}

/* A set of ranks, and whether one is in a set or in its words. */
typedef __u64 tb_set __attribute__((vector_size(8 * TB_WORDS), aligned(8), may_alias));
#define tb_has(ranks, rank) ((ranks)[(rank) >> 6] >> ((rank)&63) & 1)

static inline tb_set tb_set_of(const __u64 *words)
{
	return *(const tb_set *)words;
}

static inline __u32 tb_count(tb_set ranks)
{
	__u32 w, n = 0;

	for (w = 0; w < TB_WORDS; w++)
		n += __builtin_popcountll(ranks[w]);
	return n;
}

static inline tb_set tb_rank(__u32 rank)
{
	tb_set one = {};

	one[rank >> 6] = 1ULL << (rank & 63);
	return one;
}

static inline struct tb_half *tb_half_of(const struct tb_own_op *o, int results)
{
	return (struct tb_half *)o->halves[results];
}

static inline __s64 tb_share(const struct tb_own_op *o, __u32 rank)
{
	return ((const __s64 *)o->shares)[rank];
}

/* Whether a rank has sent all of an op's contributions, or results, as its mark says. */
static inline int tb_sent(const struct tb_terms *t, __u32 rank, __u32 label, int results)
{
	const struct tb_peer_state *s = &((const struct tb_peer_state *)t->states)[rank];
	__u32 mark = results ? TB_READ_ONCE(s->published) : TB_READ_ONCE(s->contributed);

	return s->cookie == t->cookie && tb_distance(mark, label) >= 0;
}

/* Control packets that wait, the oldest first, each with the rank that it is for. */
struct tb_word {
	struct tb_word *after;
	__u32 rank, length;
	__u64 packet[];
};

struct tb_words {
	struct tb_word *first, *last; /* last: where there is a first */
};

/* An op in flight; 0: it is none. */
static inline struct tb_own_op *tb_own_of(const struct tb_terms *t, __u32 label)
{
	struct tb_own_op *o = (struct tb_own_op *)t->first;

	while (o && o->label != label)
		o = (struct tb_own_op *)o->after;
	return o;
}

/* When a rank was last heard of, by a word or by a mark that rose; 0: never. */
static inline __s64 tb_heard(const struct tb_terms *t, __u32 rank)
{
	const struct tb_peer_state *s = &((const struct tb_peer_state *)t->states)[rank];

	return tb_most(((const __s64 *)t->spoke)[rank], s->cookie == t->cookie ? s->last_ns : 0);
}

/* A bitmap of places in a packet, most significant bit first: whether one is set, and up to which one any is. */
static inline int tb_bit(const __u8 *body, __u32 i)
{
	return body[i >> 3] << (i & 7) & 0x80;
}

static inline __u32 tb_bits(const __u8 *body, __u32 length)
{
	__u32 bits = 8 * length;

	while (bits && !tb_bit(body, bits - 1))
		bits--;
	return bits;
}

/* CLOCK_MONOTONIC, ns. */
static inline __s64 tb_clock(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Rows of an op that a rank owns, in the order of its list. */
static inline const __s32 *tb_listed(const struct tb_own_op *o, __u32 owner)
{
	return (const __s32 *)o->row_at + ((const __s64 *)o->starts)[owner];
}

/* A reflected probe in a buffer. */
struct tb_echo {
	__u32 offset;
	__u32 length;
};

/* A packet through the rules: XDP_PASS for Python, XDP_TX back to its sender, else XDP_DROP. */
int tb_checked(struct xdp_md *ctx);
int tb_tagged(struct xdp_md *ctx);

/*
 * Takes in a received buffer: packets of segment bytes (0: one packet), the last perhaps shorter. The buffer is aligned
 * to 8 bytes. now is CLOCK_MONOTONIC in ns. marked: all packets came with CE; GRO joins none that differ in that.
 * Reflected probes are left in the buffer. Returns their number, at most room.
 */
int tb_take_in(struct tb_tables *t, __u8 *data, __u32 length, __u32 segment, const __be32 *source,
	       __u64 now, int marked, struct tb_echo *echoes, int room);

/* Seals rows from seq on up to op; when it returns, nothing is added to them. */
void tb_seal(struct tb_tables *t, __u32 op, __u32 seq, __u32 rows);

/* The address that a packet came from, alone: peers use several ports. */
struct sockaddr_storage;
void tb_source_of(const struct sockaddr_storage *name, __be32 *words);

/* Returns when no buffer is in hand that was before. */
void tb_fence(struct tb_tables *t);

/* An eventfd is clear afterwards: what had been written; -1: none. */
__u64 tb_clear(int fd);

/* Takes the oldest control packet: its bytes; 0: there is none. */
__u32 tb_take_control(struct tb_tables *t, void *out);

/* Writes the headers of packets, run by run. */
void tb_stamp(const struct tb_stamp *s, const struct tb_run *runs, __u32 count);

/* Sets flags in finished headers, and makes their checks or tags anew. */
void tb_add_flags(__u8 *packets, __u32 stride, __u32 count, const __u64 *states, __u32 flags,
		  const __u64 *key);

/*
 * Makes the check or tag of a packet, for a key (0: none) also the flag of its epoch; and whether a packet of length bytes
 * is well formed and its check or tag right, by the keys of even and odd epochs, for payloads of most bytes. length: of
 * the payload, a multiple of 16.
 */
void tb_prove_packet(struct tb_header *head, const void *payload, __u32 length, const __u64 *key);
int tb_proven(const struct tb_header *packet, __u32 length, const __u64 *even, const __u64 *odd,
	      __u32 most);

/* A send queue (send.c): submissions of each kind leave in their order. */
enum { TB_RESULTS, TB_CONTRIBUTIONS, TB_AGAIN, TB_QUEUES };
struct tb_line;
int tb_submit(struct tb_line *l, __u32 queue, struct tb_own_op *o, __u32 label, __s64 until,
	      __u32 stride, __u32 largest, const __u64 *runs, __u32 count, void *owned);
void tb_pump_alone(struct tb_line *l, __s64 now);
int tb_say(struct tb_line *l, __u32 to, const void *packet, __u32 length);
void tb_pump_soon(struct tb_line *l);
double tb_pace(const struct tb_line *l);
double tb_rate(const struct tb_line *l, __u32 rank, double most);
void tb_submit_copies(struct tb_line *l, __u32 label, __u32 to, __s64 until, __u32 stride,
		      __u32 largest, __u8 *copies, __u32 count);
void tb_results_left(const struct tb_line *l, struct tb_own_op *o, __s64 now);

/* A compiled pass (wire/jit.py): 0, and else it has failed. */
typedef int tb_code(__s64 *result, void **error, __s64 call, __s64 low, __s64 high, __s64 memory);

/* Own rows (launch.c). */
void tb_take_handed(struct tb_terms *t);
__u32 tb_launch_all(const struct tb_owner *w, struct tb_sleep *s, __s64 now, __u32 *count);

/* How halves end (close.c). */
int tb_close_alone(const struct tb_owner *w, __s64 now);
struct tb_own_op *tb_complete(const struct tb_terms *t);
__u32 tb_finish_alone(const struct tb_owner *w, struct tb_own_op *o, struct tb_sleep *s, __s64 now);

/* Rows that others have requested (answers.c). */
int tb_note_request(struct tb_voice *v, __u32 label, __u32 asker, int first_half, __u32 layout,
		    __u32 row, __u32 rows, const __u8 *body, __u32 length);
void tb_answer(struct tb_voice *v, __s64 now);
int tb_leave_letter(struct tb_voice *v, const void *packet, __u32 length);

/* Control packets, and questions for what is lost (words.c). tb_new_word, tb_put_word: 0 where there is no memory. */
struct tb_word *tb_new_word(__u32 rank, const void *packet, __u32 length);
int tb_put_word(struct tb_words *q, __u32 rank, const void *packet, __u32 length);
void tb_drop_word(struct tb_words *q);
struct tb_header tb_begin_word(const struct tb_voice *v, __u32 type, __u32 label, __u32 layout);
__u32 tb_tell_places(struct tb_voice *v, __u32 rank, struct tb_header *head, const __s64 *places,
		     __u32 count, __u32 copies);
__u32 tb_said(const struct tb_voice *v, __u32 label);
void tb_say_ready(struct tb_voice *v, __u32 rank, const struct tb_own_op *o);
void tb_acknowledge(struct tb_voice *v, __u32 rank, __u32 label, __u32 layout);
void tb_tell_all(struct tb_voice *v, const struct tb_own_op *o);
void tb_publish(struct tb_voice *v);
void tb_ask_others(struct tb_voice *v, __s64 now);
void tb_spoke(struct tb_overtime *v, __s64 *open, __u32 rank, __s64 now);

/* What other ranks say (inbox.c). */
__u32 tb_serve(struct tb_voice *v, __s64 now);

/* Ops in flight and their halves (halves.c). */
void tb_enter(struct tb_terms *t, struct tb_own_op *o);
void tb_begin_turn(struct tb_terms *t, int everything, int holds);
int tb_next_op(struct tb_terms *t, __s64 now);
int tb_stirred(const struct tb_terms *t);
void tb_hear(struct tb_terms *t);
__u64 tb_listen_to(struct tb_terms *t, struct tb_own_op *o, __s64 now);
const struct tb_op *tb_record(const struct tb_terms *t, const struct tb_own_op *o);
int tb_all_in(const struct tb_terms *t, const struct tb_own_op *o);
int tb_results_in(const struct tb_terms *t, const struct tb_own_op *o);
int tb_nobody_had_any(const struct tb_terms *t, const struct tb_own_op *o);
__s64 tb_saved(const struct tb_overtime *v, __s64 now);
void tb_charge(struct tb_overtime *v, const struct tb_half *h, __s64 now);
void tb_woke(struct tb_overtime *v, __s64 late);

/* Rows that are here (rows.c). */
void tb_summed(const struct tb_terms *t, const struct tb_own_op *o, __s64 *summed);
__u32 tb_gather(const struct tb_terms *t, const struct tb_own_op *o, __s64 *by_owner);
void tb_point_own(const struct tb_terms *t, const struct tb_own_op *o);
__u32 tb_read(const struct tb_terms *t, const struct tb_own_op *o, __u32 form);
void tb_account(const struct tb_terms *t, const struct tb_own_op *o, int results, int abstains,
		const __s64 *came, struct tb_books *lines, struct tb_tally *y);

/* How long after the start of its clock a half may last, by now (deadline.c). */
__s64 tb_lasts(const struct tb_terms *t, const struct tb_own_op *o, int results);

/*
 * Loss detection (recovery.c). Flows begin with a half, of all ranks; 0 where there is no memory. Once they say whether they
 * are awaited and finished, tb_recover: what to request (tb_incoming.requests, tb_requests) and whom to ask (asked). asks: marks may be asked
 * for. deadline: ends the half; 0: not known. Returns whether there is anything to do.
 */
void tb_begin_flows(struct tb_half *r);
void tb_free_flows(struct tb_half *r);
struct tb_incoming *tb_flow_of(const struct tb_half *r, __u32 rank);
int tb_recover(struct tb_half *r, __s64 now, int asks, __s64 deadline);
void tb_learn_last(struct tb_half *r, __s64 now);
int tb_flow_over(const struct tb_half *r, __u32 rank);
void tb_gone(struct tb_half *r, __u32 rank, __u32 row, const __u8 *body, __u32 length);
__u32 tb_bitmap(const __s64 *places, __u32 count, __u8 *body, __u32 most, __u32 *size);
__u32 tb_requests(const struct tb_half *r, __u32 rank, __s64 *places);

/* The transport thread (wait.c). In the midst of a turn tb_meanwhile sends what is due, and says what else cannot wait. */
__u32 tb_meanwhile(struct tb_sleep *s);
void tb_take_opened(struct tb_sleep *s);
__u32 tb_send_on(struct tb_sleep *s, int answers, __s64 now);

/*
 * Passes over many groups (crew.c). tb_pieces runs one until no piece is left, or, with the transport thread's s, something
 * cannot wait: then it says what, and goes on in the next call.
 */
__u32 tb_pieces(struct tb_work *w, __s64 memory, struct tb_sleep *s);

/* The transport thread is about to wait for the interpreter, and what of TB_WOKEN_* waits for it (deputy.c). s may be NULL. */
enum { TB_AWAY_BETWEEN = 1, TB_AWAY_MIDST };
void tb_away(struct tb_sleep *s, int how, __u32 found);

#endif /* TB_CORE_H */
