/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The loops over codes in C, under the names that lanes.h, nibbles.h, check.h, tag.h and pass.h give their BPF assembly.
 * They leave the variables of the functions around them as that does.
 *
 * A Fletcher sum is one chain of additions. Here it is eight, which become vectors: one for each word of a round. With A
 * the sum of a place's words, and B the sum of A after each round, a lane has the sums of A and of 4 B - place * A.
 */
#ifndef TB_LOOPS_H
#define TB_LOOPS_H

#define TB_LANES_STORE 0
#define TB_LANES_ADD 1
#define TB_LANES_TIMES 0
#define TB_LANES_DOWN d

/* Four words or sixteen lanes at once; a compiler without such vectors makes several of it. */
typedef __u64 tb_four __attribute__((vector_size(32)));
typedef __u16 tb_sixteen __attribute__((vector_size(32)));

static __always_inline tb_four tb_load(const void *from)
{
	tb_four v;

	__builtin_memcpy(&v, from, sizeof(v));
	return v;
}

static __always_inline void tb_put_four(__u64 *sums, tb_four lanes, int add)
{
	if (add)
		lanes += tb_load(sums);
	__builtin_memcpy(sums, &lanes, sizeof(lanes));
}

/* Four of eight words. GCC has clang's builtin from version 12 on. */
#ifdef __clang__
#define TB_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TB_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (tb_four){ __VA_ARGS__ })
#endif

/* Codes in lanes as they go into sums. */
static __always_inline tb_four tb_scaled(tb_four lanes, __u64 weight, __u64 r, __u64 down)
{
	return (tb_four)(((tb_sixteen)lanes * (__u16)weight + (__u16)r) >> (__u16)down);
}

/* Eight words of codes into sixteen of sums. */
static __always_inline void tb_round_lanes(__u64 *sums, const void *codes, int add, __u64 weight,
					   __u64 r, __u64 down)
{
	int i;

	for (i = 0; i < 2; i++) {
		tb_four t = tb_load(codes + 32 * i);
		tb_four even = tb_scaled(t & TB_LANES_MASK, weight, r, down);
		tb_four odd = tb_scaled(t >> 8 & TB_LANES_MASK, weight, r, down);

		tb_put_four(sums + 8 * i, TB_SHUFFLE(even, odd, 0, 4, 1, 5), add);
		tb_put_four(sums + 8 * i + 4, TB_SHUFFLE(even, odd, 2, 6, 3, 7), add);
	}
}

#define TB_LANES_ROUNDS(OP, DOWN)                                     \
	do {                                                          \
		(void)mask, (void)k, (void)t, (void)u;                \
		for (; q <= end && n; q += 64, sums += 16, n--)       \
			tb_round_lanes(sums, q - 64, OP, w, r, DOWN); \
	} while (0)

/* Four words of codes of half a byte into sixteen of sums. */
static __always_inline void tb_round_halves(__u64 *sums, const void *codes, int add, __u64 mask,
					    __u64 weight, __u64 r, __u64 down)
{
	int i;

	for (i = 0; i < 4; i++) {
		__u64 t = tb_le64(((const tb_u64 *)codes)[i]);
		tb_four lanes = { t, t >> 8, t >> 4, t >> 12 };

		tb_put_four(sums + 4 * i, tb_scaled(lanes & mask, weight, r, down), add);
	}
}

#define TB_HALVES_ROUNDS(OP, DOWN)                                           \
	do {                                                                 \
		(void)k, (void)t, (void)u;                                   \
		for (; q <= end && n; q += 32, sums += 16, n--)              \
			tb_round_halves(sums, q - 32, OP, mask, w, r, DOWN); \
	} while (0)

struct tb_fletcher {
	tb_four a[2];
	tb_four b[2];
};

static __always_inline void tb_fletcher_round(struct tb_fletcher *f, const void *codes)
{
	f->a[0] += tb_load(codes);
	f->b[0] += f->a[0];
	f->a[1] += tb_load(codes + 32);
	f->b[1] += f->a[1];
}

static __always_inline void tb_fletcher_lane(const struct tb_fletcher *f, int lane, __u64 *a,
					     __u64 *b)
{
	__u64 i;

	for (i = 0; i < 4; i++) {
		__u64 sum = f->a[i >> 1][2 * (i & 1) + lane];

		*a += sum;
		*b += 4 * f->b[i >> 1][2 * (i & 1) + lane] - i * sum;
	}
}

/* a0, b0, a1 and b1 are 0 before. */
#define TB_CHECK_ROUNDS                                \
	do {                                           \
		struct tb_fletcher f = {};             \
                                                       \
		(void)t;                               \
		for (; q <= end && n; q += 64, n--)    \
			tb_fletcher_round(&f, q - 64); \
		tb_fletcher_lane(&f, 0, &a0, &b0);     \
		tb_fletcher_lane(&f, 1, &a1, &b1);     \
	} while (0)

static __always_inline __u64 tb_tag_round(const void *codes, const __u64 *key)
{
	__u64 hash = 0;
	int i;

	for (i = 0; i < 8; i++) {
		__u64 x = tb_le64(((const tb_u64 *)codes)[i]) + key[i];

		hash += x * (x >> 32);
	}
	return hash;
}

#define TB_TAG_ROUNDS                                       \
	do {                                                \
		(void)t, (void)u, (void)v;                  \
		for (; q <= end && n; q += 64, k += 8, n--) \
			h += tb_tag_round(q - 64, k);       \
	} while (0)

/* Results of all lengths are checked in the pass that takes them in. */
#define TB_PASS_WIDTH 65536
#define TB_PASS_COPY 1
#define TB_PASS_NOTHING 0
#define TB_PASS_CODES(COPY, ON) COPY

static __always_inline void tb_pass_round(__u64 **to, const void *codes, int copy)
{
	if (!copy)
		return;
	__builtin_memcpy(*to, codes, 64);
	*to += 8;
}

#ifdef TB_TAGGED
#define TB_PASS_ROUNDS(WHAT)                             \
	do {                                             \
		(void)t, (void)u, (void)v;               \
		for (; n; codes += 64, k += 8, n--) {    \
			h += tb_tag_round(codes, k);     \
			tb_pass_round(&to, codes, WHAT); \
		}                                        \
	} while (0)
#else
#define TB_PASS_ROUNDS(WHAT)                             \
	do {                                             \
		struct tb_fletcher f = {};               \
                                                         \
		(void)t;                                 \
		for (; n; codes += 64, n--) {            \
			tb_fletcher_round(&f, codes);    \
			tb_pass_round(&to, codes, WHAT); \
		}                                        \
		tb_fletcher_lane(&f, 0, &a0, &b0);       \
		tb_fletcher_lane(&f, 1, &a1, &b1);       \
	} while (0)
#endif

#endif /* TB_LOOPS_H */
