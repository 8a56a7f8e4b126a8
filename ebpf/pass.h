/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The check (or tag) of a row made in the pass that adds, stores or copies its codes: each word is loaded once for both, and what
 * one of them waits for (memory, a chain of additions) the other one fills.
 *
 * Only for rows whose number of rounds is known before: the register of a bound is wanted here.
 */
#ifndef TB_PASS_H
#define TB_PASS_H

#include "compat.h"

#include "abi.h"
#include "check.h"
#include "lanes.h"
#include "tag.h"
#include "wire.h"

#ifndef TB_USER
/* clang-format off */
#ifdef TB_TAGGED
#define TB_PASS_MIX(a, b, code) TB_TAG_MIX(code)
#define TB_PASS_NEXT "%[k] += 64\n"
#define TB_PASS_SUMS [h] "+r"(h), [k] "+r"(k), [v] "=&r"(v)
#else
#define TB_PASS_MIX(a, b, code) \
	"%[" a "] += %[t]\n" \
	"%[" b "] += %[" a "]\n"
#define TB_PASS_NEXT ""
#define TB_PASS_SUMS [a0] "+r"(a0), [b0] "+r"(b0), [a1] "+r"(a1), [b1] "+r"(b1)
#endif
/* Eight codes into one lane of the check, or into the tag's hash. RAW and LANES say what becomes of them besides; [q] is the round's start. */
#define TB_PASS_WORD(a, b, code, RAW, LANES) \
	"%[t] = *(u64 *)(%[q] + " code ")\n" \
	RAW \
	"%[t] = le64 %[t]\n" \
	TB_PASS_MIX(a, b, code) \
	LANES
#define TB_PASS_ODD(code, SHIFT) \
	"%[t] = *(u64 *)(%[q] + " code ")\n" \
	"%[t] = le64 %[t]\n" \
	SHIFT
#define TB_PASS_LANES(OP, ODD, even, odd) \
	"%[t] &= %[m]\n" OP(even) ODD "%[t] &= %[m]\n" OP(odd)
#define TB_PASS_COPY(at) "*(u64 *)(%[s] + " at ") = %[t]\n"
/* The last word of a round is not read past its end. */
#define TB_PASS_SUM(OP) \
	TB_PASS_WORD("a0", "b0", "0", "", TB_PASS_LANES(OP, TB_PASS_ODD("1", ""), "0", "8")) \
	TB_PASS_WORD("a1", "b1", "8", "", TB_PASS_LANES(OP, TB_PASS_ODD("9", ""), "16", "24")) \
	TB_PASS_WORD("a0", "b0", "16", "", TB_PASS_LANES(OP, TB_PASS_ODD("17", ""), "32", "40")) \
	TB_PASS_WORD("a1", "b1", "24", "", TB_PASS_LANES(OP, TB_PASS_ODD("25", ""), "48", "56")) \
	TB_PASS_WORD("a0", "b0", "32", "", TB_PASS_LANES(OP, TB_PASS_ODD("33", ""), "64", "72")) \
	TB_PASS_WORD("a1", "b1", "40", "", TB_PASS_LANES(OP, TB_PASS_ODD("41", ""), "80", "88")) \
	TB_PASS_WORD("a0", "b0", "48", "", TB_PASS_LANES(OP, TB_PASS_ODD("49", ""), "96", "104")) \
	TB_PASS_WORD("a1", "b1", "56", "", \
		     TB_PASS_LANES(OP, TB_PASS_ODD("56", "%[t] >>= 8\n"), "112", "120")) \
	"%[s] += 128\n"
#define TB_PASS_CODES(COPY, ON) \
	TB_PASS_WORD("a0", "b0", "0", COPY("0"), "") \
	TB_PASS_WORD("a1", "b1", "8", COPY("8"), "") \
	TB_PASS_WORD("a0", "b0", "16", COPY("16"), "") \
	TB_PASS_WORD("a1", "b1", "24", COPY("24"), "") \
	TB_PASS_WORD("a0", "b0", "32", COPY("32"), "") \
	TB_PASS_WORD("a1", "b1", "40", COPY("40"), "") \
	TB_PASS_WORD("a0", "b0", "48", COPY("48"), "") \
	TB_PASS_WORD("a1", "b1", "56", COPY("56"), "") \
	ON
#define TB_PASS_NOTHING(at) ""

