/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */
#ifndef TB_RECORDS_H
#define TB_RECORDS_H

#include <linux/types.h>

#define TB_SHARED_MOST 2
#define TB_CHANNELS_MOST 32
#define TB_KEPT_ANSWERS 64
#define TB_OPENED_MOST 64
#define TB_REFUSED_MOST 64

#define TB_POKED 4294967296
#define TB_SAID_MOST 256
#define TB_SERVE_AFTER 1000000
#define TB_SOCKETS_AT 3

#define TB_SEND_DONE 0
#define TB_SEND_CALL 1
#define TB_SEND_PROBE 2

#define TB_SENDING_FORESEEN 0
#define TB_SENDING_LAUNCHED 1
#define TB_SENDING_AGREEING 2
#define TB_SENDING_CODING 3
#define TB_SENDING_OVER 4

#define TB_PHASE_OPEN 0
#define TB_PHASE_CLOSED 1
#define TB_PHASE_DONE 2

#define TB_WHY_NOTHING 0
#define TB_WHY_COMPLETE 1
#define TB_WHY_QUIET 2
#define TB_WHY_DEADLINE 3

#define TB_FOUND_NOTHING 0
#define TB_FOUND_MISMATCH 1
#define TB_FOUND_SEND 2
#define TB_FOUND_SEAL 3
#define TB_FOUND_FINISH 4

#define TB_READY_HANDED 1
#define TB_READY_EVENTS 2
#define TB_READY_CONTROLS 4

#define TB_WOKEN_TURN 1
#define TB_WOKEN_SERVE 2
#define TB_WOKEN_SEND 8

#define TB_ACTION_NONE 0
#define TB_ACTION_SKIP 1
#define TB_ACTION_STOP 2

/* What headers are made of; arrays by their address, 0: none. */
struct tb_stamp {
	__u64 packets; /* u8[][stride]: payloads are in place, headers are written */
	__u64 states; /* u64[][4]: what the payloads left of their checks or tags */
	__u64 head; /* a header with all that packets have in common */
	__u64 key; /* of the op; none: packets carry the check */
	__u64 places; /* u32[]: places of rows in their owner's list */
	__u64 groups; /* u32[]: where a packet's values are in the columns below; none: at its own number */
	__u64 exponents; /* s16[] */
	__u64 needs; /* s16[] */
	__u64 scales; /* f32[] */
	__u64 counts; /* u16[] */
	__u64 weights; /* u8[] */
	__u32 stride; /* bytes of a packet */
	__u32 mark; /* of the packet of a run that leaves last */
};
_Static_assert(sizeof(struct tb_stamp) == 96, "tb_stamp");

/* Packets with consecutive numbers for one owner. */
struct tb_run {
	__u32 first; /* number of the first packet */
	__u32 count; /* packets */
	__u32 last; /* which of them leaves last and has the mark */
	__u32 seq; /* row sequence of the owner's first place */
	__u32 owner; /* header field */
	__u32 rows; /* header field */
};
_Static_assert(sizeof(struct tb_run) == 24, "tb_run");

/* How fast a rank may be sent to (``transport.pace``), and round trips to it; times in ns. */
struct tb_path {
	double rate; /* bytes per second, where that is a limit */
	double marked; /* smoothed share of packets that came with CE */
	__s64 spent; /* when what has left is paid for */
	__s64 sent; /* when the last probe left; 0: none has */
	__s64 queued; /* that it waits in own queues */
	__s64 before; /* tb_peer_state.rtt_ns before it */
	__s64 raised; /* when the rate was last set */
	__u64 bytes; /* that have left since */
	__u64 packets; /* that have left since */
	__u64 count; /* packets that left between it and the one whose echo came last */
	__s64 rtt; /* of the last echo, without what its probe waited in own queues */
	__u32 marks; /* own packets that came there with CE, by the last echo */
	__u32 told; /* 1: an echo has come */
	__u32 awaited; /* 1: the echo of the last probe may still come */
	__u32 missed; /* probes lost running */
	__u32 over; /* round trips above the target running */
	__u32 slowed; /* times that marks have lowered the rate */
	__u32 limited; /* 1: the rate is a limit */
	__u32 held; /* 1: something had to wait, and has not made up for it */
};
_Static_assert(sizeof(struct tb_path) == 120, "tb_path");

