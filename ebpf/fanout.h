/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A datagram on its way out, sent to somebody else: Ethernet and IP destination, UDP port and both checksums.
 * Only the headers are touched, so a buffer of 64 KB in many segments costs as much as a single packet.
 */
#ifndef TB_FANOUT_H
#define TB_FANOUT_H

#include "compat.h"

#include "abi.h"
#include "parse.h"

struct tb_datagram {
	struct ethhdr *eth;
	struct iphdr *ip;
	struct udphdr *udp;
};

/* What readdressing changes, as the original had it. */
struct tb_original {
	__be32 address;
	__be16 port;
	__u8 mac[ETH_ALEN];
	__sum16 ip_check;
	__sum16 udp_check;
};

/* Headers of a datagram over IPv4 without options; false for all else. The stack keeps them linear. */
static __always_inline int tb_datagram_of(struct __sk_buff *skb, struct tb_datagram *d)
{
	void *data = (void *)(long)skb->data;

	d->eth = data;
	d->ip = data + TB_IP_OFFSET;
	d->udp = data + TB_UDP_OFFSET;
	return data + TB_HEAD_OFFSET <= (void *)(long)skb->data_end;
}

/* Whether the datagram is one that the host wants at every live peer: from its sockets, to the lead. */
static __always_inline int tb_fanout_wanted(const struct tb_datagram *d,
					    const struct tb_fanout *fanout,
					    const struct tb_fanout_peer *lead)
{
	return d->eth->h_proto == tb_be16(ETH_P_IP) && *(__u8 *)d->ip == 0x45 &&
	       d->ip->protocol == TB_IPPROTO_UDP && !(d->ip->frag_off & tb_be16(0x3fff)) &&
	       d->ip->saddr == fanout->address &&
	       (__u16)(tb_be16(d->udp->source) - fanout->port) < fanout->ports &&
	       d->ip->daddr == lead->address && d->udp->dest == lead->port;
}

/* A one's complement sum of few terms as 16 bits; 0 only where all terms are. */
static __always_inline __u16 tb_fold(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* A sum over words of which one, before, is now after; in any byte order, as long as it is one. */
static __always_inline __u16 tb_sum_moved(__u16 sum, __be32 before, __be32 after)
{
	return tb_fold((__u64)sum + (__u32)~before + after);
}

static __always_inline void tb_fanout_keep(struct tb_original *o, const struct tb_datagram *d)
{
	o->address = d->ip->daddr;
	o->port = d->udp->dest;
	__builtin_memcpy(o->mac, d->eth->h_dest, ETH_ALEN);
	o->ip_check = d->ip->check;
	o->udp_check = d->udp->check;
}

static __always_inline void tb_fanout_restore(const struct tb_datagram *d,
					      const struct tb_original *o)
{
	d->ip->daddr = o->address;
	d->udp->dest = o->port;
	__builtin_memcpy(d->eth->h_dest, o->mac, ETH_ALEN);
	d->ip->check = o->ip_check;
	d->udp->check = o->udp_check;
}

/*
 * Addresses the datagram, which was o at first, to another peer; false where it cannot be. Pointers into it end
 * here. From o each time, so that one that failed half-way leaves nothing behind.
 *
 * Buffers of several segments carry, whoever computes checksums later on, the plain sum over the pseudo-header,
 * without ports. bpf_l4_csum_replace believes a whole checksum to be there where the device computes none, and
 * spoils it. For single packets it knows better than a program can: sum or whole, 0 for none.
 */
static __always_inline int tb_fanout_readdress(struct __sk_buff *skb, const struct tb_original *o,
					       const struct tb_fanout_peer *to)
{
	const __u32 at = TB_UDP_OFFSET + 6;
	struct tb_datagram d;

	if (!tb_datagram_of(skb, &d))
		return 0;
	__builtin_memcpy(d.eth->h_dest, to->mac, ETH_ALEN);
	d.ip->daddr = to->address;
	d.ip->check = ~tb_sum_moved(~o->ip_check, o->address, to->address);
	d.udp->dest = to->port;
	if (skb->gso_size) {
		d.udp->check = tb_sum_moved(o->udp_check, o->address, to->address);
		return 1;
	}
	d.udp->check = o->udp_check;
	return !bpf_l4_csum_replace(skb, at, o->address, to->address,
				    BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0 | 4) &&
	       !bpf_l4_csum_replace(skb, at, o->port, to->port, BPF_F_MARK_MANGLED_0 | 2);
}

#endif /* TB_FANOUT_H */
