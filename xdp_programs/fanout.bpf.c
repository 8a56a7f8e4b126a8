// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Fan-out on the worker (kernel-23), tc egress: a burst that leaves the registered socket for the lead peer is cloned
 * for every other live peer, in the host's order, and goes to the lead last. Nothing else is touched.
 *
 * Where a copy goes next on the Ethernet is what the host's own packets to that peer (contributions, probes) say: they
 * pass here too, and the kernel has addressed them, as routes and neighbours are at the time.
 *
 * Clones pass this hook again, and are left alone there, since none of them is addressed to the lead. They
 * share their payload; the kernel gives the original fresh headers after every clone.
 *
 * The answer is always "go on": programs and filters of others see originals and clones as if no one were here.
 */
#include "fanout.h"
#include "maps.h"

#define TB_TC_NEXT (-1) /* TCX_NEXT, TC_ACT_UNSPEC */

static __always_inline struct tb_fanout_counts *tb_fanout_row(__u32 rank)
{
	return TB_LOOKUP(fanout_counts,
			 bpf_get_smp_processor_id() * TB_MAX_RANKS + (rank & (TB_MAX_RANKS - 1)));
}

/* One clone to one peer, counted. */
static __always_inline void tb_fanout_copy(struct __sk_buff *skb, const struct tb_original *o,
					   __u32 rank, __u32 packets)
{
	struct tb_fanout_peer *peer = TB_LOOKUP(fanout_peers, rank);
	struct tb_fanout_counts *counts = tb_fanout_row(rank);

	if (!peer || !counts)
		return;
	if (tb_fanout_reachable(peer) && tb_fanout_readdress(skb, o, peer) &&
	    !bpf_clone_redirect(skb, skb->ifindex, 0)) {
		counts->clones++;
		counts->packets += packets;
	} else {
		counts->failed++;
		counts->packets_failed += packets;
	}
}

/* A packet that the host sends to one peer says how that one is reached. */
static __always_inline void tb_fanout_look(struct __sk_buff *skb, const struct tb_datagram *d)
{
	struct tb_fanout_peer *peer;
	__u8 owner;

	if (bpf_skb_load_bytes(skb, TB_HEAD_OFFSET + __builtin_offsetof(struct tb_header, owner),
			       &owner, 1))
		return;
	peer = TB_LOOKUP(fanout_peers, owner);
	if (peer && tb_ip_to(d->ip, peer->address, peer->prefix))
		tb_fanout_learn(peer, d);
}

TB_CLASSIFIER tb_fanout(struct __sk_buff *skb)
{
	struct tb_fanout *fanout = TB_LOOKUP(fanout, 0);
	struct tb_fanout_counts *counts;
	__u32 i, copies, lead, packets;
	struct tb_fanout_peer *peer;
	struct tb_original original;
	struct tb_datagram d;

	if (!fanout || !TB_READ_ONCE(fanout->active))
		return TB_TC_NEXT;
	lead = TB_READ_ONCE(fanout->lead);
	peer = TB_LOOKUP(fanout_peers, lead);
	if (!peer || !tb_datagram_of(skb, &d) || !tb_fanout_ours(&d, fanout, TB_PORT))
		return TB_TC_NEXT;
	if (!tb_fanout_wanted(&d, fanout, peer)) {
		tb_fanout_look(skb, &d);
		return TB_TC_NEXT;
	}
	counts = tb_fanout_row(lead);
	if (counts)
		counts->leads++;
	tb_fanout_keep(&original, &d);
	packets = skb->gso_segs ? skb->gso_segs : 1;
	copies = TB_READ_ONCE(fanout->copies);
#pragma clang loop unroll(disable)
	for (i = 0; i < TB_MAX_RANKS; i++) {
		if (i >= copies)
			break;
		tb_fanout_copy(skb, &original, TB_READ_ONCE(fanout->order[i]), packets);
	}
	if (tb_datagram_of(skb, &d))
		tb_fanout_restore(&d, &original);
	return TB_TC_NEXT;
}

#ifndef TB_BCC
char _license[] SEC("license") = "Dual BSD/GPL";
#endif
