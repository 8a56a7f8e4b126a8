/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From a frame as it comes to a packet and back: a job may be on a VLAN, whose tags no rule knows of. */
#ifndef TB_RECEIVE_H
#define TB_RECEIVE_H

#include "ingest.h"
#include "vlan.h"

static __always_inline int tb_receive(struct xdp_md *ctx)
{
	__u16 vlan = TB_VLAN;
	struct tb_vlan_seen seen = {};
	int action;

	if (vlan) {
		tb_vlan_look(ctx, &seen);
		if (tb_vlan_is(&seen, vlan) && !tb_vlan_off(ctx))
			return XDP_PASS;
	}
	action = tb_ingest(ctx);
	if (!vlan || action == XDP_DROP)
		return action;
	if (!tb_vlan_is(&seen, vlan)) {
		if (action != XDP_TX)
			return action;
		seen.tag = tb_be16(vlan);
	}
	return tb_vlan_on(ctx, seen.tag) ? action : XDP_ABORTED;
}

#endif /* TB_RECEIVE_H */
