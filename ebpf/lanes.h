/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Lane arithmetic: u8 codes into u16 sums, eight codes at a time.
 *
 * A row of sums holds, per eight codes, a u64 of the even codes and a u64 of the odd ones, as u16 lanes.
 * The odd codes are the same bytes read one address further on, so that no shift is needed; only the last
 * word of a round must not be read past its end. Rows may be short: end is where the codes end (parse.h).
 * Callers hold the slot's lock and have seen to it that lanes cannot overflow (codec-9).
 *
 * Rounds of 64 codes stay in the decoded-instruction cache, which a fully unrolled row does not. They are
 * written in assembly because LLVM keeps what is live around the loop in registers and the loop's own
 * variables on the stack: 15 ns of 180 for a row (Xeon, 3.1 GHz). le64 is no instruction on x86.
 */
#ifndef TB_LANES_H
#define TB_LANES_H

#include "compat.h"

#include "wire.h"

#define TB_LANES_MASK 0x00ff00ff00ff00ffULL
/* Lanes that have been shifted down, less the bits that came from their neighbours. */
#define TB_LANES_EACH(x) ((x)*0x0001000100010001ULL)
#define TB_LANES_BELOW(down) TB_LANES_EACH(0xffffULL >> (down))
#define TB_LANES_ROUND 64
/* Codes in the whole rounds of a row that has a rest, at most. */
#define TB_LANES_MOST (TB_WIDTH - TB_LANES_ROUND)

#ifdef TB_USER
#include "loops.h"
#else
/* clang-format off */
/* What to do with a word of lanes in t: [s] is the row of sums. */
#define TB_LANES_STORE(at) "*(u64 *)(%[s] + " at ") = %[t]\n"
#define TB_LANES_ADD(at) \
	"%[u] = *(u64 *)(%[s] + " at ")\n" \
	"%[u] += %[t]\n" \
	"*(u64 *)(%[s] + " at ") = %[u]\n"
/* Codes as they go in: [w] is their weight, [d] by how much they are shifted down after [r], and [k] what that leaves. */
#define TB_LANES_TIMES "%[t] *= %[w]\n"
#define TB_LANES_DOWN \
	"%[t] *= %[w]\n" "%[u] = *(u64 *)%[r]\n" "%[t] += %[u]\n" "%[t] >>= %[d]\n" "%[t] &= %[k]\n"

/* Eight codes, even ones and odd ones; [q] is the end of the round. */
#define TB_LANES_LOAD(back) \
	"%[t] = *(u64 *)(%[q] - " back ")\n" \
	"%[t] = le64 %[t]\n"
#define TB_LANES_WORD(OP, SCALE, even, odd, at, next) \
	TB_LANES_LOAD(even) "%[t] &= %[m]\n" SCALE OP(at) \
	TB_LANES_LOAD(odd) "%[t] &= %[m]\n" SCALE OP(next)
#define TB_LANES_LAST(OP, SCALE, even, at, next) \
	TB_LANES_LOAD(even) "%[t] &= %[m]\n" SCALE OP(at) \
	TB_LANES_LOAD(even) "%[t] >>= 8\n" "%[t] &= %[m]\n" SCALE OP(next)

