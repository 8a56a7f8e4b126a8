/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A datagram on its way out, sent to somebody else: Ethernet and IP destination, UDP port and both checksums.
 * Only the headers are touched, so a buffer of 64 KB in many segments costs as much as a single packet.
 */
#ifndef TB_FANOUT_H
#define TB_FANOUT_H

#include "compat.h"

#include "abi.h"
#include "ip.h"
#include "parse.h"

struct tb_datagram {
	struct ethhdr *eth;
	tb_ip_header *ip;
	struct udphdr *udp;
};

/* What readdressing changes, as the original had it. */
struct tb_original {
	struct tb_ip_place to;
	__be16 port;
	__u8 mac[ETH_ALEN];
	__sum16 udp_check;
};

/* Headers of a datagram over IP without options; false for all else. The stack keeps them linear. */
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
	return tb_ip_plain(d->eth, d->ip) && tb_ip_from(d->ip, fanout->address, fanout->prefix) &&
	       (__u16)(tb_be16(d->udp->source) - fanout->port) < fanout->ports &&
	       tb_ip_to(d->ip, lead->address, lead->prefix) && d->udp->dest == lead->port;
}

static __always_inline void tb_fanout_keep(struct tb_original *o, const struct tb_datagram *d)
{
	tb_ip_place_of(&o->to, d->ip);
	o->port = d->udp->dest;
	__builtin_memcpy(o->mac, d->eth->h_dest, ETH_ALEN);
	o->udp_check = d->udp->check;
}

static __always_inline void tb_fanout_restore(const struct tb_datagram *d,
					      const struct tb_original *o)
{
	tb_ip_put(d->ip, &o->to);
	d->udp->dest = o->port;
	__builtin_memcpy(d->eth->h_dest, o->mac, ETH_ALEN);
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
	__be32 words[TB_IP_WORDS];
	struct tb_datagram d;
	__u32 i;

	if (!tb_datagram_of(skb, &d))
		return 0;
	__builtin_memcpy(d.eth->h_dest, to->mac, ETH_ALEN);
	tb_ip_words(words, to->address, to->prefix);
	tb_ip_move(d.ip, &o->to, words);
	d.udp->dest = to->port;
	if (skb->gso_size) {
		d.udp->check = o->udp_check;
#pragma unroll
		for (i = 0; i < TB_IP_WORDS; i++)
			d.udp->check = tb_sum_moved(d.udp->check, o->to.words[i], words[i]);
		return 1;
	}
	d.udp->check = o->udp_check;
#pragma unroll
	for (i = 0; i < TB_IP_WORDS; i++)
		if (bpf_l4_csum_replace(skb, at, o->to.words[i], words[i],
					BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0 | 4))
			return 0;
	return !bpf_l4_csum_replace(skb, at, o->port, to->port, BPF_F_MARK_MANGLED_0 | 2);
}

#endif /* TB_FANOUT_H */
