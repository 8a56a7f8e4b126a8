/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * kernel-20: order between CPUs without a lock, where loads and stores pass each other (arm64). BPF has a load that
 * acquires and a store that releases since Linux 6.15; these two are made of what 5.19 has.
 */
#ifndef TB_ORDER_H
#define TB_ORDER_H

#include "compat.h"

/*
 * Writes a word that readers without a lock go by: whoever sees it sees all that was written before it. An exchange,
 * since that is fully ordered.
 */
static __always_inline void tb_store_release(void *to, __u64 word)
{
	__atomic_exchange_n((tb_u64 *)to, word, __ATOMIC_SEQ_CST);
}

/*
 * 0, in a way that depends on word: an address that it is added to is not read before word has been. In assembly,
 * since a compiler would see through it; processors do not look.
 */
static __always_inline __u64 tb_after(__u64 word)
{
#ifdef TB_USER
	(void)word; /* one thread writes, and it reads what it wrote */
	return 0;
#else
	asm volatile("%[word] &= 0" : [word] "+r"(word));
	return word;
#endif
}

#endif /* TB_ORDER_H */
