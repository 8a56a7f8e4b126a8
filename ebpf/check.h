/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The 64-bit check over payload and header (kernel-9): a Fletcher sum of 64-bit words in two lanes, mixed at the end.
 * Its reference is tests/worlds/reference_proof.py.
 */
#ifndef TB_CHECK_H
#define TB_CHECK_H

#include "compat.h"

#include "lanes.h"
#include "wire.h"

#define TB_CHECK_ROUND 64 /* bytes */

static __always_inline __u64 tb_word(const void *p, int i)
{
	return tb_le64(((const tb_u64 *)p)[i]);
}

#ifndef TB_USER
/* Two words, one a lane; [q] is the end of the round. In assembly for the reason given in lanes.h. */
#define TB_CHECK_WORDS(back0, back1)          \
	"%[t] = *(u64 *)(%[q] - " back0 ")\n" \
	"%[t] = le64 %[t]\n"                  \
	"%[a0] += %[t]\n"                     \
	"%[b0] += %[a0]\n"                    \
	"%[t] = *(u64 *)(%[q] - " back1 ")\n" \
	"%[t] = le64 %[t]\n"                  \
	"%[a1] += %[t]\n"                     \
	"%[b1] += %[a1]\n"

/* All whole rounds of a row; n counts those that are not there. */
/* clang-format off */
#define TB_CHECK_ROUNDS \
	asm volatile("tb_round_%=:\n" \
		     "if %[q] > %[end] goto tb_done_%=\n" \
		     TB_CHECK_WORDS("64", "56") \
		     TB_CHECK_WORDS("48", "40") \
		     TB_CHECK_WORDS("32", "24") \
		     TB_CHECK_WORDS("16", "8") \
		     "%[q] += 64\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     "tb_done_%=:\n" \
		     : [q] "+r"(q), [n] "+r"(n), [t] "=&r"(t), [a0] "+r"(a0), [b0] "+r"(b0), \
		       [a1] "+r"(a1), [b1] "+r"(b1) \
		     : [end] "r"(end) \
		     : "memory")
/* clang-format on */
#endif

#define TB_CHECK_PAIR(p, i)                \
	do {                               \
		a2 += tb_word(p, i);       \
		b2 += a2;                  \
		a3 += tb_word(p, (i) + 1); \
		b3 += a3;                  \
		pairs++;                   \
	} while (0)

/* The header, its check field as zero. */
#define TB_CHECK_HEADER(head)           \
	do {                            \
		TB_CHECK_PAIR(head, 0); \
		TB_CHECK_PAIR(head, 2); \
		TB_CHECK_PAIR(head, 4); \
		a2 += tb_word(head, 6); \
		b2 += a2;               \
		b3 += a3;               \
		pairs++;                \
	} while (0)

static __always_inline __u64 tb_check_mix(__u64 a0, __u64 a1, __u64 b0, __u64 b1)
{
	__u64 c = a0 * TB_CHECK_K1 + a1 * TB_CHECK_K2 + b0 * TB_CHECK_K3 + b1 * TB_CHECK_K4;

	return c ^ c >> 32;
}

/*
 * The check that a packet ought to carry: codes up to end, then the header with its check field as zero.
 *
 * What is behind the whole rounds is summed first, for the reason given in lanes.h, and put behind them: each of its
 * pairs of words would have found the rounds' a0 in its b0.
 */
static __always_inline __u64 tb_check(const struct tb_header *head, const void *codes,
				      const void *end)
{
	__u64 a0 = 0, b0 = 0, a1 = 0, b1 = 0, n = TB_WIDTH / TB_CHECK_ROUND, t;
	__u64 whole = tb_lanes_whole(codes, end), a2 = 0, b2 = 0, a3 = 0, b3 = 0, pairs = 0;
	const void *q = codes + TB_CHECK_ROUND;
	int i;

	if (whole <= TB_LANES_MOST) {
		const void *rest = codes + whole;

#pragma clang loop unroll(disable)
		for (i = 0; i < TB_CHECK_ROUND / TB_ROW_STEP - 1; i++) {
			if (rest + TB_ROW_STEP > end)
				break;
			TB_CHECK_PAIR(rest, 0);
			rest += TB_ROW_STEP;
		}
	}
	TB_CHECK_HEADER(head);

	TB_CHECK_ROUNDS;
	b0 += pairs * a0 + b2;
	b1 += pairs * a1 + b3;
	return tb_check_mix(a0 + a2, a1 + a3, b0, b1);
}

/*
 * The check after header word i (a constant) changed by d. The last mixing step undoes itself, and the word is
 * counted once in its lane's a, and in b as often as the lane has words from it to the end of the header.
 */
static __always_inline __u64 tb_check_moved(__u64 check, int i, __u64 d)
{
	__u64 c = check ^ check >> 32;

	if (i & 1)
		c += d * (TB_CHECK_K2 + (4 - i / 2) * TB_CHECK_K4);
	else
		c += d * (TB_CHECK_K1 + (4 - i / 2) * TB_CHECK_K3);
	return c ^ c >> 32;
}

#endif /* TB_CHECK_H */
