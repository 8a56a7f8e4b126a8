/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Faults as a function of a seed and the order of packets: every packet that faults could hit takes the same
 * six draws, whatever becomes of it, so that changing one probability leaves the other faults where they were.
 */
#ifndef TB_FAULTS_H
#define TB_FAULTS_H

#include "compat.h"

#include "abi.h"
#include "parse.h"

struct tb_fate {
	__u32 lost;
	__u32 duplicated;
	__u32 corrupted;
	__u32 where; /* a random number that says which bit */
	__u32 reordered;
};

/* xorshift64* (Vigna 2014), upper half. */
static __always_inline __u32 tb_draw(__u64 *state)
{
	__u64 x = *state;

	x ^= x >> 12;
	x ^= x << 25;
	x ^= x >> 27;
	*state = x;
	return (x * 0x2545f4914f6cdd1dULL) >> 32;
}

/* p in units of 2^-32; the largest means always. */
static __always_inline __u32 tb_hit(__u32 drawn, __u32 p)
{
	return drawn < p || p == 0xffffffff;
}

/* A burst of losses is over after so long a silence. */
#define TB_BURST_NS 100000000ULL

/*
 * Gilbert-Elliott: lose with the probability of the state the packet found, then perhaps change it.
 * Bernoulli loss is the good state for ever. Under the lock of the faults.
 *
 * The model steps with packets. A lone TCP connection that waits for its retransmission timer would step it once
 * in a timeout that doubles each time, and sit in a burst of five packets for minutes; no real link does that.
 */
static __always_inline void tb_fate_draw(struct tb_faults *f, __u64 now, struct tb_fate *fate)
{
	__u64 state = f->state;
	__u32 move = tb_draw(&state), lose = tb_draw(&state);
	__u32 duplicate = tb_draw(&state), corrupt = tb_draw(&state), reorder;
	/* Below 0 where another CPU read the clock later, and was here first. */
	__s64 silence = now - f->last;

	if (silence > (__s64)TB_BURST_NS)
		f->bad = 0;
	if (silence > 0)
		f->last = now;
	fate->where = tb_draw(&state);
	reorder = tb_draw(&state);
	f->state = state;
	fate->lost = tb_hit(lose, f->bad ? f->loss_bad : f->loss_good);
	fate->duplicated = !fate->lost && tb_hit(duplicate, f->duplicate);
	fate->corrupted = !fate->lost && tb_hit(corrupt, f->corrupt);
	fate->reordered = !fate->lost && tb_hit(reorder, f->reorder);
	if (tb_hit(move, f->bad ? f->to_good : f->to_bad))
		f->bad = !f->bad;
}

/* What becomes of a packet at a port. */
#define TB_PORT_TAKES 0
#define TB_PORT_MARKS 1
#define TB_PORT_FULL 2

/*
 * A port with a finite queue, first in, first out: what of the bytes that came it has not sent by now waits. Under the
 * lock of the faults. The packets themselves wait behind it, in the cable's tbf, whose buffer is larger: its timer comes
 * late on a busy machine, and this does not.
 */
static __always_inline __u32 tb_port_take(struct tb_faults *f, __u64 now, __u32 size)
{
	__u64 free = f->free, waiting;

	if (free < now)
		free = now;
	waiting = (free - now) * f->rate / 1000000000ULL + size;
	if (waiting > f->queue)
		return TB_PORT_FULL;
	f->free = free + size * 1000000000ULL / f->rate;
	return f->mark && waiting > f->mark ? TB_PORT_MARKS : TB_PORT_TAKES;
}

/* CE, where the sender's transport knows what that is; false where it does not. */
static __always_inline int tb_mark(struct iphdr *ip)
{
	__u8 before = ip->tos & TB_ECN_MASK;
	__u32 sum;

	if (!before)
		return 0;
	ip->tos |= TB_ECN_CE;
	sum = (__u16)~tb_be16(ip->check) + (TB_ECN_CE - before);
	ip->check = tb_be16((__u16) ~(sum + (sum >> 16)));
	return 1;
}

/* The same of IPv6, whose class lies across the first two bytes, and which has no checksum. */
static __always_inline int tb_mark_ipv6(struct ipv6hdr *ip)
{
	if (!(ip->flow_lbl[0] & TB_ECN_MASK << 4))
		return 0;
	ip->flow_lbl[0] |= TB_ECN_CE << 4;
	return 1;
}

#endif /* TB_FAULTS_H */