/* All whole rounds of a row; n counts those that are not there. */
#define TB_LANES_ROUNDS(OP, SCALE) \
	asm volatile("tb_round_%=:\n" \
		     "if %[q] > %[end] goto tb_done_%=\n" \
		     TB_LANES_WORD(OP, SCALE, "64", "63", "0", "8") \
		     TB_LANES_WORD(OP, SCALE, "56", "55", "16", "24") \
		     TB_LANES_WORD(OP, SCALE, "48", "47", "32", "40") \
		     TB_LANES_WORD(OP, SCALE, "40", "39", "48", "56") \
		     TB_LANES_WORD(OP, SCALE, "32", "31", "64", "72") \
		     TB_LANES_WORD(OP, SCALE, "24", "23", "80", "88") \
		     TB_LANES_WORD(OP, SCALE, "16", "15", "96", "104") \
		     TB_LANES_LAST(OP, SCALE, "8", "112", "120") \
		     "%[q] += 64\n" \
		     "%[s] += 128\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     "tb_done_%=:\n" \
		     : [q] "+r"(q), [s] "+r"(sums), [n] "+r"(n), [t] "=&r"(t), [u] "=&r"(u) \
		     : [end] "r"(end), [m] "r"(mask), [w] "r"(w), [d] "r"(d), [k] "r"(k), [r] "m"(r) \
		     : "memory")
/* clang-format on */
#endif

/*
 * Codes in the whole rounds of a row; more than TB_LANES_MOST where the row is full.
 *
 * What is left of a short row behind its whole rounds goes first, and nothing of the packet is used after the rounds.
 * They have an exit for every length of a row, and to the verifier each leaves the packet's pointers with another range:
 * whatever looked at the packet afterwards would be verified once for each of these exits.
 */
static __always_inline __u64 tb_lanes_whole(const void *codes, const void *end)
{
	__u64 whole = (__u64)(end - codes) & -(__u64)TB_LANES_ROUND;

	/* Offsets are to be made from what has been compared with TB_LANES_MOST, not from the difference anew. */
	asm volatile("" : "+r"(whole));
	return whole;
}

/*
 * What is left of a short row behind its whole rounds: fewer than 64 codes, in steps of 16. sums and codes are those of
 * the row's start; add, weight, r and down are as in the rounds.
 */
static __always_inline void tb_lanes_rest(__u64 *sums, const void *codes, const void *end, int add,
					  __u64 weight, __u64 r, __u64 down)
{
	__u64 whole = tb_lanes_whole(codes, end), kept = TB_LANES_BELOW(down), even, odd;
	int i, j;

	if (whole > TB_LANES_MOST)
		return;
	codes += whole;
	sums += whole / 4;
#pragma clang loop unroll(disable)
	for (i = 0; i < TB_LANES_ROUND / TB_ROW_STEP - 1; i++) {
		if (codes + TB_ROW_STEP > end)
			break;
#pragma unroll
		for (j = 0; j < TB_ROW_STEP / 8; j++) {
			odd = tb_le64(((const tb_u64 *)codes)[j]);
			even = ((odd & TB_LANES_MASK) * weight + r) >> down & kept;
			odd = ((odd >> 8 & TB_LANES_MASK) * weight + r) >> down & kept;
			sums[2 * j] = add ? sums[2 * j] + even : even;
			sums[2 * j + 1] = add ? sums[2 * j + 1] + odd : odd;
		}
		codes += TB_ROW_STEP;
		sums += TB_ROW_STEP / 4;
	}
}

/* The first contribution to a row overwrites what an older op left there: nothing is ever cleared. */
static __always_inline void tb_lanes_store(__u64 *sums, const void *codes, const void *end,
					   __u32 weight)
{
	__u64 n = TB_WIDTH / TB_LANES_ROUND, mask = TB_LANES_MASK, w = weight, d = 0, k = 0, r = 0,
	      t, u;
	const void *q = codes + TB_LANES_ROUND;

	tb_lanes_rest(sums, codes, end, 0, w, r, d);
	TB_LANES_ROUNDS(TB_LANES_STORE, TB_LANES_TIMES);
}

static __always_inline void tb_lanes_add(__u64 *sums, const void *codes, const void *end,
					 __u32 weight, __u32 add, __u32 down)
{
	__u64 n = TB_WIDTH / TB_LANES_ROUND, mask = TB_LANES_MASK, w = weight, d = down & 7, t, u;
	const void *q = codes + TB_LANES_ROUND;
	__u64 k = TB_LANES_BELOW(d), r = TB_LANES_EACH(add);

	tb_lanes_rest(sums, codes, end, 1, w, r, d);
	if (d)
		TB_LANES_ROUNDS(TB_LANES_ADD, TB_LANES_DOWN);
	else
		TB_LANES_ROUNDS(TB_LANES_ADD, TB_LANES_TIMES);
}

/* Shifts the sums of a row down, by 16 at most: so that a contribution of a larger scale finds room. */
static __always_inline void tb_lanes_move(__u64 *sums, __u32 by)
{
	__u64 d = by & 31, kept = TB_LANES_BELOW(d);
	__u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < TB_WIDTH / 4; i++)
		sums[i] = sums[i] >> d & kept;
}

/* Result rows are kept as they came. */
static __always_inline void tb_codes_copy(__u64 *to, const void *codes, const void *end)
{
	__u64 whole = tb_lanes_whole(codes, end);
	__u32 i, j;

	if (whole <= TB_LANES_MOST) {
		const void *rest = codes + whole;
		__u64 *behind = to + whole / 8;

#pragma clang loop unroll(disable)
		for (i = 0; i < TB_LANES_ROUND / TB_ROW_STEP - 1; i++) {
			if (rest + TB_ROW_STEP > end)
				break;
			behind[0] = ((const tb_u64 *)rest)[0];
			behind[1] = ((const tb_u64 *)rest)[1];
			rest += TB_ROW_STEP;
			behind += TB_ROW_STEP / 8;
		}
	}
#pragma clang loop unroll(disable)
	for (i = 0; i < TB_WIDTH / TB_LANES_ROUND; i++) {
		if (codes + TB_LANES_ROUND > end)
			break;
#pragma unroll
		for (j = 0; j < TB_LANES_ROUND / 8; j++)
			to[j] = ((const tb_u64 *)codes)[j];
		codes += TB_LANES_ROUND;
		to += TB_LANES_ROUND / 8;
	}
}

#endif /* TB_LANES_H */
