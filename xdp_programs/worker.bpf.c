// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The worker's XDP program: contributions into slot sums, results into result rows, probes turned round,
 * other control packets to the socket. What is not ours passes untouched and is not counted.
 *
 * Compiled for one payload width, TB_WIDTH, and loaded for one UDP port, one size of the result ring and one VLAN, TB_PORT,
 * TB_RESULT_ROWS and TB_VLAN (0: packets have no tags). How much of the sums ring is in use stands in the control record: a job goes round in no more than it
 * needs.
 */
#include "ingest.h"
#include "vlan.h"

TB_PROGRAM tb_worker(struct xdp_md *ctx)
{
	__u16 vlan = TB_VLAN;
	__u32 tag = 0;
	int action;

	if (vlan)
		tag = tb_tag_off(ctx, vlan);
	action = tb_ingest(ctx);
	if (vlan && action == XDP_TX && !tag)
		tag = tb_be16(vlan);
	if (vlan && tag && action != XDP_DROP && !tb_tag_on(ctx, tag))
		return XDP_ABORTED;
	return action;
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