/* How fast all ranks together may be sent to (``transport.pace``); times in ns. */
struct tb_link {
	double most; /* bytes per second at most; 0: the link itself sees to it */
	double speed; /* bytes per second by which own queues empty; no rate is higher */
	double floor; /* bytes per second; no rate is below half of an equal share of it, or of the speed if less */
	__s64 gap; /* from one burst to the next; 0: none */
	__s64 quantum; /* of sending that may leave for a rank at once */
	__s64 ahead; /* of sending that may lie in own queues */
	__s64 late; /* the same where rows had to wait */
	__s64 room; /* bytes that may wait in own queues */
	double known; /* bytes per second of the link; 0: no rank knows */
	double own; /* the same, as its driver says, right or wrong; 0: it does not */
	double drained; /* the same, as it was while sockets were full, lately; 0: none was */
	__s64 opens; /* when the next burst may leave */
	__s64 leaves; /* when the last of what was handed over leaves this host */
	__s64 spent; /* as in tb_path */
	__u32 held; /* as in tb_path */
	__u32 peers; /* ranks that share it, at least 1 */
};
_Static_assert(sizeof(struct tb_link) == 120, "tb_link");

/* A rank, or a shared channel, and what has become of packets for it. */
struct tb_target {
	__u64 name[4]; /* struct sockaddr_in or sockaddr_in6 */
	__u64 ranks[4]; /* bitmap of who gets what is sent to it */
	__u32 channel; /* that its bursts leave over */
	__u32 cost; /* bursts that this host is busy with for one */
	__u32 plain; /* 1: GSO does not work, packets leave one by one */
	__u32 pad; /* 0 */
	__u64 packets; /* that have left */
	__u64 bytes; /* that have left */
	__u64 bursts; /* that have left */
	__u64 lost; /* packets given up */
	__u64 waits; /* times a socket was full */
};
_Static_assert(sizeof(struct tb_target) == 120, "tb_target");

/* What a send queue and Python tell each other; times in ns. */
struct tb_sending {
	__s64 now; /* of the pump */
	__s64 again; /* when to pump again; 0: nothing waits, or for a writable socket */
	__u64 peers[4]; /* bitmap of all ranks that are sent to */
	__u64 voice; /* struct tb_voice; 0: nothing is known of ranks, and none is probed or told */
	__u64 probes; /* that have left */
	__u64 echoes; /* that have come */
	__u64 marked; /* own packets that came with CE, by all echoes */
	__u64 left; /* packets that wait */
	__u64 bytes; /* that have left, copies included */
	__u64 full; /* bitmap of sockets that had no room */
	__u64 blocked; /* bitmap of sockets that are not tried again in this pump */
	__u64 waits; /* times a socket or a device queue was full */
	__u64 sleep; /* struct tb_sleep of the thread that pumps; 0: none */
	__u64 contributions; /* packets of contributions that have left */
	__u64 results; /* packets of results that have left */
	__u64 copies; /* packets that have left again, by request */
	__u64 held; /* times a rate kept something back */
	__u64 stale; /* rows dropped because their time was up */
	__u64 messages; /* struct mmsghdr[count], to be handed over */
	__u32 count; /* messages */
	__u32 port; /* socket that they leave over */
	__u32 refused; /* messages that were refused since Python has looked, as many as are kept at most */
	__u32 pad; /* 0 */
	__u32 to[64]; /* destination of each */
	__s32 errors[64]; /* its errno; below 0: that of a burst, which leaves in single packets */
	__u32 sockets; /* how many */
	__u32 channels; /* how many */
	__s32 fds[64]; /* of sockets */
	__u64 rooms[64]; /* bytes that may wait in each */
	__u32 first[32]; /* first socket of a channel */
	__u32 ports[32]; /* sockets of a channel, which take turns */
	__u32 turn[32]; /* whose turn it is */
	__u32 due; /* probes that wait for room */
	__u32 words; /* single packets that wait */
	__u32 ways; /* how often a round trip waits in own queues */
	__u32 ranks; /* destinations below it are ranks, others shared channels */
};
_Static_assert(sizeof(struct tb_sending) == 1880, "tb_sending");

