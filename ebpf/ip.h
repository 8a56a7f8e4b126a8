/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The IP header of the job's family: IPv4, or IPv6 in a program built with TB_IPV6. A job is of one, and so is a program:
 * whatever is of the other passes. All that knows of the difference is here.
 *
 * IPv6 has no checksum of its own and asks for one of UDP, which an answer that XDP sends gets here (RFC 8200, 8.1).
 * Where a socket receives, the header is an address of either family (host_lib/core/datagram.h).
 */
#ifndef TB_IP_H
#define TB_IP_H

#include "compat.h"

#include "abi.h"

/* The last two bits of an IP header's tos or traffic class (RFC 3168), and the one by which CE differs from ECT(0). */
#define TB_ECN_MASK 3
#define TB_ECN_CE 3
#define TB_ECN_LAST 1

#ifdef TB_USER
#include "datagram.h"
#else
#ifdef TB_IPV6
#define TB_IP_BYTES 40
#define TB_IP_WORDS 4
typedef struct ipv6hdr tb_ip_header;
#else
#define TB_IP_BYTES 20
#define TB_IP_WORDS 1
typedef struct iphdr tb_ip_header;
#endif

/* A one's complement sum of up to 2^15 words of 32 bits as 16 bits; 0 only where all terms are. */
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

/* Whereto a header says that its packet goes: all of it that another destination changes. */
struct tb_ip_place {
	__be32 words[TB_IP_WORDS];
	__sum16 check; /* of IPv4 */
};

/* Whether a socket is bound to a UDP port of an address of this host. */
static __always_inline int tb_socket_at(struct xdp_md *ctx, __be32 address, const __be32 *prefix,
					__u16 port)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sock;

#ifdef TB_IPV6
	tuple.ipv6.daddr[0] = prefix[0];
	tuple.ipv6.daddr[1] = prefix[1];
	tuple.ipv6.daddr[2] = prefix[2];
	tuple.ipv6.daddr[3] = address;
	tuple.ipv6.dport = tb_be16(port);
	sock = bpf_sk_lookup_udp(ctx, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
#else
	(void)prefix;
	tuple.ipv4.daddr = address;
	tuple.ipv4.dport = tb_be16(port);
	sock = bpf_sk_lookup_udp(ctx, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
#endif
	if (!sock)
		return 0;
	bpf_sk_release(sock);
	return 1;
}

#ifdef TB_IPV6
/* Whether an address is that of which the maps hold the last word and those before it. */
static __always_inline int tb_same_address(const struct in6_addr *a, __be32 address,
					   const __be32 *prefix)
{
	const __be32 *words = a->in6_u.u6_addr32;

	return !((words[3] ^ address) | (words[0] ^ prefix[0]) | (words[1] ^ prefix[1]) |
		 (words[2] ^ prefix[2]));
}

/* UDP over this family without extension headers, which is how fragments come, too. */
static __always_inline int tb_ip_plain(const struct ethhdr *eth, const tb_ip_header *ip)
{
	return eth->h_proto == tb_be16(ETH_P_IPV6) && *(const __u8 *)ip >> 4 == 6 &&
	       ip->nexthdr == TB_IPPROTO_UDP;
}

/* Whether an address of the maps is one: IPv6 has none that begin with four bytes of 0 and could be a rank's. */
static __always_inline int tb_registered(__be32 address, const __be32 *prefix)
{
	(void)address;
	return prefix[0] != 0;
}

static __always_inline int tb_ip_to(const tb_ip_header *ip, __be32 address, const __be32 *prefix)
{
	return tb_same_address(&ip->daddr, address, prefix);
}

/* Groups of a job are of IPv4. */
static __always_inline int tb_ip_to_group(const tb_ip_header *ip, __be32 group)
{
	(void)ip;
	(void)group;
	return 0;
}

static __always_inline int tb_ip_from(const tb_ip_header *ip, __be32 address, const __be32 *prefix)
{
	return tb_same_address(&ip->saddr, address, prefix);
}

/* Bytes from the IP header on, as it says. */
static __always_inline __u32 tb_ip_total(const tb_ip_header *ip)
{
	return TB_IP_BYTES + tb_be16(ip->payload_len);
}

/* The class is the byte behind the first four bits. */
static __always_inline __u32 tb_ip_tos(const tb_ip_header *ip)
{
	return ip->priority << 4 | ip->flow_lbl[0] >> 4;
}

/* CE becomes ECT(0) again. */
static __always_inline void tb_unmark(tb_ip_header *ip)
{
	if ((tb_ip_tos(ip) & TB_ECN_MASK) == TB_ECN_CE)
		ip->flow_lbl[0] &= ~(TB_ECN_LAST << 4);
}

static __always_inline void tb_ip_turn(tb_ip_header *ip)
{
	struct in6_addr address = ip->saddr;

	ip->saddr = ip->daddr;
	ip->daddr = address;
}

/* Of a sum over all that UDP's checksum covers, that checksum. */
static __always_inline __sum16 tb_udp_check(__u16 sum)
{
	return sum == 0xffff ? 0xffff : (__u16)~sum; /* 0 would say that there is none */
}

/* Sums what UDP's checksum covers of a datagram's beginning, a constant number of bytes and a multiple of four. */
static __always_inline __u64 tb_udp_sum(const tb_ip_header *ip, struct udphdr *udp, __u32 bytes)
{
	const __be32 *words = ip->saddr.in6_u.u6_addr32; /* and those of daddr behind them */
	__u64 sum = tb_be16(TB_IPPROTO_UDP) + (__u64)udp->len;
	__u32 i;

	udp->check = 0;
#pragma unroll
	for (i = 0; i < 8; i++)
		sum += words[i];
#pragma unroll
	for (i = 0; i < bytes / 4; i++)
		sum += ((const __be32 *)udp)[i];
	return sum;
}

/* Makes the checksum of a datagram of so many bytes, a constant and a multiple of four, which are there. */
static __always_inline void tb_udp_checksum(const tb_ip_header *ip, struct udphdr *udp, __u32 bytes)
{
	udp->check = tb_udp_check(tb_fold(tb_udp_sum(ip, udp, bytes)));
}

/*
 * The same of a whole frame's datagram, whose first bytes are constant; behind them are up to so many more, in sixteens.
 * Pointers into the packet are to be taken anew after it, as they are here: at each exit of the loop the verifier knows
 * another length of the frame, and would carry them on.
 */
static __always_inline void tb_udp_checksum_to(struct xdp_md *ctx, const tb_ip_header *ip,
					       struct udphdr *udp, __u32 bytes, __u32 most)
{
	const void *at = (const void *)udp + bytes, *end = (void *)(long)ctx->data_end;
	__u64 sum = tb_udp_sum(ip, udp, bytes);
	__u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < most / 16; i++) {
		const __be32 *words = at;

		if (at + 16 > end)
			break;
		sum += (__u64)words[0] + words[1] + words[2] + words[3];
		at += 16;
	}
	asm volatile("" ::: "memory");
	udp = (void *)(long)ctx->data + ETH_HLEN + TB_IP_BYTES;
	if ((void *)(udp + 1) <= (void *)(long)ctx->data_end)
		udp->check = tb_udp_check(tb_fold(sum));
}

