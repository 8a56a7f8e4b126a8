/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A job on a VLAN (kernel-1): tags of IEEE 802.1Q are taken off before anything is looked at, and put back on whatever
 * leaves the program alive. So no rule, and no offset, knows of tags.
 *
 * A NIC may have stripped the tag, and veth keeps it beside the frame: then there is none to take off. What is turned
 * round gets one all the same, since what XDP sends nobody tags.
 */
#ifndef TB_VLAN_H
#define TB_VLAN_H

#include "compat.h"

#define TB_VLAN_BYTES 4
#define TB_VLAN_ID 0x0fff

/* Both Ethernet addresses, which move when a tag comes or goes. */
struct tb_macs {
	__u16 words[6];
};

/* An Ethernet header with a tag in it. */
struct tb_vlan_frame {
	struct tb_macs macs;
	__be16 protocol;
	__be16 tag;
	__be16 inner;
};

/* Takes off the tag of VLAN id. The tag with its priority, in network byte order; 0 where there is none of that VLAN. */
static __always_inline __u32 tb_vlan_off(struct xdp_md *ctx, __u16 id)
{
	struct tb_vlan_frame *frame = (void *)(long)ctx->data;
	struct tb_macs macs;
	__be16 tag;

	if ((void *)(frame + 1) > (void *)(long)ctx->data_end ||
	    frame->protocol != tb_be16(ETH_P_8021Q))
		return 0;
	tag = frame->tag;
	if ((tb_be16(tag) & TB_VLAN_ID) != id)
		return 0;
	macs = frame->macs;
	if (bpf_xdp_adjust_head(ctx, TB_VLAN_BYTES))
		return 0;
	frame = (void *)(long)ctx->data;
	if ((void *)frame + ETH_HLEN > (void *)(long)ctx->data_end)
		return 0; /* it had this and a tag, but the verifier has forgotten */
	frame->macs = macs;
	return tag;
}

/* Puts a tag on; false where there is no room in front of the frame. */
static __always_inline int tb_vlan_on(struct xdp_md *ctx, __be16 tag)
{
	struct tb_macs macs;
	struct tb_vlan_frame *frame;

	if (bpf_xdp_adjust_head(ctx, -TB_VLAN_BYTES))
		return 0;
	frame = (void *)(long)ctx->data;
	if ((void *)(frame + 1) > (void *)(long)ctx->data_end)
		return 0;
	macs = *(struct tb_macs *)((void *)frame + TB_VLAN_BYTES);
	frame->macs = macs;
	frame->protocol = tb_be16(ETH_P_8021Q);
	frame->tag = tag;
	return 1;
}

#endif /* TB_VLAN_H */
