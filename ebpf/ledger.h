/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The drop ledger (kernel-21): one counter per (cpu, sender, verdict), each written by its own CPU only. */
#ifndef TB_LEDGER_H
#define TB_LEDGER_H

#include "compat.h"

#include "abi.h"

static __always_inline __u32 tb_ledger_row(__u32 cpu, __u32 sender)
{
	return cpu * (TB_MAX_RANKS + 1) + sender;
}

static __always_inline void tb_ledger_count(struct tb_ledger *row, __u32 verdict)
{
	row->verdict[verdict & (TB_VERDICTS - 1)]++;
}

/* What the kernel does with a packet of ours after its verdict. */
static __always_inline int tb_action(__u32 verdict)
{
	if (verdict == TB_VERDICT_CONTROL_PASSED)
		return XDP_PASS;
	return verdict == TB_VERDICT_REFLECTED ? XDP_TX : XDP_DROP;
}

#endif /* TB_LEDGER_H */
