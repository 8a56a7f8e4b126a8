/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */
#ifndef TB_ABI_H
#define TB_ABI_H

#define TB_UNKNOWN_SENDER 256
#define TB_OP_STEPS 4
#define TB_OP_PER_STEP 256
#define TB_OP_RING 1024
#define TB_CONTEXTS 1
#define TB_ACTIVE_WITH_SOCKET 2
#define TB_SWITCH_JOBS 8
#define TB_VERDICTS 64
#define TB_FIRST_DROP 8

#define TB_VERDICT_STORED 0
#define TB_VERDICT_ADDED 1
#define TB_VERDICT_RESULT_TAKEN 2
#define TB_VERDICT_CONTROL_PASSED 3
#define TB_VERDICT_REFLECTED 4
#define TB_VERDICT_ECHO_TAKEN 5
#define TB_VERDICT_ANSWERED 6
#define TB_VERDICT_FLUSHED 7
#define TB_VERDICT_BAD_LENGTH 8
#define TB_VERDICT_NOT_LINEAR 9
#define TB_VERDICT_BAD_VERSION 10
#define TB_VERDICT_BAD_TYPE 11
#define TB_VERDICT_WRONG_COOKIE 12
#define TB_VERDICT_UNKNOWN_RANK 13
#define TB_VERDICT_WRONG_ADDRESS 14
#define TB_VERDICT_NOT_FOR_THIS_RANK 15
#define TB_VERDICT_CORRUPT 16
#define TB_VERDICT_SLOT_OUT_OF_RANGE 17
#define TB_VERDICT_STALE_OP 18
#define TB_VERDICT_FUTURE_OP 19
#define TB_VERDICT_DUPLICATE 20
#define TB_VERDICT_LATE 21
#define TB_VERDICT_SCALE_MISMATCH 22
#define TB_VERDICT_BAD_WEIGHT 23
#define TB_VERDICT_LAYOUT_MISMATCH 24
#define TB_VERDICT_WRONG_MAP 25
#define TB_VERDICT_ABANDONED 26
#define TB_VERDICT_DUPLICATE_RESULT 27
#define TB_VERDICT_STALE_RESULT 28
#define TB_VERDICT_FUTURE_RESULT 29
#define TB_VERDICT_INACTIVE 30
#define TB_VERDICT_FRAGMENT 31
#define TB_VERDICT_DUPLICATE_REPAIR 32
#define TB_VERDICT_DUPLICATE_REPAIR_RESULT 33
#define TB_VERDICT_FORGED 34

#define TB_EVENT_OPENED 1
#define TB_EVENT_MAJORITY 2
#define TB_EVENT_TAIL 3
#define TB_EVENT_COMPLETE 4
#define TB_EVENT_RESULTS_TAIL 5
#define TB_EVENT_RESULTS_COMPLETE 6

/* Every map of a worker by name. */
#define TB_WORKER_MAPS(MAP) MAP(control) MAP(peers) MAP(expect_results) MAP(slots) MAP(sums) MAP(results) MAP(result_records) MAP(presence) MAP(ops) MAP(arrivals) MAP(peer_states) MAP(ledger) MAP(keys) MAP(slot_locks) MAP(result_locks) MAP(op_locks) MAP(peer_locks)

/* Record of one summed row; written by the program only, under the slot's lock. */
struct tb_slot {
	__u32 cookie; /* tag, with op */
	__u32 op; /* tag, with cookie */
	__u64 ranks[4]; /* bitmap of the ranks summed */
	__u32 count; /* ranks summed */
	__u32 units; /* what a lane holds in whose column every rank summed sent code 128 */
	__u32 pad; /* 0 */
	__s32 exponent; /* e of a lane's unit */
	__u32 row; /* place in the first sender's order */
	__u32 counted; /* 1 once the sum has had a contribution of every live peer: it is in rows_complete */
};
_Static_assert(sizeof(struct tb_slot) == 64, "tb_slot");

/* Lock of one sum slot, and the newest op the host has sealed there. Not mmapped: it holds a lock. */
struct tb_slot_lock {
	struct bpf_spin_lock lock; /* struct bpf_spin_lock */
	__u32 sealed_op; /* contributions up to this op are late */
};
_Static_assert(sizeof(struct tb_slot_lock) == 8, "tb_slot_lock");

