/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From sums to mean codes, to the nearest, eight codes at a time.
 *
 * A sum s of n codes is at most 255 n. With m = ceil(2^24 / n), (s + n / 2) m < 2^32 for every n up to 256, so that two
 * lanes fit into one multiplication, and its bits 24..31 are (s + n / 2) / n exactly: the error of m is e < n / 2^24,
 * and (255 n + n / 2) (n - 1) < 2^24. (For n = 256 m is exact.) tests/kernel/test_switch.py tries every sum of every n.
 *
 * The mean takes the place of the even sums, where it is read again for late askers.
 */
#ifndef TB_MEAN_H
#define TB_MEAN_H

#include "compat.h"

#include "lanes.h"

#define TB_MEAN_BITS 24
#define TB_MEAN_PAIR 0x0000ffff0000ffffULL
#define TB_MEAN_TOP 0xff000000ff000000ULL

static __always_inline __u64 tb_mean_reciprocal(__u32 count)
{
	return ((1U << TB_MEAN_BITS) + count - 1) / count;
}

/* Four lanes n / 2, to be added before the division. */
static __always_inline __u64 tb_mean_half(__u32 count)
{
	return (count / 2) * 0x0001000100010001ULL;
}

/* Eight mean codes in the order of the codes, from a word of the even sums and one of the odd ones. */
static __always_inline __u64 tb_mean_word(__u64 even, __u64 odd, __u64 half, __u64 m)
{
	__u64 even1, odd1, out;

	even += half;
	odd += half;
	even1 = (even >> 16 & TB_MEAN_PAIR) * m & TB_MEAN_TOP;
	odd1 = (odd >> 16 & TB_MEAN_PAIR) * m & TB_MEAN_TOP;
	even = (even & TB_MEAN_PAIR) * m & TB_MEAN_TOP;
	odd = (odd & TB_MEAN_PAIR) * m & TB_MEAN_TOP;
	out = even >> 8 | odd;
	out = out >> 8 | even1;
	return out >> 8 | odd1;
}

/* clang-format off */
/* Two lanes of the sums at [s] + at, divided, in the top bytes of the halves of [x]. */
#define TB_MEAN_LANES(x, at, SHIFT) \
	"%[" x "] = *(u64 *)(%[s] + " at ")\n" \
	"%[" x "] += %[half]\n" \
	SHIFT \
	"%[" x "] &= %[pair]\n" \
	"%[" x "] *= %[m]\n" \
	"%[" x "] &= %[top]\n"
/* tb_mean_word in ten registers: sums are read twice, since no register is left to keep them in. */
#define TB_MEAN_WORD(at, next, back) \
	TB_MEAN_LANES("t", at, "") "%[t] >>= 8\n" \
	TB_MEAN_LANES("u", next, "") "%[t] |= %[u]\n" "%[t] >>= 8\n" \
	TB_MEAN_LANES("u", at, "%[u] >>= 16\n") "%[t] |= %[u]\n" "%[t] >>= 8\n" \
	TB_MEAN_LANES("u", next, "%[u] >>= 16\n") "%[t] |= %[u]\n" \
	"*(u64 *)(%[s] + " at ") = %[t]\n" \
	"%[t] = le64 %[t]\n" \
	"*(u64 *)(%[q] - " back ") = %[t]\n"
/* The same where the count is a power of two: four lanes at once, and less than half the time. */
#define TB_MEAN_SHIFT(x, at) \
	"%[" x "] = *(u64 *)(%[s] + " at ")\n" \
	"%[" x "] += %[half]\n" \
	"%[" x "] >>= %[m]\n" \
	"%[" x "] &= %[pair]\n"
#define TB_MEAN_SHIFTED(at, next, back) \
	TB_MEAN_SHIFT("u", next) "%[u] <<= 8\n" \
	TB_MEAN_SHIFT("t", at) "%[t] |= %[u]\n" \
	"*(u64 *)(%[s] + " at ") = %[t]\n" \
	"%[t] = le64 %[t]\n" \
	"*(u64 *)(%[q] - " back ") = %[t]\n"

