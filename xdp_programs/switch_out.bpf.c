// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Runs in the device maps of a switch, once for every copy of a result: the worker behind this port becomes its
 * destination. The job stands in the first byte of the Ethernet destination (aggregate.h).
 */
#include "maps.h"
#include "parse.h"
#include "switch.h"

TB_DEVMAP_PROGRAM tb_switch_out(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u32 ifindex = ctx->egress_ifindex, place = ifindex & (TB_PORTS - 1);
	struct ethhdr *eth = data;
	struct tb_switch_port *port;
	struct tb_switch_rank *rank;

	if (data + TB_HEAD_OFFSET > end)
		return XDP_DROP;
	rank = TB_LOOKUP(switch_out, (eth->h_dest[0] & (TB_SWITCH_JOBS - 1)) * TB_PORTS + place);
	if (!rank || rank->ifindex != ifindex || !tb_registered(rank->address, rank->prefix))
		return XDP_DROP;
	tb_switch_to(eth, data + TB_IP_OFFSET, data + TB_UDP_OFFSET, rank);
	port = TB_LOOKUP(switch_ports, bpf_get_smp_processor_id() * TB_PORTS + place);
	if (port)
		port->results++;
	return XDP_PASS;
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
