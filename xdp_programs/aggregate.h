/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * One packet through the switch (kernel-24), from frame to verdict. The order of the rules is that of
 * tests/switch_cases.py, which the P4 switch passes too.
 *
 * Locks: a slot's, and nothing is looked up or called while it is held. Packet pointers are taken anew from the context
 * after each loop over the codes (see ingest.h).
 *
 * Which job a result is of travels to the device map's program in the first byte of the Ethernet destination, which
 * that program writes anyway. Answers go by the device map too: XDP_TX does not wake the other end of a veth unless that
 * has an XDP program.
 */
#ifndef TB_AGGREGATE_H
#define TB_AGGREGATE_H

#include "check.h"
#include "lanes.h"
#include "ledger.h"
#include "maps.h"
#include "mean.h"
#include "packet.h"
#include "parse.h"
#include "reflect.h"
#include "switch.h"

/* Besides the verdicts: how the packet leaves. */
#define TB_LEAVE_NOT 0
#define TB_LEAVE_ALL 1
#define TB_LEAVE_BACK 2

struct tb_found {
	__u32 known; /* a job has this address and port */
	__u32 named; /* one of them has this cookie too */
	__u32 job; /* that one, or else the first */
	struct tb_ip_place to; /* destination */
	__u32 port; /* network byte order */
};

static __always_inline struct tb_switch_port *tb_port_of(__u32 ifindex)
{
	return TB_LOOKUP(switch_ports,
			 bpf_get_smp_processor_id() * TB_PORTS + (ifindex & (TB_PORTS - 1)));
}

/*
 * Whose packet it is. What is no IP or UDP at all is told apart later: its bytes are no address of ours but by chance.
 * A frame in pieces has its headers brought together for that.
 */
static __always_inline void tb_find(struct xdp_md *ctx, struct tb_found *found)
{
	const struct tb_switch_directory *jobs = TB_LOOKUP(switch_directory, 0);
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	__u32 cookie = 0, port;
	struct tb_pieces pieces;
	int i;

	if (!jobs)
		return;
	if (data + TB_HEAD_OFFSET <= end) {
		tb_ip_place_of(&found->to, data + TB_IP_OFFSET);
		port = ((struct udphdr *)(data + TB_UDP_OFFSET))->dest;
		if (data + TB_CODES_OFFSET <= end)
			cookie = tb_be32(((struct tb_header *)(data + TB_HEAD_OFFSET))->cookie);
	} else {
		void *start = tb_headers_of(ctx, &pieces);

		if (!start)
			return;
		tb_ip_place_of(&found->to, start + TB_IP_OFFSET);
		port = ((struct udphdr *)(start + TB_UDP_OFFSET))->dest;
	}
	found->port = port;
#pragma unroll
	for (i = 0; i < TB_SWITCH_JOBS; i++) {
		if (!jobs->cookie[i] || jobs->port[i] != port ||
		    !tb_ip_at(&found->to, jobs->address[i], &jobs->prefix[3 * i]))
			continue;
		if (!found->known)
			found->job = i;
		found->known = 1;
		if (jobs->cookie[i] == cookie) {
			found->named = 1;
			found->job = i;
		}
	}
}

static __always_inline struct tb_switch_rank *tb_rank_of(__u32 job, __u32 rank)
{
	return TB_LOOKUP(switch_ranks, job * TB_MAX_RANKS + (rank & (TB_MAX_RANKS - 1)));
}

/* From the lock to the verdict; *leave says whether a mean now stands over the codes, and o what it is a mean of. */
static __always_inline __u32 tb_sum(struct xdp_md *ctx, const struct tb_switch_job *job,
				    const struct tb_packet *p, struct tb_outcome *o, __u32 *leave,
				    int *abandoned)
{
	__u32 slot = job->base + (p->seq & job->mask), ranks = job->ranks, verdict;
	struct tb_switch_slot *record = TB_LOOKUP(switch_slots, slot);
	struct tb_lock *lock = TB_LOOKUP(switch_locks, slot);
	__u64 *sums = TB_LOOKUP(switch_sums, slot);
	struct tb_share share;
	struct tb_frame f;
	int release = 0;

	if (!record || !lock || !sums || !tb_frame_of(ctx, &f))
		return TB_VERDICT_SLOT_OUT_OF_RANGE;
	share.scale = f.head->scale;
	share.exponent = (__s16)tb_be16(f.head->exponent);
	share.need = (__s16)tb_be16(f.head->need);
	share.wanted = tb_be16(f.head->count);
	if (!share.wanted || share.wanted > ranks)
		share.wanted = ranks;

	bpf_spin_lock(&lock->lock);
	verdict = tb_switch_judge(record, p, share.exponent);
	if (verdict == TB_VERDICT_ADDED) {
		tb_switch_join(record, p, share.need);
		tb_lanes_add(sums, f.codes, f.end, 1, 0, 0);
		release = record->count >= share.wanted || p->flags & TB_FLAG_FLUSH;
	} else if (verdict == TB_VERDICT_STORED) {
		*abandoned = tb_switch_start(record, p, &share);
		tb_lanes_store(sums, f.codes, f.end, 1);
		release = share.wanted <= 1 || p->flags & TB_FLAG_FLUSH;
	} else if (verdict == TB_VERDICT_FLUSHED) {
		release = 1;
	} else if (verdict == TB_VERDICT_ANSWERED) {
		tb_switch_outcome(o, record);
		tb_mean_again(sums, f.codes, f.end);
		*leave = TB_LEAVE_BACK;
	}
	if (release && tb_frame_of(ctx, &f)) {
		record->final = 1;
		tb_switch_outcome(o, record);
		tb_mean(sums, f.codes, f.end, record->count);
		*leave = TB_LEAVE_ALL;
	}
	bpf_spin_unlock(&lock->lock);

	return verdict;
}