/* Results of own rows that have been handed out, and can be sent again. */
struct tb_given {
	__u64 after; /* struct tb_given: those of the op before, which is over; 0: none are kept */
	__u64 packets; /* u8[rows, stride], headers finished */
	__u64 states; /* u64[rows, 4]: partial checks of payloads */
	__u64 usable; /* u8[rows]: the row exists */
	__u64 heads; /* struct tb_stamp: of their headers */
	__u64 key; /* of the op; 0: packets carry checks */
	__u32 label; /* of the op */
	__u32 layout; /* layout tag */
	__u32 rows; /* how many */
	__u32 stride; /* bytes of a packet */
};
_Static_assert(sizeof(struct tb_given) == 64, "tb_given");

/* What requests to a peer have taught (`collective.terms`); times in ns. */
struct tb_answers {
	__s64 floor; /* the shortest deadline */
	__s64 guess; /* the probe timeout until an answer comes; 0: one has */
	__s64 window; /* the reordering window */
	__s64 twice; /* rows that ever came a second time by a request */
	double usual; /* time of an answer */
	double varies; /* its variance */
};
_Static_assert(sizeof(struct tb_answers) == 48, "tb_answers");

/* A row that is to come, in the order of sending; times in ns. */
struct tb_awaited {
	__s64 first; /* when it was requested first; 0: never */
	__s64 asked; /* when it was requested last */
	__u32 place; /* among retransmissions, behind all rows that left once; 0: it was not requested */
	__u8 out; /* requested, and not here */
	__u8 here; /* it has arrived */
	__u8 gone; /* its sender has none */
	__u8 lost; /* to be requested now */
};
_Static_assert(sizeof(struct tb_awaited) == 24, "tb_awaited");

/* A flow as its receiver sees it; times in ns. Places are those among rows that left once [0], and among all [1]. */
struct tb_incoming {
	__u64 row; /* struct tb_awaited[rows] */
	__u64 listed; /* s32[rows], of results: rows of the op in list order */
	__s64 due; /* when to look next */
	__s64 mark; /* when to ask its sender for the mark */
	__s64 ended; /* when the mark was noticed; 0: it was not */
	__s64 noted; /* when highest was seen; 0: all of it counts as passed */
	__s64 since; /* the last progress of requested rows */
	__s64 moved; /* when the last row came */
	__s64 waited; /* the same, or when its sender was to be asked */
	__s64 called; /* when its sender was asked last since a deadline was near */
	__s32 passed[2]; /* places that count as passed */
	__s32 highest[2]; /* places that will after the window */
	__u32 rank; /* its sender */
	__u32 rows; /* 0: a switch has them all, and marks alone are asked for */
	__u32 first; /* place in the list that it begins with; it wraps there */
	__u32 next; /* place of the next retransmission */
	__u32 came; /* rows here, as far as silence goes */
	__u32 expired; /* probe timeouts since the last progress */
	__u32 questions; /* since the last row */
	__u32 requests; /* rows to be requested now */
	__u32 again; /* rows that were requested, each once */
	__u32 mended; /* of these, how many have come */
	__u8 known; /* it was looked at */
	__u8 awaited; /* by the caller's last word; a suspect may come back */
	__u8 finished; /* its sender's mark says that all rows have left */
	__u8 over; /* nothing more is requested */
	__u8 probed; /* a probe timeout has expired */
	__u8 silent; /* its mark is missed */
	__u8 asked; /* its sender is to be asked for the mark now */
	__u8 released; /* a switch is asked to release rows, and not only for lost ones */
};
_Static_assert(sizeof(struct tb_incoming) == 144, "tb_incoming");

