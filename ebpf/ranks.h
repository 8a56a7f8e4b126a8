/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Bitmaps of 256 ranks. */
#ifndef TB_RANKS_H
#define TB_RANKS_H

#include "compat.h"

#include "wire.h"

#define TB_RANK_WORDS (TB_MAX_RANKS / 64)

/* The verifier must see that the index fits, wherever the rank came from. */
static __always_inline __u32 tb_rank_word(__u32 rank)
{
	return rank >> 6 & (TB_RANK_WORDS - 1);
}

static __always_inline __u64 tb_rank_bit(__u32 rank)
{
	return 1ULL << (rank & 63);
}

static __always_inline int tb_rank_in(const __u64 *ranks, __u32 rank)
{
	return !!(TB_READ_ONCE(ranks[tb_rank_word(rank)]) & tb_rank_bit(rank));
}

static __always_inline void tb_rank_put(__u64 *ranks, __u32 rank)
{
	ranks[tb_rank_word(rank)] |= tb_rank_bit(rank);
}

/* Whether every rank of some is in all. */
static __always_inline int tb_ranks_within(const __u64 *some, const __u64 *all)
{
	return !((some[0] & ~all[0]) | (some[1] & ~all[1]) | (some[2] & ~all[2]) |
		 (some[3] & ~all[3]));
}

#endif /* TB_RANKS_H */
