/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From a frame as it comes to a packet and back: a job may be on a VLAN, whose tags no rule knows of. */
#ifndef TB_RECEIVE_H
#define TB_RECEIVE_H

#include "ingest.h"
#include "vlan.h"

static __always_inline int tb_receive(struct xdp_md *ctx)
{
	__u16 vlan = TB_VLAN;
	__u32 tag = 0;
	int action;

	if (vlan)
		tag = tb_vlan_off(ctx, vlan);
	action = tb_ingest(ctx);
	if (vlan && action == XDP_TX && !tag)
		tag = tb_be16(vlan);
	if (vlan && tag && action != XDP_DROP && !tb_vlan_on(ctx, tag))
		return XDP_ABORTED;
	return action;
}

#endif /* TB_RECEIVE_H */
