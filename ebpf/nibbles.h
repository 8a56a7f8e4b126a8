/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Codes of four bits, two a byte, into u8 sums: sixteen codes at a time.
 *
 * A row of sums holds, per eight bytes of codes, a u64 of the lower halves' sums and a u64 of the upper ones', as
 * u8 lanes: as much memory as sums of eight codes of a byte each take (lanes.h). 15 * 17 = 255: the host sees to it
 * that a job with such codes has 17 ranks at most. They are never shifted.
 */
#ifndef TB_NIBBLES_H
#define TB_NIBBLES_H

#include "lanes.h"

#define TB_NIBBLES_MASK 0x0f0f0f0f0f0f0f0fULL

/* clang-format off */
/* Eight bytes, [q] is the end of the round; no byte order matters here. */
#define TB_NIBBLES_WORD(OP, back, at, next) \
	"%[t] = *(u64 *)(%[q] - " back ")\n" "%[t] &= %[m]\n" OP(at) \
	"%[t] = *(u64 *)(%[q] - " back ")\n" "%[t] >>= 4\n" "%[t] &= %[m]\n" OP(next)

#define TB_NIBBLES_ROUNDS(OP) \
	asm volatile("tb_round_%=:\n" \
		     "if %[q] > %[end] goto tb_done_%=\n" \
		     TB_NIBBLES_WORD(OP, "64", "0", "8") \
		     TB_NIBBLES_WORD(OP, "56", "16", "24") \
		     TB_NIBBLES_WORD(OP, "48", "32", "40") \
		     TB_NIBBLES_WORD(OP, "40", "48", "56") \
		     TB_NIBBLES_WORD(OP, "32", "64", "72") \
		     TB_NIBBLES_WORD(OP, "24", "80", "88") \
		     TB_NIBBLES_WORD(OP, "16", "96", "104") \
		     TB_NIBBLES_WORD(OP, "8", "112", "120") \
		     "%[q] += 64\n" \
		     "%[s] += 128\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     "tb_done_%=:\n" \
		     : [q] "+r"(q), [s] "+r"(sums), [n] "+r"(n), [t] "=&r"(t), [u] "=&r"(u) \
		     : [end] "r"(end), [m] "r"(mask) \
		     : "memory")
/* clang-format on */

/* What is left of a short row, as in lanes.h: fewer than 64 bytes, in steps of 16. */
static __always_inline void tb_nibbles_rest(__u64 *sums, const void *codes, const void *end,
					    int add)
{
	__u64 whole = tb_lanes_whole(codes, end), low, high;
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
			high = ((const tb_u64 *)codes)[j];
			low = high & TB_NIBBLES_MASK;
			high = high >> 4 & TB_NIBBLES_MASK;
			sums[2 * j] = add ? sums[2 * j] + low : low;
			sums[2 * j + 1] = add ? sums[2 * j + 1] + high : high;
		}
		codes += TB_ROW_STEP;
		sums += TB_ROW_STEP / 4;
	}
}

static __always_inline void tb_nibbles_store(__u64 *sums, const void *codes, const void *end)
{
	__u64 n = TB_WIDTH / TB_LANES_ROUND, mask = TB_NIBBLES_MASK, t, u;
	const void *q = codes + TB_LANES_ROUND;

	tb_nibbles_rest(sums, codes, end, 0);
	TB_NIBBLES_ROUNDS(TB_LANES_STORE);
}

static __always_inline void tb_nibbles_add(__u64 *sums, const void *codes, const void *end)
{
	__u64 n = TB_WIDTH / TB_LANES_ROUND, mask = TB_NIBBLES_MASK, t, u;
	const void *q = codes + TB_LANES_ROUND;

	tb_nibbles_rest(sums, codes, end, 1);
	TB_NIBBLES_ROUNDS(TB_LANES_ADD);
}

#endif /* TB_NIBBLES_H */