/* One half of an op: its deadline, its silence and loss detection of its flows; times in ns. */
struct tb_half {
	__s64 deadline; /* when it ends the half, as far as is known; 0: the clock has not started */
	__s64 promised; /* the same before it was ever moved on */
	__s64 lasts; /* from the start of the clock to promised */
	__s64 limit; /* when it ends the half whatever comes */
	__s64 over; /* when it ended the half, but for rows that can still be had; 0: it has not */
	__s64 tenth; /* by how much it moves on */
	__s64 progress; /* rows at the last look in the last tenth, plus one; 0: there was none */
	__s64 quiet; /* since when all have finished and nothing has come; 0: they have not */
	__s64 quiet_at; /* rows that had come by then */
	__u64 flows; /* struct tb_incoming[count], of the rank after the own one first; 0: none has begun */
	__u64 terms; /* struct tb_terms */
	__u64 own_op; /* struct tb_own_op: whose half it is */
	__s64 patience; /* that an ended flow is waited for while no requested row comes; 0: none is requested */
	__s64 step; /* between two looks at a flow that runs */
	__s64 look; /* between two looks at a flow with requested rows */
	__s64 due; /* when to look again */
	__u32 count; /* flows, some of which may not have begun */
	__u32 rounds; /* how often senders were asked for their marks */
	__u32 closed; /* flows that have ended and are over */
	__u32 requested; /* requests for rows */
	__u32 part; /* of places, modulo parts, whose rows this rank asks a switch to release first */
	__u32 parts; /* live ranks */
	__u8 phase; /* how far it is */
	__u8 why; /* what has ended it */
	__u8 late; /* 1: the launch came after the deadline, and no row is waited for before it is requested */
	__u8 open; /* 1: a flow has ended, and its missing rows may still come */
	__u8 release; /* 1: a switch is to release rows with what is in */
	__u8 results; /* 1: it is the second */
	__u8 short_of; /* 1: a rank is known to bring a switch no rows */
	__u8 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_half) == 160, "tb_half");

/* What waiting past deadlines may cost, and how long ranks that live say nothing (`collective.terms`); in ns. */
struct tb_overtime {
	__s64 floor; /* the shortest deadline */
	__s64 most; /* that is saved up at most */
	__s64 reserve; /* what rows that are asked for again leave of the balance */
	double saved; /* the balance */
	__s64 at; /* when it was that */
	__s64 until; /* waits until then are paid for */
	__s64 waited; /* that ops have waited past their deadlines in all */
	__s64 answer; /* that the slowest of the last answers took */
	__s64 lack; /* that the own thread waited for a core between two turns of one of the last ops at most */
	__s64 lacked; /* that it has waited for one in all, as the kernel counts it */
	double share; /* part of the time that is saved up */
	__s64 longest; /* that answers and waits count at most */
	__s64 latest; /* the longest wait for a core since the last op */
	__s64 answers[64]; /* what the last answers took, in turn */
	__u32 answered; /* how many there were */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_overtime) == 624, "tb_overtime");

