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

/*
 * What stands where a tag would be. The kernel copies it out of every frame, with a tag or without. So the verifier knows
 * nothing of its value, and looks at all that follows once. Had only some frames set a variable, the verifier would know
 * in which cases it is 0, and would follow those apart: Linux 5.19 then looked three times, at more than the million
 * instructions that it allows.
 */
struct tb_vlan_seen {
	__be16 protocol;
	__be16 tag;
};

static __always_inline void tb_vlan_look(struct xdp_md *ctx, struct tb_vlan_seen *seen)
{
	bpf_xdp_load_bytes(ctx, sizeof(struct tb_macs), seen, sizeof(*seen)); /* or leaves zeros */
}

/* Whether that is a tag of VLAN id. */
static __always_inline int tb_vlan_is(const struct tb_vlan_seen *seen, __u16 id)
{
	return seen->protocol == tb_be16(ETH_P_8021Q) && (tb_be16(seen->tag) & TB_VLAN_ID) == id;
}

/*
 * Takes the tag off; false where the linear part is too short for what is behind it. The addresses move first, so that
 * nothing of them is on the stack, where the verifier would remember which frames had a tag. There is room for the frame
 * to get shorter, by the bytes looked at.
 */
static __always_inline int tb_vlan_off(struct xdp_md *ctx)
{
	struct tb_vlan_frame *frame = (void *)(long)ctx->data;
	struct tb_macs macs;

	if ((void *)(frame + 1) > (void *)(long)ctx->data_end)
		return 0;
	macs = frame->macs;
	*(struct tb_macs *)((void *)frame + TB_VLAN_BYTES) = macs;
	return !bpf_xdp_adjust_head(ctx, TB_VLAN_BYTES);
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
