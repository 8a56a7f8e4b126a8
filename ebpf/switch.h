/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The state machine of a switch's slot (kernel-24), and the headers of what it sends. The record is written here only,
 * under the slot's lock.
 *
 *   another job, or a newer row: store     an older row: stale     the same: add, or refuse, or answer
 *
 * A row is final once it is released, by its last contribution or by a flush, and never changes from then on: whoever
 * asks, however late, gets the one answer that all got.
 */
#ifndef TB_SWITCH_H
#define TB_SWITCH_H

#include "compat.h"

#include "abi.h"
#include "check.h"
#include "packet.h"
#include "parse.h"
#include "ranks.h"

/* What the rules need besides tb_packet. */
struct tb_share {
	__u32 scale; /* as it came, network byte order */
	__s32 exponent;
	__s32 need;
	__u32 wanted; /* contributors that the sender waits for */
};

/* What a result says, taken under the lock. */
struct tb_outcome {
	__u32 count;
	__u32 scale;
	__s32 exponent;
	__s32 need;
};

/* STORED, ADDED, ANSWERED or FLUSHED: what to do; or the reason not to. */
static __always_inline __u32 tb_switch_judge(const struct tb_switch_slot *slot,
					     const struct tb_packet *p, __s32 exponent)
{
	__s32 d = tb_distance(p->seq, slot->seq);

	if (slot->cookie != p->cookie || d > 0)
		return TB_VERDICT_STORED;
	if (d < 0)
		return TB_VERDICT_STALE_OP;
	if (slot->op != p->op || slot->layout != p->layout || slot->row != p->row ||
	    slot->rows != p->rows || slot->codes != p->codes)
		return TB_VERDICT_LAYOUT_MISMATCH;
	if (slot->final)
		return TB_VERDICT_ANSWERED;
	if (tb_rank_in(slot->ranks, p->sender))
		return p->flags & TB_FLAG_FLUSH ? TB_VERDICT_FLUSHED : TB_VERDICT_DUPLICATE;
	if (slot->exponent != exponent)
		return TB_VERDICT_SCALE_MISMATCH;
	return TB_VERDICT_ADDED;
}

/* Begins a row; true where that abandons one of the same job that was not final. */
static __always_inline int tb_switch_start(struct tb_switch_slot *slot, const struct tb_packet *p,
					   const struct tb_share *share)
{
	int abandoned = slot->cookie == p->cookie && !slot->final;

	slot->cookie = p->cookie;
	slot->seq = p->seq;
	slot->op = p->op;
	slot->layout = p->layout;
	slot->row = p->row;
	slot->rows = p->rows;
	slot->codes = p->codes;
	slot->count = 1;
	slot->final = 0;
	slot->ranks[0] = 0;
	slot->ranks[1] = 0;
	slot->ranks[2] = 0;
	slot->ranks[3] = 0;
	tb_rank_put(slot->ranks, p->sender);
	slot->need = share->need;
	slot->exponent = share->exponent;
	slot->scale = tb_be32(share->scale);
	return abandoned;
}

static __always_inline void tb_switch_join(struct tb_switch_slot *slot, const struct tb_packet *p,
					   __s32 need)
{
	tb_rank_put(slot->ranks, p->sender);
	slot->count++;
	if (need > slot->need)
		slot->need = need;
}

static __always_inline void tb_switch_outcome(struct tb_outcome *o,
					      const struct tb_switch_slot *slot)
{
	o->count = slot->count;
	o->scale = tb_be32(slot->scale);
	o->exponent = slot->exponent;
	o->need = slot->need;
}

/* The contribution's header becomes the result's; the check is made when the codes stand. */
static __always_inline void tb_switch_head(struct tb_header *head, const struct tb_outcome *o,
					   __u32 ranks, __u32 headroom)
{
	__be32 before = tb_be32(tb_be32(head->op) - 1);
	__s32 next = o->need == TB_EXPONENT_NONE ? o->exponent : o->need + (__s32)headroom;

	head->type = TB_TYPE_RESULT;
	head->flags = tb_be16(TB_FLAG_SWITCHED);
	head->sender = ranks;
	head->owner = ranks;
	head->contributed = before;
	head->published = before;
	head->exponent = tb_be16((__u16)next);
	head->need = tb_be16((__u16)o->need);
	head->scale = o->scale;
	head->count = tb_be16((__u16)o->count);
	head->weight = 0;
	head->pad = 0;
	head->deadline = 0;
	head->lateness = 0;
}

static __always_inline void tb_mac_copy(__u8 *to, const __u8 *from)
{
	__u16 *half = (__u16 *)to;
	int i;

#pragma unroll
	for (i = 0; i < 3; i++)
		half[i] = ((const __u16 *)from)[i];
}

/*
 * From the switch; whereto is written later, once for each copy. IPv4 can do without a checksum of UDP, which XDP does not
 * see; IPv6 gets one over the whole row, and with it the frame is to be looked at anew (ip.h).
 */
static __always_inline void tb_switch_from(struct xdp_md *ctx, const struct tb_frame *f,
					   const struct tb_switch_job *job)
{
	tb_mac_copy(f->eth->h_source, job->mac);
	tb_unmark(f->ip); /* the contribution's mark is not the result's */
	tb_ip_set_source(f->ip, job->address, job->prefix);
	f->udp->source = job->port;
	f->udp->dest = job->port;
	tb_udp_checksum_to(ctx, f->ip, f->udp, sizeof(struct udphdr) + TB_HEADER_BYTES, TB_WIDTH);
}

static __always_inline void tb_switch_to(struct ethhdr *eth, tb_ip_header *ip, struct udphdr *udp,
					 const struct tb_switch_rank *rank)
{
	tb_mac_copy(eth->h_dest, rank->mac);
	tb_ip_send_to(ip, udp, rank->address, rank->prefix);
}

#endif /* TB_SWITCH_H */