/* All whole rounds of a row, in all ten registers. */
#define TB_PASS_ROUNDS(WORDS) \
	asm volatile("tb_round_%=:\n" \
		     WORDS \
		     TB_PASS_NEXT \
		     "%[q] += 64\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     : [q] "+r"(codes), [n] "+r"(n), [t] "=&r"(t), TB_PASS_SUMS, [s] "+r"(to), \
		       [u] "=&r"(u) \
		     : [m] "r"(mask) \
		     : "memory")
/* clang-format on */

/* Wider rows are checked before they are summed: the verifier follows every round, and has a budget. */
#define TB_PASS_WIDTH 4096
/*
 * Numbers of whole rounds that rows may have: those of an op are of one length, a few codes below the width. The verifier
 * goes through all that follows once for each.
 */
#ifdef TB_TAGGED
#define TB_PASS_LENGTHS (TB_WIDTH > 2048 ? 1 : 3)
#else
#define TB_PASS_LENGTHS (TB_WIDTH > 2048 ? 1 : 4)
#endif
#endif /* TB_USER */

#define TB_PASS_ADD 0
#define TB_PASS_STORE 1
#define TB_PASS_KEEP 2
#define TB_PASS_LOOK 3

/*
 * Whole rounds in a row of nearly the program's width, 0 for a shorter one. A comparison for each number of rounds, since
 * the verifier has to know it and that so many codes are there.
 */
static __always_inline __u64 tb_pass_rounds(const void *codes, const void *end)
{
#ifdef TB_USER
	return (end - codes) / TB_LANES_ROUND;
#else
	__u64 n = TB_WIDTH / TB_LANES_ROUND;
	int i;

#pragma unroll
	for (i = 0; i < TB_PASS_LENGTHS; i++, n--)
		if (n && codes + n * TB_LANES_ROUND <= end)
			return n;
	return 0;
#endif
}

/*
 * The check that a packet ought to carry whose codes have so many whole rounds; on the way they are added to or stored
 * as the sums at to, kept there as they are, or only looked at, as what (a constant) says.
 */
static __always_inline __u64 tb_pass(__u64 *to, const struct tb_header *head, const void *codes,
				     const void *end, __u64 rounds, int what, const __u64 *key)
{
#ifdef TB_TAGGED
	__u64 h = tb_tag_head(head, (__u64)(end - codes), key), v;
	const __u64 *k = key + TB_KEY_WORDS;
	struct tb_tag_state state;
#else
	__u64 a0 = 0, b0 = 0, a1 = 0, b1 = 0;
#endif
	__u64 mask = TB_LANES_MASK, n = rounds, t, u;
	int i, j;

#ifdef TB_TAGGED
	tb_tag_open(&state, head, key);
#else
	(void)key;
#endif
	if (what == TB_PASS_ADD)
		TB_PASS_ROUNDS(TB_PASS_SUM(TB_LANES_ADD));
	else if (what == TB_PASS_STORE)
		TB_PASS_ROUNDS(TB_PASS_SUM(TB_LANES_STORE));
	else if (what == TB_PASS_KEEP)
		TB_PASS_ROUNDS(TB_PASS_CODES(TB_PASS_COPY, "%[s] += 64\n"));
	else
		TB_PASS_ROUNDS(TB_PASS_CODES(TB_PASS_NOTHING, ""));
#pragma clang loop unroll(disable)
	for (i = 0; i < TB_LANES_ROUND / TB_ROW_STEP - 1; i++) {
		if (rounds >= TB_WIDTH / TB_LANES_ROUND || codes + TB_ROW_STEP > end)
			break;
#pragma unroll
		for (j = 0; j < TB_ROW_STEP / 8; j++) {
			t = tb_word(codes, j);
			if (what == TB_PASS_KEEP) {
				to[j] = ((const tb_u64 *)codes)[j];
			} else if (what == TB_PASS_ADD) {
				to[2 * j] += t & TB_LANES_MASK;
				to[2 * j + 1] += t >> 8 & TB_LANES_MASK;
			} else if (what == TB_PASS_STORE) {
				to[2 * j] = t & TB_LANES_MASK;
				to[2 * j + 1] = t >> 8 & TB_LANES_MASK;
			}
		}
#ifdef TB_TAGGED
		h += tb_tag_word(tb_word(codes, 0), k[0]);
		h += tb_tag_word(tb_word(codes, 1), k[1]);
		k += TB_ROW_STEP / 8;
#else
		a0 += tb_word(codes, 0);
		b0 += a0;
		a1 += tb_word(codes, 1);
		b1 += a1;
#endif
		codes += TB_ROW_STEP;
		to += what == TB_PASS_KEEP ? TB_ROW_STEP / 8 : TB_ROW_STEP / 4;
	}
#ifdef TB_TAGGED
	return tb_tag_close(&state, h);
#else
#pragma unroll
	for (i = 0; i < 6; i += 2) {
		a0 += tb_word(head, i);
		b0 += a0;
		a1 += tb_word(head, i + 1);
		b1 += a1;
	}
	a0 += tb_word(head, 6);
	return tb_check_mix(a0, a1, b0 + a0, b1 + a1);
#endif
}

static __always_inline void tb_pass_take(__u64 *to, const tb_u64 *word)
{
	__u64 both = tb_le64(*word);

	to[0] -= both & TB_LANES_MASK;
	to[1] -= both >> 8 & TB_LANES_MASK;
}

/* Takes from the sums at to what tb_pass has added. */
static __always_inline void tb_pass_undo(__u64 *to, const void *codes, const void *end, __u64 n)
{
	const tb_u64 *word = codes;
	__u64 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < n * (TB_LANES_ROUND / 8); i++) {
		tb_pass_take(to, word);
		to += 2;
		word++;
	}
#pragma clang loop unroll(disable)
	for (i = 0; i < TB_LANES_ROUND / 8 - 1; i++) {
		if (n >= TB_WIDTH / TB_LANES_ROUND || (const void *)(word + 1) > end)
			break;
		tb_pass_take(to, word);
		to += 2;
		word++;
	}
}

#endif /* TB_PASS_H */
