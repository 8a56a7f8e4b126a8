/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The check (or tag) of a result made in the pass that copies its codes: each word is loaded once for both, and what one
 * of them waits for (memory, a chain of additions) the other one fills.
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
#define TB_PASS_SUMS [h] "+r"(h), [k] "+r"(k), [u] "=&r"(u), [v] "=&r"(v)
#else
#define TB_PASS_MIX(a, b, code) \
	"%[" a "] += %[t]\n" \
	"%[" b "] += %[" a "]\n"
#define TB_PASS_NEXT ""
#define TB_PASS_SUMS [a0] "+r"(a0), [b0] "+r"(b0), [a1] "+r"(a1), [b1] "+r"(b1)
#endif
/* Eight codes into one lane of the check, or into the tag's hash. COPY says what becomes of them besides; [q] is the round's start. */
#define TB_PASS_WORD(a, b, code, COPY) \
	"%[t] = *(u64 *)(%[q] + " code ")\n" \
	COPY(code) \
	"%[t] = le64 %[t]\n" \
	TB_PASS_MIX(a, b, code)
#define TB_PASS_COPY(at) "*(u64 *)(%[s] + " at ") = %[t]\n"
#define TB_PASS_CODES(COPY, ON) \
	TB_PASS_WORD("a0", "b0", "0", COPY) \
	TB_PASS_WORD("a1", "b1", "8", COPY) \
	TB_PASS_WORD("a0", "b0", "16", COPY) \
	TB_PASS_WORD("a1", "b1", "24", COPY) \
	TB_PASS_WORD("a0", "b0", "32", COPY) \
	TB_PASS_WORD("a1", "b1", "40", COPY) \
	TB_PASS_WORD("a0", "b0", "48", COPY) \
	TB_PASS_WORD("a1", "b1", "56", COPY) \
	ON
#define TB_PASS_NOTHING(at) ""

/* All whole rounds of a row. */
#define TB_PASS_ROUNDS(WORDS) \
	asm volatile("tb_round_%=:\n" \
		     WORDS \
		     TB_PASS_NEXT \
		     "%[q] += 64\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     : [q] "+r"(codes), [n] "+r"(n), [t] "=&r"(t), TB_PASS_SUMS, [s] "+r"(to) \
		     : \
		     : "memory")
/* clang-format on */

/* Wider rows are checked before they are copied: the verifier follows every round, and has a budget. */
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

#define TB_PASS_KEEP 0
#define TB_PASS_LOOK 1

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
 * The check that a packet ought to carry whose codes have so many whole rounds; on the way they are kept at to, or only
 * looked at, as what (a constant) says.
 */
static __always_inline __u64 tb_pass(__u64 *to, const struct tb_header *head, const void *codes,
				     const void *end, __u64 rounds, int what, const __u64 *key)
{
#ifdef TB_TAGGED
	__u64 h = tb_tag_head(head, (__u64)(end - codes), key), u, v;
	const __u64 *k = key + TB_KEY_WORDS;
	struct tb_tag_state state;
#else
	__u64 a0 = 0, b0 = 0, a1 = 0, b1 = 0;
#endif
	__u64 n = rounds, t;
	int i;

#ifdef TB_TAGGED
	tb_tag_open(&state, head, key);
#else
	(void)key;
#endif
	if (what == TB_PASS_KEEP)
		TB_PASS_ROUNDS(TB_PASS_CODES(TB_PASS_COPY, "%[s] += 64\n"));
	else
		TB_PASS_ROUNDS(TB_PASS_CODES(TB_PASS_NOTHING, ""));
#pragma clang loop unroll(disable)
	for (i = 0; i < TB_LANES_ROUND / TB_ROW_STEP - 1; i++) {
		if (rounds >= TB_WIDTH / TB_LANES_ROUND || codes + TB_ROW_STEP > end)
			break;
		if (what == TB_PASS_KEEP) {
			to[0] = ((const tb_u64 *)codes)[0];
			to[1] = ((const tb_u64 *)codes)[1];
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
		to += TB_ROW_STEP / 8;
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

#endif /* TB_PASS_H */
