/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the rules need of a packet, taken out of its header once, in host byte order. */
#ifndef TB_PACKET_H
#define TB_PACKET_H

#include "compat.h"

#include "wire.h"

struct tb_packet {
	__u32 type;
	__u32 flags;
	__u32 cookie;
	__u32 op;
	__u32 layout;
	__u32 sender;
	__u32 owner;
	__u32 seq;
	__u32 row;
	__u32 rows;
	__u32 codes;
	__u32 contributed;
	__u32 published;
};

static __always_inline void tb_packet_of(struct tb_packet *p, const struct tb_header *head,
					 __u32 codes)
{
	p->type = head->type;
	p->flags = tb_be16(head->flags);
	p->cookie = tb_be32(head->cookie);
	p->op = tb_be32(head->op);
	p->layout = tb_be16(head->layout);
	p->sender = head->sender;
	p->owner = head->owner;
	p->seq = tb_be32(head->seq);
	p->row = tb_be16(head->row);
	p->rows = tb_be16(head->rows);
	p->codes = codes;
	p->contributed = tb_be32(head->contributed);
	p->published = tb_be32(head->published);
}

#endif /* TB_PACKET_H */