/* What the ops of a rank are decided by, and what Python and the library tell each other in a turn; times in ns. */
struct tb_terms {
	__u64 control; /* struct tb_control */
	__u64 states; /* struct tb_peer_state[], by rank */
	__u64 ops; /* struct tb_op[] */
	__u64 slots; /* struct tb_slot[] */
	__u64 presence; /* struct tb_presence[] */
	__u64 results; /* struct tb_result[] */
	__u64 given; /* struct tb_given: results of the newest op that is over; 0: none are kept */
	__u64 answers; /* struct tb_answers[], by half and rank */
	__u64 overtime; /* struct tb_overtime */
	__u64 spoke; /* s64[], by rank: when a word of it was read last; 0: never */
	__u64 asked; /* s64[], by rank: when it was first asked what it has not answered yet; 0: it was not */
	__u64 live[4]; /* bitmap of ranks whose contributions are waited for */
	__u64 owners[4]; /* bitmap of ranks whose results are waited for */
	__u64 gone[4]; /* bitmap of ranks that have said goodbye */
	__u64 voters[4]; /* bitmap of ranks of which a majority is a quorum */
	__s64 live_since; /* when the live set last changed */
	__s64 silence; /* q of clock-10 */
	__s64 start_max; /* D_start of clock-3 */
	__s64 stage_max; /* of a half, in which deadlines move on */
	__s64 insist; /* that results are asked for past a deadline */
	__s64 floor; /* the shortest deadline */
	__s64 deadline_1; /* the own D1 as configured; 0: it is learned */
	__s64 advertised; /* the own D1 of the largest ops, as headers carry it */
	__s64 due; /* when to look at ops again, for ones that were looked at; 0: when something arrives */
	__s64 listen; /* when to look at flows again; 0: none is to be looked at */
	__u64 first; /* struct tb_own_op: the oldest op in flight */
	__u64 handed; /* struct tb_own_op: the newest that was launched and is not taken; 0: none */
	__u64 at; /* the op that a turn has come to */
	__u32 cookie; /* job */
	__u32 rank; /* own rank */
	__u32 ranks; /* that contribute */
	__u32 world; /* ranks, a switch included */
	__u32 sum_mask; /* slots less one */
	__u32 result_mask; /* result rows less one */
	__u32 self_late; /* 1: the own rows are not waited for (clock-8) */
	__u32 suspects; /* 1: there are some */
	__u32 holds; /* 1: a live rank holds, so that no clock starts */
	__u32 everything; /* 1: the flows of all ops are to be looked at */
	__u32 entered; /* 1: the turn is in the midst of an op */
	__u32 label; /* of the op that something was found of */
	__u32 alone; /* 1: the library looks at a single op, from which Python learns later */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_terms) == 376, "tb_terms");

/* Rows of one peer in one half of the ops so far. */
struct tb_books {
	__s64 ops; /* that are over */
	__s64 expected; /* rows */
	__s64 taken; /* rows */
	__s64 repaired; /* of these, rows that had been asked for again */
	__s64 gaps; /* missing rows of ops whose mark said that all were sent */
	__s64 open; /* missing rows of other ops */
	__s64 short_ops; /* running, of which it has sent all and less than half came before requests */
};
_Static_assert(sizeof(struct tb_books) == 56, "tb_books");

/* What one half of an op came to, of others. */
struct tb_tally {
	__s64 due; /* rows */
	__s64 came; /* rows */
	__s64 judged; /* rows due of ranks of which some came, or that are waited for and have sent all */
	__s64 judged_came; /* rows */
	__u64 absent[4]; /* bitmap of ranks of which none came */
	__u64 lacking[4]; /* bitmap of ranks that are to be told that their rows do not come */
	__u32 flags; /* Flag bits of the results that are here */
	__u32 owners; /* of which results are here */
	__u32 well; /* of these, how many had a quorum */
	__u32 quorum; /* 1: a majority had part in the half */
};
_Static_assert(sizeof(struct tb_tally) == 112, "tb_tally");

/* Own marks: the highest op whose contributions (results) have been sent in full. */
struct tb_own_marks {
	__u32 contributed; /* of contributions */
	__u32 published; /* of results */
	__u32 told; /* the highest ``published`` that packets say which have left or wait in the queue */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_own_marks) == 16, "tb_own_marks");

