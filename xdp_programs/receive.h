/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The way into both of the worker's programs, and out of them: which of the two takes a packet, and tags of a VLAN. */
#ifndef TB_RECEIVE_H
#define TB_RECEIVE_H

#include "ingest.h"
#include "vlan.h"

#ifndef TB_TAGGED
/*
 * auth-2: in a job with a key the program of tagged.bpf.c takes a packet in, as it came, and this returns only where there
 * is none. Nothing is taken in then.
 */
static __always_inline void tb_hand_over(struct xdp_md *ctx)
{
	const struct tb_control *control = TB_LOOKUP(control, 0);

	if (control && TB_READ_ONCE(control->tagged))
		((long (*)(void *, void *, __u32))(long)TB_TAIL_CALL)(ctx, TB_MAP(programs), 0);
}
#endif

static __always_inline int tb_receive(struct xdp_md *ctx)
{
	__u16 vlan = TB_VLAN;
	__u32 tag = 0;
	int action;

#ifndef TB_TAGGED
	tb_hand_over(ctx);
#endif
	if (vlan)
		tag = tb_tag_off(ctx, vlan);
	action = tb_ingest(ctx);
	if (vlan && action == XDP_TX && !tag)
		tag = tb_be16(vlan);
	if (vlan && tag && action != XDP_DROP && !tb_tag_on(ctx, tag))
		return XDP_ABORTED;
	return action;
}

#endif /* TB_RECEIVE_H */