/* A lock and nothing else (result rows, op records, peers). */
struct tb_lock {
	struct bpf_spin_lock lock; /* struct bpf_spin_lock */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_lock) == 8, "tb_lock");

/* Record of one result row; written by the program only, under the row's lock. */
struct tb_result {
	__u32 cookie; /* tag, with op */
	__u32 op; /* tag, with cookie */
	__u32 scale; /* largest absolute value of the row, negative with offsets */
	__u32 count; /* contributors in the mean */
	__s32 exponent; /* e for the key's next op */
	__u32 owner; /* rank that made it */
	__u32 row; /* place in the owner's list */
	__u32 flags; /* flags of its header */
};
_Static_assert(sizeof(struct tb_result) == 32, "tb_result");

/* Which result is whole in a ring position; written after the row, as one word, under the row's lock. */
struct tb_presence {
	__u32 op; /* op label */
	__u32 cookie; /* job */
};
_Static_assert(sizeof(struct tb_presence) == 8, "tb_presence");

/* What the kernel has seen of one op; written by the program, under a lock but for counts, its tag last. */
struct tb_op {
	__u32 cookie; /* tag, with op */
	__u32 op; /* tag, with cookie */
	__u64 opened_ns; /* CLOCK_MONOTONIC of the first packet */
	__u64 heard[4]; /* bitmap of ranks heard in this op, by any packet type that names it */
	__u64 tail_contributed[4]; /* ranks the tail of whose contributions has been seen */
	__u64 tail_published[4]; /* ranks the tail of whose results has been seen */
	__u64 abstained[4]; /* ranks that said ABSTAIN for this op */
	__u64 begun[4]; /* ranks of whom a contribution row has been seen */
	__u64 majority_ns[2]; /* time at which need - 1 [0] and need [1] live peers had been heard */
	__u32 heard_live; /* live peers heard */
	__u32 rows; /* rows of this owner, from the first contribution; 0 before */
	__u32 results_tag; /* of what results_in counts, in one word with it: cookie ^ op */
	__u32 results_in; /* result rows present */
	__s32 rows_complete; /* own rows that have had a contribution of every live peer, each counted once */
	__u32 progress; /* packets taken for own rows; a hint that may lose an increment */
	__u32 layout; /* layout tag of the first packet */
	__u32 codes; /* V of the first row */
	__u32 first_sender; /* rank that opened the op */
	__u32 late; /* contribution rows refused as late or behind the window; a hint as progress is */
	__u32 late_results; /* result rows behind the window; a hint as progress is */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_op) == 240, "tb_op");

/* Arrival times of one rank in one op, in us after opened_ns, plus one (0: not yet). */
struct tb_arrival {
	__u32 first_us; /* first packet */
	__u32 contributed_us; /* tail of contributions */
	__u32 published_us; /* tail of results */
	__u32 row_us; /* first row of contributions, or the word that it would be late */
};
_Static_assert(sizeof(struct tb_arrival) == 16, "tb_arrival");

/* A registered rank; written by the host. */
struct tb_peer {
	__u32 address; /* IPv4 address, or the last 32 bits of an IPv6 one; network byte order */
	__u32 live; /* 1: counted for completion, tail and majority */
	__u32 prefix[3]; /* the first 96 bits of an IPv6 address; 0, and address too: not registered */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_peer) == 24, "tb_peer");

/* Latest marks of one rank; written by the program under the peer's lock when they rise; the host redates old ones. */
struct tb_peer_state {
	__u32 cookie; /* tag */
	__u32 contributed; /* highest contributed mark seen */
	__u32 published; /* highest published mark seen */
	__u32 newest; /* newest op seen, future ones included */
	__u64 last_ns; /* time of the last change here */
	__u64 rtt_ns; /* last round trip measured by probe */
	__u64 echoed; /* time at which the newest own probe was sent that has come back, ns */
	__u32 deadline; /* advertised D1, units of 64 us */
	__u32 lateness; /* advertised lateness, units of 64 us */
	__u32 map_known; /* highest map id the rank knows */
	__u32 pad; /* 0 */
	__u32 marked; /* packets of the rank that came with CE (congestion experienced), its echoes apart */
	__u32 told; /* own packets that came to the rank with CE, as its last echo said */
};
_Static_assert(sizeof(struct tb_peer_state) == 64, "tb_peer_state");