/* An op of a rank from its first sign of life on (`collective.op`); times in ns. */
struct tb_own_op {
	__u64 after; /* the next op in flight */
	__u64 halves[2]; /* struct tb_half: of contributions to the own rows, and of results */
	__u64 shares; /* s64[], by rank: rows that it owns */
	__u64 starts; /* s64[], by rank: where its rows begin in row_at */
	__u64 row_at; /* s32[rows]: the rows in packet order */
	__u64 owner; /* u8[rows]: whose they are */
	__u64 places; /* s64[], by rank: the place in the own list with which it begins */
	__u64 usable; /* u8[own]: a rank contributed to the own row */
	__u64 own_scale; /* f32[own]: of the own results */
	__u64 source; /* s64[rows]: in the result ring, -2 - place in the own results, or -1: not here */
	__u64 row_scale; /* f32[rows]: of results */
	__u64 row_exponent; /* s16[rows]: next exponents that a switch says */
	__u64 row_count; /* u16[rows]: contributors that a switch says */
	__u64 handed; /* struct tb_own_op: the one that was launched before it, and is not taken either */
	__u64 heads; /* struct tb_stamp: of headers of contributions */
	__u64 seqs; /* u32[], by rank: row sequences of the first rows that it owns */
	__u64 code; /* struct tb_work: the pass that codes the own rows; 0: Python codes them */
	__u64 given; /* u8[rows, stride]: contributions by owner, headers finished; 0: none are given */
	__u64 states; /* u64[rows, 4]: partial checks of their payloads */
	__u64 firsts; /* s64[], by owner: the place of the packet that is first in memory */
	__u64 tag_key; /* of the op; 0: packets carry checks */
	__u64 made; /* struct tb_given: where the results of the own rows are made */
	__u64 mean; /* words of the pass that makes them; 0: not known yet */
	__u64 came[2]; /* s64[], by rank: own rows with a contribution at the end; results here */
	__u64 tally[2]; /* struct tb_tally: of these */
	__u64 decode; /* struct tb_work: the pass that decodes the results; 0: Python decodes them */
	__s64 worth; /* how long results of its size are worth sending */
	__s64 closed_at; /* when the own rows were sealed, or a switch first asked to release some; 0: never */
	__s64 came_by; /* results that had come when a switch was first asked to release rows */
	__s64 sent_at; /* when the own rows had left; 0: they have not */
	__s64 published_at; /* when their results had left; 0: they have not */
	__u64 results; /* struct tb_given: of the own rows, handed out; 0: not, or kept with others */
	__s64 stage_one; /* the own D1 of its size; 0: it owns no rows of such ops */
	__s64 usual; /* D2 of its size: what the second half takes as a rule */
	__s64 admitted; /* when the own launch found room; the clocks count from here */
	__s64 start; /* c of clock-3, when its clock started; 0: it has not */
	__s64 held; /* when a live rank was last seen to hold: no clock starts before */
	__s64 coding; /* when the own rows were begun to be coded; 0: they were not */
	__s64 own_in; /* when the own rows came into the own sums; 0: they are not there */
	__s64 collected_at; /* when the second half was closed; 0: it is open */
	__s64 listen; /* when to look at its flows */
	__s64 due; /* when to look again, as found in this look; 0: when something arrives */
	__u64 abstained[4]; /* bitmap of ranks that have said that they bring no rows */
	__u64 stayed[4]; /* bitmap of ranks that have said that they come too late to bring any */
	__u64 marks[8]; /* bitmaps of ranks whose marks covered it in the last turn */
	__u32 label; /* of the op */
	__u32 slot; /* of its record */
	__u32 layout; /* layout tag */
	__u32 rows; /* of all owners */
	__u32 own; /* rows that this rank owns */
	__u32 stride; /* bytes of a packet of contributions */
	__u32 sum_seq; /* of the first own row */
	__u32 result_seq; /* of the first row */
	__u32 previous; /* the op before */
	__u32 map_id; /* of the owner map that it is placed by */
	__u32 form; /* Flag bits of contributions */
	__u32 burst; /* contributions of a burst at most */
	__u32 say; /* Flag bits of the own results */
	__u32 largest; /* results of a burst at most */
	__u32 missing; /* own rows without a contributor */
	__u32 present; /* results of others that were here at the end */
	__u32 overwritten; /* of these, how many were another op's before they were read */
	__u32 aims; /* destinations of the results */
	__u16 aim[256]; /* each of them */
	__u8 stirred; /* 1: something but the datapath has changed it */
	__u8 asked; /* what Python has said of it in this look */
	__u8 sending; /* how far this rank is with its own rows */
	__u8 switched; /* 1: a switch sums its rows */
	__u8 empty; /* 1: this rank brings no rows, by its choice or its gradient, or since they come too late */
	__u8 overtaken; /* 1: all others were through with it before this rank had sent rows */
	__u8 mismatched; /* 1: ranks disagree on its layout */
	__u8 left; /* 1: all own rows have left */
	__u8 unnoted; /* 1: its own rows are sealed, and Python has not learned from that */
	__u8 queued; /* 1: the results are in the send queue, or beyond */
	__u8 action; /* what the safeguard calls for */
	__u8 own_present; /* 1: the own rows are in the own sums */
	__u8 known; /* 1: enough is known of its size (clock-26) */
	__u8 cold; /* 1: a switch's scales are still to be agreed on */
	__u8 nothing; /* 1: no rank brought rows, as all say */
	__u8 decoded; /* 1: the pass that decodes has ended, or there is none */
};
_Static_assert(sizeof(struct tb_own_op) == 1088, "tb_own_op");