#define TB_MEAN_ROUNDS(WORD) \
	asm volatile("tb_round_%=:\n" \
		     "if %[q] > %[end] goto tb_done_%=\n" \
		     WORD("0", "8", "64") \
		     WORD("16", "24", "56") \
		     WORD("32", "40", "48") \
		     WORD("48", "56", "40") \
		     WORD("64", "72", "32") \
		     WORD("80", "88", "24") \
		     WORD("96", "104", "16") \
		     WORD("112", "120", "8") \
		     "%[q] += 64\n" \
		     "%[s] += 128\n" \
		     "%[n] += -1\n" \
		     "if %[n] != 0 goto tb_round_%=\n" \
		     "tb_done_%=:\n" \
		     : [q] "+r"(q), [s] "+r"(sums), [n] "+r"(n), [t] "=&r"(t), [u] "=&r"(u) \
		     : [end] "r"(end), [m] "r"(m), [half] "r"(half), [pair] "r"(pair), [top] "r"(top) \
		     : "memory")
/* clang-format on */

/* n of a count 2^n; only asked for powers of two. */
static __always_inline __u64 tb_mean_log(__u32 count)
{
	return !!(count & 0xaa) | !!(count & 0xcc) << 1 | !!(count & 0xf0) << 2 |
	       !!(count & 0x100) << 3;
}

/* The mean of what is left behind the whole rounds of a short row (lanes.h). */
static __always_inline void tb_mean_rest(__u64 *sums, void *codes, const void *end, __u64 half,
					 __u64 m)
{
	__u64 whole = tb_lanes_whole(codes, end);
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
			sums[2 * j] = tb_mean_word(sums[2 * j], sums[2 * j + 1], half, m);
			((tb_u64 *)codes)[j] = tb_le64(sums[2 * j]);
		}
		codes += TB_ROW_STEP;
		sums += TB_ROW_STEP / 4;
	}
}

/*
 * The mean of a row of sums into codes up to end, and over the even words of the sums. The loop is in assembly for the
 * reason given in lanes.h.
 */
static __always_inline void tb_mean(__u64 *sums, void *codes, const void *end, __u32 count)
{
	__u64 m = tb_mean_reciprocal(count), half = tb_mean_half(count), pair = TB_MEAN_PAIR;
	__u64 top = TB_MEAN_TOP, n = TB_WIDTH / TB_LANES_ROUND, t, u;
	void *q = codes + TB_LANES_ROUND;

	tb_mean_rest(sums, codes, end, half, m);
	if (count & (count - 1)) {
		TB_MEAN_ROUNDS(TB_MEAN_WORD);
	} else {
		pair = TB_LANES_MASK;
		m = tb_mean_log(count);
		TB_MEAN_ROUNDS(TB_MEAN_SHIFTED);
	}
}

/* clang-format off */
#define TB_MEAN_KEPT(at, back) \
	"%[t] = *(u64 *)(%[s] + " at ")\n" \
	"%[t] = le64 %[t]\n" \
	"*(u64 *)(%[q] - " back ") = %[t]\n"
/* clang-format on */

/* The mean of a final row into codes up to end. */
static __always_inline void tb_mean_again(const __u64 *kept, void *codes, const void *end)
{
	__u64 n = TB_WIDTH / TB_LANES_ROUND, whole = tb_lanes_whole(codes, end), t;
	void *q = codes + TB_LANES_ROUND;
	int i, j;

	if (whole <= TB_LANES_MOST) {
		const __u64 *behind = kept + whole / 4;
		void *rest = codes + whole;

#pragma clang loop unroll(disable)
		for (i = 0; i < TB_LANES_ROUND / TB_ROW_STEP - 1; i++) {
			if (rest + TB_ROW_STEP > end)
				break;
#pragma unroll
			for (j = 0; j < TB_ROW_STEP / 8; j++)
				((tb_u64 *)rest)[j] = tb_le64(behind[2 * j]);
			rest += TB_ROW_STEP;
			behind += TB_ROW_STEP / 4;
		}
	}
	/* clang-format off */
	asm volatile("tb_round_%=:\n"
		     "if %[q] > %[end] goto tb_done_%=\n"
		     TB_MEAN_KEPT("0", "64") TB_MEAN_KEPT("16", "56")
		     TB_MEAN_KEPT("32", "48") TB_MEAN_KEPT("48", "40")
		     TB_MEAN_KEPT("64", "32") TB_MEAN_KEPT("80", "24")
		     TB_MEAN_KEPT("96", "16") TB_MEAN_KEPT("112", "8")
		     "%[q] += 64\n"
		     "%[s] += 128\n"
		     "%[n] += -1\n"
		     "if %[n] != 0 goto tb_round_%=\n"
		     "tb_done_%=:\n"
		     : [q] "+r"(q), [s] "+r"(kept), [n] "+r"(n), [t] "=&r"(t)
		     : [end] "r"(end)
		     : "memory");
	/* clang-format on */
}

#endif /* TB_MEAN_H */
