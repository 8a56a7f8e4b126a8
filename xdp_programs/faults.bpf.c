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
 * A link of the lab may carry both families of IP, so this program knows both.
 *
 * State and settings lie in one record, changed under a lock, so that a seed gives the same faults for the
 * same order of packets, on however many CPUs they come.
 */
#include "faults.h"
#include "maps.h"
#include "parse.h"

#define TB_IPPROTO_TCP 6
/* Where UDP begins, behind an IP header without options. */
#define TB_UDP_OF_IPV4 (TB_IP_OFFSET + sizeof(struct iphdr))
#define TB_UDP_OF_IPV6 (TB_IP_OFFSET + sizeof(struct ipv6hdr))

/*
 * Where a packet's UDP header is, or would be, if faults may hit it; 0 if they may not. They may hit all of IPv4, and of
 * IPv6 what has UDP or TCP right behind its header: neighbour discovery (ARP's part in IPv6) and whatever has extension
 * headers passes. *udp: it is UDP, first fragments of IPv4 included.
 */
static __always_inline __u32 tb_transport(void *data, void *end, int *udp)
{
	struct ethhdr *eth = data;
	struct iphdr *ip = data + TB_IP_OFFSET;
	struct ipv6hdr *ip6 = data + TB_IP_OFFSET;

	*udp = 0;
	if (data + TB_UDP_OF_IPV4 + sizeof(struct udphdr) > end)
		return 0;
	if (eth->h_proto == tb_be16(ETH_P_IP)) {
		*udp = *(__u8 *)ip == 0x45 && ip->protocol == TB_IPPROTO_UDP &&
		       !(ip->frag_off & tb_be16(0x1fff));
		return TB_UDP_OF_IPV4;
	}
	if (eth->h_proto != tb_be16(ETH_P_IPV6) || *(__u8 *)ip6 >> 4 != 6 ||
	    data + TB_UDP_OF_IPV6 + sizeof(struct udphdr) > end)
		return 0;
	*udp = ip6->nexthdr == TB_IPPROTO_UDP;
	return *udp || ip6->nexthdr == TB_IPPROTO_TCP ? TB_UDP_OF_IPV6 : 0;
}

/* Whether UDP is to or from a port. */
static __always_inline int tb_has_port(void *data, void *end, __u32 at, __u32 port)
{
	struct udphdr *udp = data + at;

	return (void *)(udp + 1) <= end &&
	       (udp->dest == tb_be16((__u16)port) || udp->source == tb_be16((__u16)port));
}

/*
 * Makes UDP fit for redirection: on a veth its checksum was only promised, a redirected frame no longer says so, and the
 * receiver's stack would drop it; 0 means that there is none. IPv6 must have one, which the sender's stack has made
 * already (lab: tx off).
 */
static __always_inline void tb_unpromise(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct udphdr *udp = data + TB_UDP_OF_IPV4;

	if ((void *)(udp + 1) <= end)
		udp->check = 0;
}

/* Flips a bit behind the UDP header at an offset; false if there is none. The mask tells the verifier a bound. */
static __always_inline int tb_flip(struct xdp_md *ctx, __u32 at, __u32 where)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u64 bits, bit;
	__u8 *byte;

	at += sizeof(struct udphdr);
	if (data + at >= end)
		return 0;
	bits = (end - data - at) * 8;
	bit = (__u64)where * bits >> 32;
	byte = data + at + (bit >> 3 & 0x3fff);
	if ((void *)(byte + 1) > end)
		return 0;
	*byte ^= 1 << (bit & 7);
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
	__u32 port = TB_PORT_TAKES, at;
	struct tb_fate fate;
	int udp;

	if (!counts || !faults || !lock)
		return XDP_PASS;
	at = tb_transport(data, end, &udp);
	if (!at || (faults->port && !(udp && tb_has_port(data, end, at, faults->port)))) {
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
	if (port == TB_PORT_MARKS && data + TB_UDP_OF_IPV4 <= end &&
	    (at == TB_UDP_OF_IPV6 ? tb_mark_ipv6(data + TB_IP_OFFSET)
				  : tb_mark(data + TB_IP_OFFSET)))
		counts->marked++;
	if (fate.lost) {
		counts->lost++;
		if (!udp)
			counts->lost_other++;
		return XDP_DROP;
	}
	if (fate.corrupted && tb_flip(ctx, at, fate.where))
		counts->corrupted++;
	if (!(fate.duplicated || fate.reordered) || !udp)
		return XDP_PASS;
	if (at == TB_UDP_OF_IPV4)
		tb_unpromise(ctx);
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