/* One context; written by the host, mmapped, `active` last. The program clears that and `tagged`. */
struct tb_control {
	__u32 active; /* 0: drop all of ours as INACTIVE; ACTIVE_WITH_SOCKET: 0 once the job has no socket */
	__u32 cookie; /* job */
	__u32 rank; /* own rank */
	__u32 ranks; /* world size */
	__u32 address; /* own address, as in tb_peer; kept between jobs; what is for others passes */
	__u32 group; /* the job's multicast group, network byte order, or 0 */
	__u32 map_id; /* owner map in force */
	__u32 map_since; /* first op of map_id; older ops are taken under map_before */
	__u32 map_before; /* owner map before that */
	__u32 sum_base; /* window base of the sums ring, a row sequence */
	__u32 result_base; /* window base of the result ring, a row sequence */
	__u32 live_peers; /* live ranks other than this one */
	__u32 need; /* majority: floor(V / 2) + 1 with V ranks that have a vote */
	__u32 weight_cap; /* largest weight taken */
	__u32 spare; /* F, 0..7: doublings of weight_cap that lanes have room for */
	__u32 first_op; /* ops before this one are stale */
	__u32 released; /* newest op over here: late rows may open its record; records reach OP_STEPS further */
	__u32 sum_rows; /* sums ring in use, a power of two: pinned maps may have been made for fewer ranks */
	__u32 tagged; /* 1: packets carry tags, and both keys are in force; 0: they carry checks */
	__u32 prefix[3]; /* what is before address in an own IPv6 address; 0 for IPv4 */
	__u64 live[4]; /* bitmap of live ranks other than this one */
};
_Static_assert(sizeof(struct tb_control) == 120, "tb_control");

/* How many result rows of an op are to come from peers; written by the host. */
struct tb_expect_results {
	__u32 op; /* op label */
	__u32 rows; /* rows; 0: not known yet */
};
_Static_assert(sizeof(struct tb_expect_results) == 8, "tb_expect_results");

/* Counters of one (cpu, sender): what became of its packets. */
struct tb_ledger {
	__u64 verdict[64]; /* by Verdict */
};
_Static_assert(sizeof(struct tb_ledger) == 512, "tb_ledger");

/* A record of the event ring. */
struct tb_event {
	__u32 kind; /* Event */
	__u32 op; /* op label */
	__u64 ns; /* CLOCK_MONOTONIC */
};
_Static_assert(sizeof(struct tb_event) == 16, "tb_event");

/* Fault injection on one interface of the lab; written by the lab. Probabilities in units of 2^-32. */
struct tb_faults {
	__u64 state; /* xorshift64* state per map; seeded, never 0 */
	__u32 loss_good; /* loss in the good state (Bernoulli: the loss) */
	__u32 loss_bad; /* loss in the bad state */
	__u32 to_bad; /* per packet, good to bad (Gilbert-Elliott) */
	__u32 to_good; /* per packet, bad to good */
	__u32 duplicate; /* send twice */
	__u32 corrupt; /* flip one bit after the UDP header */
	__u32 port; /* only UDP to or from this port; 0: every IPv4 packet */
	__u32 bad; /* 1 while in the bad state */
	__u32 reorder; /* let others pass it, or pass others (UDP only) */
	__u32 pad; /* 0 */
	__u64 last; /* CLOCK_MONOTONIC of the newest packet that faults could hit */
	__u64 rate; /* bytes per second of the port that packets wait before; 0: none is modelled */
	__u64 free; /* CLOCK_MONOTONIC at which it has sent all that came */
	__u32 queue; /* bytes that wait before it at most */
	__u32 mark; /* bytes above which what may be marked is (CE); 0: nothing is */
};
_Static_assert(sizeof(struct tb_faults) == 80, "tb_faults");

/* What the fault program did, per cpu. */
struct tb_fault_counts {
	__u64 seen; /* packets that faults could hit */
	__u64 lost; /* dropped */
	__u64 duplicated; /* sent twice */
	__u64 corrupted; /* one bit flipped */
	__u64 passed; /* packets outside the filter */
	__u64 reordered; /* sent past the queue */
	__u64 lost_other; /* of the lost, those that are not UDP */
	__u64 overflowed; /* dropped because the port's queue was full */
	__u64 marked; /* marked (CE) */
};
_Static_assert(sizeof(struct tb_fault_counts) == 72, "tb_fault_counts");

