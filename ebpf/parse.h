/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From a frame to a Tailbound packet, with every bound checked. What is not ours (other protocols, VLAN,
 * IP options, fragments, other ports and addresses, and of IP the other family) is told apart before anything of it is
 * judged.
 *
 * The frame must end where the IP packet ends: then data_end is the end of the codes, and the loops over
 * them need no second bound. (Ethernet pads frames only below 60 bytes; ours have at least 106.)
 */
#ifndef TB_PARSE_H
#define TB_PARSE_H

#include "compat.h"

#include "abi.h"
#include "ip.h"
#include "wire.h"

/* Answers besides the verdicts of abi.h. */
#define TB_FOREIGN 0x100 /* not ours: pass it, count nothing */
#define TB_GO_ON 0x101 /* no verdict yet */

/* kernel-2 to kernel-4, of a header that is there and has so many bytes behind it. */
static __always_inline __u32 tb_form(const struct tb_header *head, __u32 length, __u32 width)
{
	if (length % TB_ROW_STEP || length > width)
		return TB_VERDICT_BAD_LENGTH;
	if (!length && (head->type == TB_TYPE_CONTRIBUTION || head->type == TB_TYPE_RESULT))
		return TB_VERDICT_BAD_LENGTH;
	if (head->version != TB_VERSION)
		return TB_VERDICT_BAD_VERSION;
	if (head->type < TB_TYPE_CONTRIBUTION || head->type > TB_TYPE_LAST)
		return TB_VERDICT_BAD_TYPE;
	return TB_GO_ON;
}

#ifdef TB_USER
/* Of a datagram, which is for us. */
static __always_inline __u32 tb_parse(struct xdp_md *ctx, __u16 port, __be32 address,
				      const __be32 *prefix, __be32 group, __u32 width, __u32 *codes)
{
	__u64 length = (char *)ctx->data_end - (char *)ctx->data;

	(void)port;
	(void)address;
	(void)prefix;
	(void)group;
	if (length < TB_HEADER_BYTES || length - TB_HEADER_BYTES > width)
		return TB_VERDICT_BAD_LENGTH;
	*codes = length - TB_HEADER_BYTES;
	return tb_form(ctx->data, *codes, width);
}
#else
/* Offsets in a frame of ours: Ethernet, IP without options, UDP, header, codes. */
#define TB_IP_OFFSET 14
#define TB_UDP_OFFSET (TB_IP_OFFSET + TB_IP_BYTES)
#define TB_HEAD_OFFSET (TB_UDP_OFFSET + 8)
#define TB_CODES_OFFSET (TB_HEAD_OFFSET + TB_HEADER_BYTES)

struct tb_frame {
	struct ethhdr *eth;
	tb_ip_header *ip;
	struct udphdr *udp;
	struct tb_header *head;
	__u8 *codes;
	void *end;
};

/* The frame's pointers; false where the linear part is shorter than all headers. */
static __always_inline int tb_frame_of(struct xdp_md *ctx, struct tb_frame *f)
{
	void *data = (void *)(long)ctx->data;

	f->end = (void *)(long)ctx->data_end;
	f->eth = data;
	f->ip = data + TB_IP_OFFSET;
	f->udp = data + TB_UDP_OFFSET;
	f->head = data + TB_HEAD_OFFSET;
	f->codes = data + TB_CODES_OFFSET;
	return data + TB_CODES_OFFSET <= f->end;
}

/*
 * Whether a frame is for us: UDP over our family of IP, to our port and our address or group (of IPv4). Other addresses
 * are those of somebody behind this interface (a bridge, a guest), or what a switch has flooded.
 */
static __always_inline int tb_names_us(const struct ethhdr *eth, const tb_ip_header *ip,
				       const struct udphdr *udp, __u16 port, __be32 address,
				       const __be32 *prefix, __be32 group)
{
	return tb_ip_plain(eth, ip) && udp->dest == tb_be16(port) &&
	       (tb_ip_to(ip, address, prefix) || (group && tb_ip_to_group(ip, group)));
}

/*
 * Some drivers hand over large frames in pieces, of which the first, the linear part, may be shorter than the headers or
 * empty (mlx5 with a striding queue). They are brought together here, only to see whose such a frame is.
 */
struct tb_pieces {
	/* two bytes of room, then Ethernet, IP and UDP, so that addresses are aligned */
	__u64 words[(2 + TB_HEAD_OFFSET + 7) / 8];
};

/* Ethernet, with IP and UDP behind it; NULL where the frame has fewer bytes. */
static __always_inline void *tb_headers_of(struct xdp_md *ctx, struct tb_pieces *p)
{
	void *start = (void *)p->words + 2;

	return bpf_xdp_load_bytes(ctx, 0, start, TB_HEAD_OFFSET) ? 0 : start;
}

/*
 * kernel-1 to kernel-4: TB_GO_ON for a well-formed packet of ours, with its number of codes; TB_FOREIGN; or the
 * reason to drop.
 *
 * address with prefix, and group (0: none), are those that packets for this host may have. A frame whose linear part
 * ends elsewhere than its IP packet is either not linear or not honest.
 */
static __always_inline __u32 tb_parse(struct xdp_md *ctx, __u16 port, __be32 address,
				      const __be32 *prefix, __be32 group, __u32 width, __u32 *codes)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	tb_ip_header *ip = data + TB_IP_OFFSET;
	struct udphdr *udp = data + TB_UDP_OFFSET;
	struct tb_header *head = data + TB_HEAD_OFFSET;
	__u32 total, length;

	if (data + TB_HEAD_OFFSET > end) {
		struct tb_pieces p;
		void *start = tb_headers_of(ctx, &p);

		if (start && tb_names_us(start, start + TB_IP_OFFSET, start + TB_UDP_OFFSET, port,
					 address, prefix, group))
			return TB_VERDICT_NOT_LINEAR;
		return TB_FOREIGN;
	}
	if (!tb_names_us(eth, ip, udp, port, address, prefix, group))
		return TB_FOREIGN;

	total = tb_ip_total(ip);
	if (end - data != total + TB_IP_OFFSET) {
		if (bpf_xdp_get_buff_len(ctx) > (__u64)(end - data))
			return TB_VERDICT_NOT_LINEAR;
		return TB_VERDICT_BAD_LENGTH;
	}
	length = tb_be16(udp->len);
	if (length + TB_UDP_OFFSET - TB_IP_OFFSET != total || data + TB_CODES_OFFSET > end)
		return TB_VERDICT_BAD_LENGTH;
	*codes = length - (TB_CODES_OFFSET - TB_UDP_OFFSET);
	return tb_form(head, *codes, width);
}
#endif /* TB_USER */

#endif /* TB_PARSE_H */
