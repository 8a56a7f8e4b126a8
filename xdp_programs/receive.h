/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From a frame as it comes to a packet and back: a job may be on a VLAN, whose tags no rule knows of. */
#ifndef TB_RECEIVE_H
#define TB_RECEIVE_H

#include "ingest.h"
#include "vlan.h"

/*
 * A tag of VLAN 0 names none, and says a priority (kernel-1). It is taken off what is ours, and not put back: the host
 * does so, too. Whose packet it is can be told in front of all rules, since everything lies further on by a tag.
 */
static __always_inline void tb_priority_off(struct xdp_md *ctx)
{
	const struct tb_control *control;
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct tb_vlan_frame *frame = data;

	if (data + TB_VLAN_BYTES + TB_HEAD_OFFSET > end)
		return;
	if (tb_likely(frame->protocol != tb_be16(ETH_P_8021Q)) || frame->tag & tb_be16(TB_VLAN_ID))
		return;
	control = TB_LOOKUP(control, 0);
	data += TB_VLAN_BYTES;
	if (control && tb_names_us(data, data + TB_IP_OFFSET, data + TB_UDP_OFFSET, TB_PORT,
				   control->address, control->prefix, control->group))
		tb_vlan_off(ctx);
}

static __always_inline int tb_receive(struct xdp_md *ctx)
{
	__u16 vlan = TB_VLAN;
	struct tb_vlan_seen seen = {};
	int action;

	if (!vlan)
		tb_priority_off(ctx);
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
