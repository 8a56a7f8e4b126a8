/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Codes of four bits, two a byte: of every sixteen the first eight lie in the lower halves of eight bytes, the others in
 * the upper ones.
 *
 * Flag HALVES: the lanes of the sums are those of lanes.h, as if each code had a byte of its own. They take four times
 * the codes' memory, so a row has half of the width at most (tb_row_rules).
 */
#ifndef TB_NIBBLES_H
#define TB_NIBBLES_H

#include "lanes.h"

#define TB_HALVES_MASK 0x000f000f000f000fULL
/* Bytes of a round: so many that any row of half the width has whole rounds and one step more at most. */
#define TB_HALVES_ROUND 32
#define TB_HALVES_MOST (TB_WIDTH / 2 - TB_HALVES_ROUND)

#ifndef TB_USER
/* clang-format off */
#define TB_HALVES_LANES(OP, SCALE, back, shift, at) \
	TB_LANES_LOAD(back) "%[t] >>= " shift "\n" "%[t] &= %[m]\n" SCALE OP(at)
/* Eight bytes: even and odd codes of the lower halves, then of the upper ones. */
#define TB_HALVES_WORD(OP, SCALE, back, at, odd, upper, last) \
	TB_LANES_LOAD(back) "%[t] &= %[m]\n" SCALE OP(at) \
	TB_HALVES_LANES(OP, SCALE, back, "8", odd) \
	TB_HALVES_LANES(OP, SCALE, back, "4", upper) \
	TB_HALVES_LANES(OP, SCALE, back, "12", last)

#define TB_HALVES_ROUNDS(OP, SCALE) \
	asm volatile("tb_round_%=:\n" \
		     "if %[q] > %[end] goto tb_done_%=\n" \
		     TB_HALVES_WORD(OP, SCALE, "32", "0", "8", "16", "24") \
		     TB_HALVES_WORD(OP, SCALE, "24", "32", "40", "48", "56") \
		     TB_HALVES_WORD(OP, SCALE, "16", "64", "72", "80", "88") \
		     TB_HALVES_WORD(OP, SCALE, "8", "96", "104", "112", "120") \
		     "%[q] += 32\n" \
		     "%[s] += 128\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     "tb_done_%=:\n" \
		     : [q] "+r"(q), [s] "+r"(sums), [n] "+r"(n), [t] "=&r"(t), [u] "=&r"(u) \
		     : [end] "r"(end), [m] "r"(mask), [w] "r"(w), [d] "r"(d), [k] "r"(k), [r] "m"(r) \
		     : "memory")
/* clang-format on */
#endif

/* The step that a row may have behind its whole rounds. */
static __always_inline void tb_halves_rest(__u64 *sums, const void *codes, const void *end, int add,
					   __u64 weight, __u64 r, __u64 down)
{
	__u64 whole = (__u64)(end - codes) & -(__u64)TB_HALVES_ROUND, t, lanes;
	__u64 kept = TB_LANES_BELOW(down);
	int i, j;

	/* As in tb_lanes_whole. */
	asm volatile("" : "+r"(whole));
	if (whole > TB_HALVES_MOST)
		return;
	codes += whole;
	sums += whole / 2;
	if (codes + TB_ROW_STEP > end)
		return;
#pragma unroll
	for (i = 0; i < TB_ROW_STEP / 8; i++) {
		t = tb_le64(((const tb_u64 *)codes)[i]);
#pragma unroll
		for (j = 0; j < 4; j++) {
			lanes = t >> (j >> 1 << 2 | (j & 1) << 3) & TB_HALVES_MASK;
			lanes = (lanes * weight + r) >> down & kept;
			sums[4 * i + j] = add ? sums[4 * i + j] + lanes : lanes;
		}
	}
}

static __always_inline void tb_halves_store(__u64 *sums, const void *codes, const void *end,
					    __u32 weight)
{
	__u64 n = TB_WIDTH / 2 / TB_HALVES_ROUND, mask = TB_HALVES_MASK, w = weight, d = 0, k = 0;
	const void *q = codes + TB_HALVES_ROUND;
	__u64 *first = sums, r = 0, t, u;

	TB_HALVES_ROUNDS(TB_LANES_STORE, TB_LANES_TIMES);
	tb_halves_rest(first, codes, end, 0, w, r, d);
}

static __always_inline void tb_halves_add(__u64 *sums, const void *codes, const void *end,
					  __u32 weight, __u32 add, __u32 down)
{
	__u64 n = TB_WIDTH / 2 / TB_HALVES_ROUND, mask = TB_HALVES_MASK, w = weight, d = down & 7;
	const void *q = codes + TB_HALVES_ROUND;
	__u64 k = TB_LANES_BELOW(d), r = TB_LANES_EACH(add), *first = sums, t, u;

	if (d)
		TB_HALVES_ROUNDS(TB_LANES_ADD, TB_LANES_DOWN);
	else
		TB_HALVES_ROUNDS(TB_LANES_ADD, TB_LANES_TIMES);
	tb_halves_rest(first, codes, end, 1, w, r, d);
}

#endif /* TB_NIBBLES_H */
