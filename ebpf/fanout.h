/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A datagram on its way out, sent to somebody else at the same port: Ethernet and IP destination, and both checksums.
 * Only the headers are touched, so a buffer of 64 KB in many segments costs as much as a single packet.
 */
#ifndef TB_FANOUT_H
#define TB_FANOUT_H

#include "compat.h"

#include "abi.h"
#include "ip.h"
#include "parse.h"
#include "wire.h"

struct tb_datagram {
	struct ethhdr *eth;
	tb_ip_header *ip;
	struct udphdr *udp;
};

/* What readdressing changes, as the original had it. */
struct tb_original {
	struct tb_ip_place to;
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

/*
 * Whether the datagram is this host's, to the port of the jobs that the program was loaded for. The maps are written by
 * whoever may train: they say nothing of other ports, so that nobody else's traffic can be had by them.
 */
static __always_inline int tb_fanout_ours(const struct tb_datagram *d,
					  const struct tb_fanout *fanout, __u16 port)
{
	return tb_ip_plain(d->eth, d->ip) && d->udp->dest == tb_be16(port) &&
	       tb_ip_from(d->ip, fanout->address, fanout->prefix);
}

/* Whether it is one that the host wants at every live peer: from its sockets, to the lead. */
static __always_inline int tb_fanout_wanted(const struct tb_datagram *d,
					    const struct tb_fanout *fanout,
					    const struct tb_fanout_peer *lead)
{
	return tb_be16(d->udp->source) == fanout->port &&
	       tb_ip_to(d->ip, lead->address, lead->prefix);
}

/* Takes over the Ethernet address that the kernel has found for a peer; written only where it is another one. */
static __always_inline void tb_fanout_learn(struct tb_fanout_peer *peer,
					    const struct tb_datagram *d)
{
	const __u16 *from = (const __u16 *)d->eth->h_dest;
	__u16 *to = (__u16 *)peer->mac;

	if (!((to[0] ^ from[0]) | (to[1] ^ from[1]) | (to[2] ^ from[2])))
		return;
	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2];
}

/* Whether a copy can be addressed to a peer: the host has named it, and has sent it something. */
static __always_inline int tb_fanout_reachable(const struct tb_fanout_peer *peer)
{
	const __u16 *mac = (const __u16 *)peer->mac;

	return tb_registered(peer->address, peer->prefix) && (mac[0] | mac[1] | mac[2]);
}

static __always_inline void tb_fanout_keep(struct tb_original *o, const struct tb_datagram *d)
{
	tb_ip_place_of(&o->to, d->ip);
	__builtin_memcpy(o->mac, d->eth->h_dest, ETH_ALEN);
	o->udp_check = d->udp->check;
}

static __always_inline void tb_fanout_restore(const struct tb_datagram *d,
					      const struct tb_original *o)
{
	tb_ip_put(d->ip, &o->to);
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
	return 1;
}

#endif /* TB_FANOUT_H */