static __always_inline void tb_ip_set_source(tb_ip_header *ip, __be32 address, const __be32 *prefix)
{
	__be32 *words = ip->saddr.in6_u.u6_addr32;

	words[0] = prefix[0];
	words[1] = prefix[1];
	words[2] = prefix[2];
	words[3] = address;
}

/* Readdresses a datagram whose checksum is right. */
static __always_inline void tb_ip_send_to(tb_ip_header *ip, struct udphdr *udp, __be32 address,
					  const __be32 *prefix)
{
	__be32 *words = ip->daddr.in6_u.u6_addr32;
	__u16 sum = ~udp->check;

	sum = tb_sum_moved(sum, words[0], prefix[0]);
	sum = tb_sum_moved(sum, words[1], prefix[1]);
	sum = tb_sum_moved(sum, words[2], prefix[2]);
	sum = tb_sum_moved(sum, words[3], address);
	udp->check = tb_udp_check(sum);
	words[0] = prefix[0];
	words[1] = prefix[1];
	words[2] = prefix[2];
	words[3] = address;
}

static __always_inline void tb_ip_place_of(struct tb_ip_place *place, const tb_ip_header *ip)
{
	__builtin_memcpy(place->words, &ip->daddr, sizeof(place->words));
}

/* Whether a place is at an address of the maps; and the word of it that they call the address. */
static __always_inline int tb_ip_at(const struct tb_ip_place *place, __be32 address,
				    const __be32 *prefix)
{
	return !((place->words[3] ^ address) | (place->words[0] ^ prefix[0]) |
		 (place->words[1] ^ prefix[1]) | (place->words[2] ^ prefix[2]));
}

static __always_inline __be32 tb_ip_last(const struct tb_ip_place *place)
{
	return place->words[3];
}

static __always_inline void tb_ip_put(tb_ip_header *ip, const struct tb_ip_place *place)
{
	__builtin_memcpy(&ip->daddr, place->words, sizeof(place->words));
}

/* Readdresses a header that was at place, to an address in words. */
static __always_inline void tb_ip_move(tb_ip_header *ip, const struct tb_ip_place *place,
				       const __be32 *words)
{
	(void)place;
	__builtin_memcpy(&ip->daddr, words, sizeof(place->words));
}