/* What a rank says in control packets, and by what (`collective.speaker`). */
struct tb_voice {
	__u64 terms; /* struct tb_terms */
	__u64 line; /* struct tb_line */
	__u64 head; /* a header with all that packets have in common */
	__u64 marks; /* struct tb_own_marks */
	__u64 key; /* of the present epoch; 0: packets carry checks */
	__u64 stamp; /* the newest of a control packet, in a job with a key (auth-5) */
	__u64 repair_asked; /* packets that asked for rows, each once */
	__u64 asked; /* questions for marks, each once */
	__u64 rows_sent_again; /* rows that a switch was asked for */
	__u64 rows_flushed; /* rows that a switch was to release */
	__u64 repair_gone; /* packets that said which rows do not exist */
	__u64 control_refused; /* control packets that were damaged, or asked for nothing */
	__u64 control_replayed; /* control packets that were sent again by others (auth-5) */
	__u64 requests; /* struct tb_asked: what others have requested */
	__s64 again; /* when to go on with answers, ns; 0: none is left */
	__u32 waiting; /* requests */
	__u32 letters; /* control packets that Python is to read */
	__u64 source; /* struct tb_source: where control packets come from */
	__s32 controls; /* an eventfd that says so, for the library's tables; -1: none */
	__u32 said_of[256]; /* ops of which something was said of the own gradient */
	__u32 said[256]; /* what: Flag bits */
	__u32 saying; /* how many such ops there were */
	__u32 width; /* bytes of a body at most */
	__u32 largest; /* packets of the longest rows in a burst */
};
_Static_assert(sizeof(struct tb_voice) == 2200, "tb_voice");

/* What a rank sends its rows by, and makes, sends and reads results (`collective.job`). */
struct tb_owner {
	__u64 terms; /* struct tb_terms */
	__u64 source; /* struct tb_source: seals rows */
	__u64 line; /* struct tb_line */
	__u64 marks; /* struct tb_own_marks */
	__u64 books; /* struct tb_books[], of contributions, then of results, by rank */
	double stop; /* part of an op's contributions beyond which training ends if it is lost */
	double skip; /* beyond which no rank applies the op */
	__u64 code; /* the compiled pass that makes results (``wire.jit.entry``) */
	__u64 memory; /* words of what it works in */
	__u64 voice; /* struct tb_voice */
	__u64 expected; /* struct tb_expect_results[], by slot of ops */
	__u32 most; /* rows that the thread makes in one go */
	__u32 form; /* Flag bits of a switch's results; 0: there is none */
};
_Static_assert(sizeof(struct tb_owner) == 96, "tb_owner");

