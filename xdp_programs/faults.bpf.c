// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Faults on a cable of the lab, on the port where packets come in: loss (Bernoulli, Gilbert-Elliott),
 * duplication, reordering, one flipped bit. What is not hit goes on to the bridge as if nothing were there.
 *
 * A duplicate is a broadcast redirect through a device map that holds the outgoing port twice. Both copies go
 * round the bridge and the port's qdisc; the veth at the other end of that port must take redirected frames,
 * that is, have an XDP program (a worker's interface has) or GRO switched on. Only UDP is duplicated.
 *
 * A packet that is put out of order takes the same way once: it leaves before what waits in the port's qdisc, and
 * after what came with it in one poll.
 *
 * Before all of that stands a port with a finite queue, if the lab has one: what does not fit is dropped, what comes
 * above a threshold is marked.
 *
 * State and settings lie in one record, changed under a lock, so that a seed gives the same faults for the
 * same order of packets, on however many CPUs they come.
 */
#include "faults.h"
#include "maps.h"
#include "parse.h"

/* UDP behind an IPv4 header without options, first fragments included. */
static __always_inline int tb_udp(const struct iphdr *ip)
{
	return *(__u8 *)ip == 0x45 && ip->protocol == TB_IPPROTO_UDP &&
	       !(ip->frag_off & tb_be16(0x1fff));
}

/* Whether faults may hit the packet: any IPv4, or UDP to or from a port. */
static __always_inline int tb_exposed(void *data, void *end, __u32 port)
{
	struct ethhdr *eth = data;
	struct iphdr *ip = data + TB_IP_OFFSET;
	struct udphdr *udp = data + TB_UDP_OFFSET;

	if (data + TB_HEAD_OFFSET > end || eth->h_proto != tb_be16(ETH_P_IP))
		return 0;
	if (!port)
		return 1;
	return tb_udp(ip) &&
	       (udp->dest == tb_be16((__u16)port) || udp->source == tb_be16((__u16)port));
}

/*
 * Makes a packet fit for redirection: on a veth its UDP checksum was only promised, a redirected frame no
 * longer says so, and the receiver's stack would drop it; 0 means that there is none. Only for UDP, then.
 */
static __always_inline int tb_unpromise(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct udphdr *udp = data + TB_UDP_OFFSET;

	if (data + TB_HEAD_OFFSET > end || !tb_udp(data + TB_IP_OFFSET))
		return 0;
	udp->check = 0;
	return 1;
}

/* Flips a bit behind the UDP header; false if there is none. The mask tells the verifier a bound. */
static __always_inline int tb_flip(struct xdp_md *ctx, __u32 where)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u64 bits, bit;
	__u8 *at;

	if (data + TB_HEAD_OFFSET >= end)
		return 0;
	bits = (end - data - TB_HEAD_OFFSET) * 8;
	bit = (__u64)where * bits >> 32;
	at = data + TB_HEAD_OFFSET + (bit >> 3 & 0x3fff);
	if ((void *)(at + 1) > end)
		return 0;
	*at ^= 1 << (bit & 7);
	return 1;
}

TB_PROGRAM tb_faults(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct tb_fault_counts *counts = TB_LOOKUP(fault_counts, bpf_get_smp_processor_id());
	struct tb_faults *faults = TB_LOOKUP(faults, 0);
	struct tb_lock *lock = TB_LOOKUP(fault_lock, 0);
	__u64 now = bpf_ktime_get_ns();
	__u32 port = TB_PORT_TAKES;
	struct tb_fate fate;

	if (!counts || !faults || !lock)
		return XDP_PASS;
	if (!tb_exposed(data, end, faults->port)) {
		counts->passed++;
		return XDP_PASS;
	}
	counts->seen++;
	bpf_spin_lock(&lock->lock);
	if (faults->rate)
		port = tb_port_take(faults, now, end - data);
	tb_fate_draw(faults, now, &fate);
	bpf_spin_unlock(&lock->lock);
	if (port == TB_PORT_FULL) {
		counts->overflowed++;
		return XDP_DROP;
	}
	if (port == TB_PORT_MARKS && data + TB_HEAD_OFFSET <= end && tb_mark(data + TB_IP_OFFSET))
		counts->marked++;
	if (fate.lost) {
		counts->lost++;
		if (data + TB_HEAD_OFFSET <= end && !tb_udp(data + TB_IP_OFFSET))
			counts->lost_other++;
		return XDP_DROP;
	}
	if (fate.corrupted && tb_flip(ctx, fate.where))
		counts->corrupted++;
	if (!(fate.duplicated || fate.reordered) || !tb_unpromise(ctx))
		return XDP_PASS;
	if (!fate.duplicated) {
		counts->reordered++;
		return bpf_redirect_map(TB_MAP(fault_ports), 0, 0);
	}
	counts->duplicated++;
	return bpf_redirect_map(TB_MAP(fault_ports), 0, BPF_F_BROADCAST);
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