/* An address of the maps in words, as they are in a header. */
static __always_inline void tb_ip_words(__be32 *words, __be32 address, const __be32 *prefix)
{
	words[0] = prefix[0];
	words[1] = prefix[1];
	words[2] = prefix[2];
	words[3] = address;
}
#else
static __always_inline int tb_ip_plain(const struct ethhdr *eth, const tb_ip_header *ip)
{
	return eth->h_proto == tb_be16(ETH_P_IP) && *(const __u8 *)ip == 0x45 &&
	       ip->protocol == TB_IPPROTO_UDP && !(ip->frag_off & tb_be16(0x3fff));
}

static __always_inline int tb_registered(__be32 address, const __be32 *prefix)
{
	(void)prefix;
	return address != 0;
}

static __always_inline int tb_ip_to(const tb_ip_header *ip, __be32 address, const __be32 *prefix)
{
	(void)prefix;
	return ip->daddr == address;
}

static __always_inline int tb_ip_to_group(const tb_ip_header *ip, __be32 group)
{
	return ip->daddr == group;
}

static __always_inline int tb_ip_from(const tb_ip_header *ip, __be32 address, const __be32 *prefix)
{
	(void)prefix;
	return ip->saddr == address;
}

static __always_inline __u32 tb_ip_total(const tb_ip_header *ip)
{
	return tb_be16(ip->tot_len);
}

static __always_inline __u32 tb_ip_tos(const tb_ip_header *ip)
{
	return ip->tos;
}

/* CE becomes ECT(0) again. That lowers a word of the header by one, so its checksum, in one's complement, rises by one. */
static __always_inline void tb_unmark(tb_ip_header *ip)
{
	__u32 sum;

	if ((ip->tos & TB_ECN_MASK) != TB_ECN_CE)
		return;
	ip->tos &= ~TB_ECN_LAST;
	sum = tb_be16(ip->check) + 1;
	ip->check = tb_be16((__u16)(sum + (sum >> 16)));
}

/* Swapping addresses leaves the checksum as it was. */
static __always_inline void tb_ip_turn(tb_ip_header *ip)
{
	__be32 address = ip->saddr;

	ip->saddr = ip->daddr;
	ip->daddr = address;
}

/* None: over veth that of what is answered was never made, and IPv4 can do without. */
static __always_inline void tb_udp_checksum(const tb_ip_header *ip, struct udphdr *udp, __u32 bytes)
{
	(void)ip;
	(void)bytes;
	udp->check = 0;
}

static __always_inline void tb_udp_checksum_to(struct xdp_md *ctx, const tb_ip_header *ip,
					       struct udphdr *udp, __u32 bytes, __u32 most)
{
	(void)ctx;
	(void)most;
	tb_udp_checksum(ip, udp, bytes);
}

static __always_inline void tb_ip_set_source(tb_ip_header *ip, __be32 address, const __be32 *prefix)
{
	(void)prefix;
	ip->saddr = address;
}

/* Internet checksum (RFC 1071) of a header without options, whose checksum field is zero. */
static __always_inline __u16 tb_ip_checksum(const struct iphdr *ip)
{
	const __u32 *word = (const __u32 *)ip;

	return ~tb_fold((__u64)word[0] + word[1] + word[2] + word[3] + word[4]);
}

static __always_inline void tb_ip_send_to(tb_ip_header *ip, struct udphdr *udp, __be32 address,
					  const __be32 *prefix)
{
	(void)udp;
	(void)prefix;
	ip->daddr = address;
	ip->check = 0;
	ip->check = tb_ip_checksum(ip);
}

static __always_inline void tb_ip_place_of(struct tb_ip_place *place, const tb_ip_header *ip)
{
	place->words[0] = ip->daddr;
	place->check = ip->check;
}

static __always_inline int tb_ip_at(const struct tb_ip_place *place, __be32 address,
				    const __be32 *prefix)
{
	(void)prefix;
	return place->words[0] == address;
}

static __always_inline __be32 tb_ip_last(const struct tb_ip_place *place)
{
	return place->words[0];
}

static __always_inline void tb_ip_put(tb_ip_header *ip, const struct tb_ip_place *place)
{
	ip->daddr = place->words[0];
	ip->check = place->check;
}

static __always_inline void tb_ip_move(tb_ip_header *ip, const struct tb_ip_place *place,
				       const __be32 *words)
{
	ip->daddr = words[0];
	ip->check = ~tb_sum_moved(~place->check, place->words[0], words[0]);
}

static __always_inline void tb_ip_words(__be32 *words, __be32 address, const __be32 *prefix)
{
	(void)prefix;
	words[0] = address;
}
#endif
#endif /* TB_USER */

#endif /* TB_IP_H */
