/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * auth-7: what carries a check although its job has a key. A switch has no key; where the user allows that, its results
 * of ops whose rows it owns are taken as they are, and echoes of probes to it. Nothing else, and of no other sender.
 */
#ifndef TB_BARE_H
#define TB_BARE_H

#include "compat.h"

#include "abi.h"
#include "parse.h"
#include "window.h"
#include "wire.h"

static __always_inline int tb_bare(const struct tb_control *control, const struct tb_header *head)
{
	__u32 tagged = TB_READ_ONCE(control->tagged);

	if (!(tagged & (TB_TAGGING_BARE | TB_TAGGING_BARE_BEFORE)) ||
	    head->sender + 1U != control->ranks)
		return 0;
	if (head->type == TB_TYPE_ECHO)
		return 1;
	if (head->type != TB_TYPE_RESULT ||
	    !(head->flags & tb_be16(TB_FLAG_SWITCHED | TB_FLAG_SUMS)))
		return 0;
	if (tb_distance(tb_be32(head->op), TB_READ_ONCE(control->map_since)) < 0)
		return tagged & TB_TAGGING_BARE_BEFORE;
	return tagged & TB_TAGGING_BARE;
}

#ifndef TB_USER
/* The same question of a frame as it comes, which may still have a VLAN's tag. It only chooses which program judges. */
static __always_inline int tb_looks_bare(struct xdp_md *ctx, const struct tb_control *control,
					 __u32 vlan)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;

	if (data + TB_CODES_OFFSET + 4 > end)
		return 0;
	if (vlan && eth->h_proto == tb_be16(ETH_P_8021Q))
		data += 4;
	return tb_bare(control, data + TB_HEAD_OFFSET);
}
#endif

#endif /* TB_BARE_H */