/* Which bursts leave for all live peers; written by the host, mmapped. `active` is written last. */
struct tb_fanout {
	__u32 active; /* 0: nothing is cloned */
	__u32 address; /* source of the bursts: own address, as in tb_peer */
	__u16 port; /* source of the bursts: their UDP port, host byte order */
	__u16 lead; /* the rank that bursts are addressed to; what goes to others is left alone */
	__u32 copies; /* entries of order */
	__u32 prefix[3]; /* what is before address in an own IPv6 address */
	__u32 pad; /* 0 */
	__u8 order[256]; /* live ranks other than the lead, in the order in which copies leave */
};
_Static_assert(sizeof(struct tb_fanout) == 288, "tb_fanout");

/* Where copies for one rank go; the host writes addresses, the program the way there. */
struct tb_fanout_peer {
	__u32 address; /* as in tb_peer; 0, and prefix too: nobody */
	__u8 mac[6]; /* Ethernet address of the next hop, as the host's own packets to this rank have it */
	__u16 pad; /* 0 */
	__u32 prefix[3]; /* as in tb_peer */
};
_Static_assert(sizeof(struct tb_fanout_peer) == 24, "tb_fanout_peer");

/* What left for one rank, per cpu. */
struct tb_fanout_counts {
	__u64 leads; /* bursts that were addressed to it and went on to the others */
	__u64 clones; /* copies that the device took */
	__u64 failed; /* copies that it did not take, or that could not be made */
	__u64 packets; /* packets in the clones */
	__u64 packets_failed; /* packets in the failed ones */
};
_Static_assert(sizeof(struct tb_fanout_counts) == 40, "tb_fanout_counts");

/* The jobs of a switch as packets name them; written by the host, cookies last. */
struct tb_switch_directory {
	__u32 cookie[8]; /* job; 0: none */
	__u32 address[8]; /* of the switch in it, as in tb_peer */
	__u32 port[8]; /* its UDP port, network byte order */
	__u32 prefix[24]; /* as in tb_peer, three words of each job */
};
_Static_assert(sizeof(struct tb_switch_directory) == 192, "tb_switch_directory");

/* A job of a switch; written by the host. */
struct tb_switch_job {
	__u32 ranks; /* workers N; the switch is rank N */
	__u32 base; /* first slot */
	__u32 mask; /* slots - 1, a power of two less one */
	__u32 headroom; /* e of the next op: largest need plus this */
	__u32 address; /* of the switch, as in tb_peer */
	__u8 mac[6]; /* Ethernet address of the switch */
	__u16 port; /* UDP port, network byte order */
	__u32 prefix[3]; /* as in tb_peer */
};
_Static_assert(sizeof(struct tb_switch_job) == 40, "tb_switch_job");

/* A worker of a job, by rank (who may send) or by port (where a copy goes); written by the host. */
struct tb_switch_rank {
	__u32 address; /* as in tb_peer; 0, and prefix too: nobody */
	__u32 ifindex; /* the port towards it, by which alone it may send */
	__u8 mac[6]; /* its Ethernet address */
	__u16 rank; /* which */
	__u32 prefix[3]; /* as in tb_peer */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_switch_rank) == 32, "tb_switch_rank");

/* Record of one row in a switch; written by the program only, under the slot's lock. */
struct tb_switch_slot {
	__u32 cookie; /* tag, with seq */
	__u32 seq; /* tag, with cookie: row sequence */
	__u32 op; /* op label */
	__u16 layout; /* layout tag */
	__u16 row; /* place in the op */
	__u16 rows; /* rows of the op */
	__u16 codes; /* V: codes of the row */
	__u16 count; /* ranks summed */
	__u16 final; /* 1: released; the mean stands where the sums stood, and never changes */
	__u64 ranks[4]; /* bitmap of the ranks summed */
	__s16 need; /* largest need seen */
	__s16 exponent; /* e of the contributions summed */
	__u32 scale; /* 2 ** (e / 4), as the first contributor said it */
};
_Static_assert(sizeof(struct tb_switch_slot) == 64, "tb_switch_slot");

/* Counters of one (cpu, port) of a switch. */
struct tb_switch_port {
	__u64 ours; /* packets for the switch */
	__u64 foreign; /* packets passed on untouched */
	__u64 results; /* results that left by it, answers and echoes included */
	__u64 answers; /* packets from it that were answered to their sender alone */
};
_Static_assert(sizeof(struct tb_switch_port) == 32, "tb_switch_port");

#endif /* TB_ABI_H */