/* Everything up to the slot. *sender stays UNKNOWN until the check has passed. */
static __always_inline __u32 tb_relay_judge(struct xdp_md *ctx, const struct tb_found *found,
					    __u32 codes, __u32 *sender, __u32 *leave,
					    int *abandoned)
{
	struct tb_switch_job *job = TB_LOOKUP(switch_jobs, found->job);
	struct tb_switch_rank *rank;
	struct tb_outcome outcome = {};
	struct tb_packet p;
	struct tb_frame f;
	__u32 verdict;
	__u64 check;

	if (!found->named || !job)
		return TB_VERDICT_WRONG_COOKIE;
	if (!tb_frame_of(ctx, &f))
		return TB_VERDICT_BAD_LENGTH;
	rank = tb_rank_of(found->job, f.head->sender);
	if (!rank || f.head->sender >= job->ranks || !tb_registered(rank->address, rank->prefix))
		return TB_VERDICT_UNKNOWN_RANK;
	if (!tb_ip_from(f.ip, rank->address, rank->prefix) || rank->ifindex != ctx->ingress_ifindex)
		return TB_VERDICT_WRONG_ADDRESS;
	check = tb_be64(f.head->check); /* before the loop: see lanes.h */
	if (tb_check(f.head, f.codes, f.end) != check)
		return TB_VERDICT_CORRUPT;
	if (!tb_frame_of(ctx, &f))
		return TB_VERDICT_BAD_LENGTH;
	tb_packet_of(&p, f.head, codes);
	*sender = p.sender;
	if (p.owner != job->ranks)
		return TB_VERDICT_NOT_FOR_THIS_RANK;
	if (p.type == TB_TYPE_PROBE) {
#ifdef TB_IPV6
		/* What the checksum of the echo is made over. */
		if (p.codes != TB_ROW_STEP || (void *)f.codes + TB_ROW_STEP > f.end)
			return TB_VERDICT_BAD_LENGTH;
#endif
		tb_reflect(&f, job->ranks, 0, check, 0);
		f.eth->h_dest[0] = found->job;
		*leave = TB_LEAVE_BACK;
		return TB_VERDICT_REFLECTED;
	}
	if (p.type != TB_TYPE_CONTRIBUTION)
		return TB_VERDICT_BAD_TYPE;
	if (p.row >= p.rows)
		return TB_VERDICT_SLOT_OUT_OF_RANGE;
	if (f.head->weight != 1)
		return TB_VERDICT_BAD_WEIGHT;

	verdict = tb_sum(ctx, job, &p, &outcome, leave, abandoned);
	if (*leave == TB_LEAVE_NOT)
		return verdict;
	if (!tb_frame_of(ctx, &f)) {
		*leave = TB_LEAVE_NOT;
		return verdict;
	}
	tb_switch_head(f.head, &outcome, job->ranks, job->headroom);
	f.head->check = tb_be64(tb_check(f.head, f.codes, f.end));
	if (!tb_frame_of(ctx, &f)) {
		*leave = TB_LEAVE_NOT;
		return verdict;
	}
	f.eth->h_dest[0] = found->job;
	tb_switch_from(ctx, &f, job);
	return verdict;
}

/* The one way out: every packet for the switch is counted once; results leave by it too. */
static __always_inline int tb_relay(struct xdp_md *ctx)
{
	__u32 sender = TB_UNKNOWN_SENDER, codes = 0, leave = TB_LEAVE_NOT, verdict = TB_FOREIGN;
	struct tb_switch_port *port = tb_port_of(ctx->ingress_ifindex);
	struct tb_found found = {};
	struct tb_ledger *row;
	int abandoned = 0;
	void *devices;

	tb_find(ctx, &found);
	if (found.known)
		verdict = tb_parse(ctx, tb_be16((__u16)found.port), tb_ip_last(&found.to),
				   found.to.words, 0, TB_WIDTH, &codes);
	if (!port)
		return XDP_PASS;
	if (verdict == TB_FOREIGN) {
		port->foreign++;
		return XDP_PASS;
	}
	port->ours++;
	if (verdict == TB_GO_ON)
		verdict = tb_relay_judge(ctx, &found, codes, &sender, &leave, &abandoned);
	row = TB_LOOKUP(switch_ledger,
			tb_ledger_row(bpf_get_smp_processor_id() * TB_SWITCH_JOBS + found.job,
				      sender));
	if (row) {
		tb_ledger_count(row, verdict);
		if (abandoned)
			tb_ledger_count(row, TB_VERDICT_ABANDONED);
	}
	if (leave == TB_LEAVE_NOT)
		return XDP_DROP;
	devices = TB_LOOKUP(switch_devices, found.job);
	if (!devices)
		return XDP_DROP;
	if (leave == TB_LEAVE_ALL)
		return bpf_redirect_map(devices, 0, BPF_F_BROADCAST);
	port->answers++;
	return bpf_redirect_map(devices, sender, 0);
}

#endif /* TB_AGGREGATE_H */