/* Where a datapath's events and words come from, and who seals its slots: the library's tables, or a kernel's maps. */
struct tb_source {
	__u64 tables; /* struct tb_tables; 0: a ring */
	__u64 consumed; /* u64: how far the ring was read */
	__u64 produced; /* u64: how far it was written */
	__u64 data; /* of the ring, twice in a row */
	__u64 mask; /* bytes of it less one */
	__u64 keys; /* u32[rows]: 0, 1, ..., to seal by */
	__u64 values; /* u32[rows, 2]: lock and sealed op */
	__u32 rows; /* slots of sums */
	__s32 locks; /* descriptor of the map of their locks */
	__u64 peers; /* struct tb_peer[]: who may send control packets */
	__u64 strange; /* control packets of others */
	__s32 socket; /* that control packets come in by */
	__u32 pad; /* 0 */
};
_Static_assert(sizeof(struct tb_source) == 88, "tb_source");

/* How the transport thread sleeps, and looks out meanwhile (`collective.waiter`); times in ns. */
struct tb_sleep {
	__u64 polled; /* struct pollfd[]: as in ``Ready``, and sockets behind */
	__u64 terms; /* struct tb_terms */
	__u64 line; /* struct tb_line */
	__u64 sending; /* struct tb_sending of it */
	__u64 source; /* struct tb_source */
	__u64 owner; /* struct tb_owner */
	__s64 longest; /* of a wait */
	__s64 stopped; /* after which a thread that has not woken up was stopped */
	__s64 end; /* when a turn is due at the latest */
	__s64 soon; /* when to look at ops: by a clock, or after events that complete no half; 0: by those */
	__s64 awake; /* when the thread was last seen to run; 0: never */
	__s64 served; /* when others were last looked after in the midst of a turn */
	__s64 asked; /* when the last wait was to end */
	__s64 woken; /* when it did */
	__u64 ready; /* ``Ready``: what it found, with sockets behind */
	__u64 voice; /* struct tb_voice */
	__u64 deputy; /* struct tb_deputy; 0: there is none */
	__u32 opened[64]; /* ops that have begun elsewhere since the last turn */
	__u32 count; /* of them */
	__u32 found; /* what a turn is due by (``Found``); 0: anything else */
	__u32 label; /* of the op of which it was found */
	__u32 fds; /* descriptors */
	__u32 direct; /* 1: all sockets are the system's */
	__s32 schedstat; /* what the kernel counts of the thread; 0 or less: nothing */
	__u32 unsent; /* 1: own rows are still to be coded, once Python has done what was found */
	__u32 due; /* not 0: others have said something in the midst of a turn, by which another one is due */
};
_Static_assert(sizeof(struct tb_sleep) == 424, "tb_sleep");

/* A compiled pass over many groups, which threads share piece by piece (`codec.threads`). */
struct tb_work {
	__u64 code; /* where it begins (`wire.jit.entry`) */
	__s64 call; /* where the words are that it is called with */
	__s64 next; /* the first that no thread has taken */
	__s64 end; /* behind the last */
	__s64 piece; /* taken at once */
	__s64 sum; /* of what it returned */
	__u64 crew; /* struct tb_crew: threads that share it */
	__u32 members; /* how many of them do */
	__u32 failed; /* 1: it returned less than 0, and ends */
};
_Static_assert(sizeof(struct tb_work) == 64, "tb_work");

#endif /* TB_RECORDS_H */
