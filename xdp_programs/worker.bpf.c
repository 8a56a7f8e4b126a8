// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The worker's XDP program: contributions into slot sums, results into result rows, probes turned round,
 * other control packets to the socket. What is not ours passes untouched and is not counted.
 *
 * Compiled for one payload width, TB_WIDTH, and loaded for one UDP port, one size of the result ring and one VLAN, TB_PORT,
 * TB_RESULT_ROWS and TB_VLAN (0: packets have no tags). How much of the sums ring is in use stands in the control record: a
 * job goes round in no more than it needs.
 */
#include "receive.h"

TB_PROGRAM tb_worker(struct xdp_md *ctx)
{
	tb_hand_over(ctx);
	return tb_receive(ctx);
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
