// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The switch's XDP program, on the ports of a Linux box: sums the contributions of all workers of a job and, when the
 * last one is in or a flush asks for it, writes the mean over the packet and sends a copy to every worker. What is not
 * for the switch passes untouched to the box's own bridge.
 *
 * Compiled for one payload width, TB_WIDTH, and loaded for a number of ports, TB_PORTS (a power of two under which no two
 * ports' indices meet).
 */
#include "aggregate.h"

TB_PROGRAM tb_switch(struct xdp_md *ctx)
{
	return tb_relay(ctx);
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
