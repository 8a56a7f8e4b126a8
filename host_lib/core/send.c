// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What waits to be sent (transport/queue.py): order of submissions, bursts in turn, and rates.
 *
 * A pump is tb_begin, then tb_next until it says TB_SEND_DONE, and tb_end: tb_next fills messages for one call over one
 * socket and makes no system call itself. The caller makes it, and says by tb_took what became of them. tb_pump does all
 * that with sendmmsg.
 * Probes get their time just before that (tb_time_probes).
 *
 * A flow is a run of packets for one destination. Flows of a submission take turns, a burst of each: the one that is least
 * far on is always next, so that a call that was cut short goes on where it was. Where packets are lost the last one
 * of each leaves twice: its mark says that nothing more comes, and who lacks it asks only after a probe timeout (clock-23).
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define TB_UDP_SEGMENT 103
#define TB_SECOND 1e9
#define TB_ANY (1U << 30) /* as many bursts as one may want */
#define TB_MESSAGES 32 /* of one system call */
/* A pump hands over this many bursts at most before the loop looks around again (8 MiB: about 10 ms). */
#define TB_BUDGET 128
/*
 * Bursts in one call where several sockets take turns: a quarter of a megabyte. Rows are handed over in the order of one
 * socket: the last packet, whose mark says that nothing more comes, follows all others, and a tail that is cut off is one
 * piece.
 */
#define TB_TURN 4
#define TB_RETRY 500000 /* ns until a full device queue is tried again; it makes no socket event */
#define TB_ROOM \
	5000000 /* the same of a full socket at the latest; as a rule it becomes writable before */
#define TB_LOSSY \
	1000000000 /* ns for which packets seem to be lost after some were requested again */
#define TB_EVERY (192 << 10) /* bytes for a rank between two probes: a few bursts */
/* ns after which a probe without an echo counts as lost: longer than any queue that rates let stand. */
#define TB_LOST 100000000
#define TB_PROBE (TB_HEADER_BYTES + TB_ROW_STEP)
/* Bytes that must have left while sockets were full to say how fast the link is; and after so many ns they do. */
#define TB_MEASURED_BYTES (256 << 10)
#define TB_MEASURED 20000000
#define TB_FRAME 42 /* bytes of a packet on a link besides its UDP payload */
#define TB_UNKNOWN 1.25e8 /* bytes per second of a link of which nothing is known */
#define TB_WORDS_MOST 1024 /* single packets that wait; of more the oldest give way */

enum { TB_SINGLE_WORDS = 1, TB_SINGLE_PROBES };

struct tb_flow {
	__u64 base;
	__u32 next, total; /* packets that have left, and all */
	__u32 to;
	__u32 size, allowed; /* packets of a burst, and bursts that may leave now */
	__u32 ahead, quota; /* the same as next and allowed while messages are filled */
};

struct tb_item {
	struct tb_item *after;
	__u64 left, packets; /* packets that have left; copies count, repeats do not */
	void *owned; /* packets that go with it */
	struct tb_own_op *op; /* whose rows it has; NULL: of no op in flight */
	__s64 until;
	__u32 label, queue, stride, largest, count, channels;
	__u8 channel[TB_CHANNELS_MOST]; /* in the order of flows */
	__u8 whole; /* nothing of it was dropped */
	__u8 repeats; /* last packets leave once more */
	struct tb_flow flows[];
};

struct tb_line {
	struct tb_sending *s;
	struct tb_target *targets;
	struct tb_path *paths;
	struct tb_link *link;
	struct tb_item *head[TB_QUEUES], **tail[TB_QUEUES];
	struct tb_words words; /* single packets */
	__s64 lossy; /* until when packets seem to be lost */
	/* a pump */
	struct tb_item **order;
	__u32 ordered, most, at, channel;
	int opened, moved, budget;
	tb_set behind; /* ranks for which something older waits */
	__u64 due[TB_WORDS]; /* ranks that a probe waits for */
	int single; /* what the messages are (TB_SINGLE_*); 0: bursts */
	__s64 probed; /* when probes leave */
	__s64 crowded; /* since when sockets are full; 0: none is */
	__u64 before; /* bytes that had left by then */
	struct mmsghdr messages[TB_MESSAGES];
	struct iovec pieces[TB_MESSAGES];
	__u64 control[3]; /* struct cmsghdr, and the bytes of a packet */
	struct {
		__u32 flow, packets; /* of a probe: its rank */
	} bursts[TB_MESSAGES];
	__u64 probes[TB_MESSAGES][TB_PROBE / 8];
};

/* Terms of the rank; 0: there are none. */
static const struct tb_terms *tb_terms_of(const struct tb_line *l)
{
	const struct tb_voice *v = (const struct tb_voice *)l->s->voice;

	return v ? (const struct tb_terms *)v->terms : NULL;
}

/* The oldest word has left, or will not. */
static void tb_forget_word(struct tb_line *l)
{
	tb_drop_word(&l->words);
	l->s->words--;
}

/* What it is given outlives it. NULL: no memory. */
TB_EXPORT struct tb_line *tb_line_open(struct tb_sending *s, struct tb_target *targets,
				       struct tb_path *paths, struct tb_link *link)
{
	struct tb_line *l = calloc(1, sizeof(*l));
	int i;

	if (!l)
		return 0;
	l->s = s;
	l->targets = targets;
	l->paths = paths;
	l->link = link;
	s->messages = (__u64)l->messages;
	for (i = 0; i < TB_QUEUES; i++)
		l->tail[i] = &l->head[i];
	l->control[0] = CMSG_LEN(2);
	l->control[1] = IPPROTO_UDP | (__u64)TB_UDP_SEGMENT << 32;
	for (i = 0; i < TB_MESSAGES; i++)
		l->messages[i].msg_hdr =
			(struct msghdr){ .msg_iov = &l->pieces[i], .msg_iovlen = 1 };
	return l;
}

TB_EXPORT void tb_line_close(struct tb_line *l)
{
	struct tb_item *item, *after;
	int i;

	while (l->words.first)
		tb_forget_word(l);
	for (i = 0; i < TB_QUEUES; i++)
		for (item = l->head[i]; item; item = after) {
			after = item->after;
			free(item->owned);
			free(item);
		}
	free(l->order);
	free(l);
}

/* -- rates ----------------------------------------------------------------------------------------------------- */

/* A token bucket: from when on its time may be spent. depth: ns of sending that may leave at once after a pause. */
static __s64 tb_bucket_begin(__s64 spent, __u32 held, __s64 depth, __s64 late, __s64 now)
{
	__s64 begin = now - (held && late > depth ? late : depth);

	return spent > begin ? spent : begin;
}

/* How many bursts of size bytes may leave now; 0: not before *again. */
static __u32 tb_bucket_room(__s64 spent, __u32 *held, __s64 depth, __s64 late, double rate,
			    __u64 size, __s64 now, __s64 *again)
{
	__s64 begin = tb_bucket_begin(spent, *held, depth, late, now);
	double room;

	if (begin > now) {
		*held = 1;
		if (begin > *again)
			*again = begin;
		return 0;
	}
	room = (now - begin) * rate / TB_SECOND / size;
	return room < 1 ? 1 : room > TB_ANY ? TB_ANY : (__u32)room;
}

static void tb_bucket_spend(__s64 *spent, __u32 *held, __s64 depth, __s64 late, double rate,
			    __u64 size, __s64 now)
{
	*spent =
		tb_bucket_begin(*spent, *held, depth, late, now) + (__s64)(size * TB_SECOND / rate);
	*held &= *spent < now - depth;
}

static void tb_pump_at(struct tb_sending *s, __s64 when)
{
	if (!s->again || when < s->again)
		s->again = when;
}

/* What waits is sent at the next occasion. */
void tb_pump_soon(struct tb_line *l)
{
	tb_pump_at(l->s, 1);
}

/* w and bits are its own. */
#define TB_EACH_RANK(r, ranks)                                                           \
	for (w = 0; w < TB_WORDS; w++)                                                   \
		for (bits = (ranks)[w]; bits && (r = 64 * w + __builtin_ctzll(bits), 1); \
		     bits &= bits - 1)

/*
 * Bytes per second at which this rank can send to all others together: the speed of its link, or what has been seen to leave
 * while something waited, if that is less. A virtual link calls itself faster than it is, and a switch behind it may be slower.
 */
TB_EXPORT double tb_pace(const struct tb_line *l)
{
	double own = l->link->own, drained = l->link->drained;

	if (own && drained)
		return tb_lower(own, drained);
	return own || drained ? own + drained : TB_UNKNOWN;
}

/* Bytes per second to a rank, of which at most so many can be used. */
double tb_rate(const struct tb_line *l, __u32 rank, double most)
{
	const struct tb_path *p = &l->paths[rank];

	return p->limited && p->rate < most ? p->rate : most;
}

/* Bursts of a flow and their size: what is older goes first, then the slowest of its ranks. */
static void tb_allow(struct tb_line *l, const struct tb_item *item, struct tb_flow *f)
{
	const struct tb_target *t = &l->targets[f->to];
	struct tb_sending *s = l->s;
	__s64 again = 0, quantum = l->link->quantum;
	__u64 bits;
	__u32 r, room, w;
	int plain = t->plain, limited = 0;
	double most;

	f->size = item->largest;
	f->allowed = TB_ANY;
	if (tb_count(l->behind & tb_set_of(t->ranks))) {
		f->allowed = 0;
		return;
	}
	TB_EACH_RANK(r, t->ranks)
	{
		plain |= l->targets[r].plain;
		limited |= l->paths[r].limited;
	}
	if (plain)
		f->size = 1;
	if (!limited || f->next >= f->total)
		return;
	TB_EACH_RANK(r, t->ranks)
	{
		most = tb_rate(l, r, l->link->speed) * quantum / TB_SECOND / item->stride;
		if (most < f->size)
			f->size = most < 1 ? 1 : (__u32)most;
	}
	TB_EACH_RANK(r, t->ranks)
	{
		struct tb_path *path = &l->paths[r];

		if (!path->limited)
			continue;
		room = tb_bucket_room(path->spent, &path->held, quantum, quantum,
				      tb_rate(l, r, l->link->speed), (__u64)f->size * item->stride,
				      s->now, &again);
		if (room < f->allowed)
			f->allowed = room;
	}
	if (again) {
		s->held++;
		tb_pump_at(s, again);
	}
}

/*
 * Bursts that may leave now, as far as the link and gaps go: at most so many, or one after a gap. What a late wake-up has
 * missed of a gap is not made up for: two bursts at once were lost where one was not.
 */
static __u32 tb_link_bursts(struct tb_link *link, const struct tb_item *item, __u32 cost, __s64 now,
			    __u32 most)
{
	__u64 burst = (__u64)item->largest * cost * (item->stride + TB_FRAME);
	__s64 again = 0;
	__u32 room;

	if (now < link->opens)
		return 0;
	if (link->most > 0) {
		room = tb_bucket_room(link->spent, &link->held, link->ahead, link->late, link->most,
				      burst, now, &again);
		if (!room)
			link->opens =
				again + link->ahead / 2; /* it has as much left: fewer wake-ups */
		if (room < most)
			most = room;
	}
	return link->gap && most > 1 ? 1 : most;
}

/* bursts have left, whomever they were for: packets, copies among them. */
static void tb_link_left(struct tb_link *link, __u32 bursts, __u64 packets, __u32 stride, __s64 now)
{
	double each = TB_SECOND / link->speed, size = packets * (double)(stride + TB_FRAME);
	double leaves = (link->leaves > now ? link->leaves : now) + size * each;
	double last = now + link->room * each;

	link->opens = link->gap ? now + bursts * link->gap : 0;
	link->leaves = (__s64)(leaves < last ? leaves : last);
	if (link->most > 0)
		tb_bucket_spend(&link->spent, &link->held, link->ahead, link->late, link->most,
				(__u64)size, now);
}

/* -- what echoes make of rates (clock-24, and transport/pace.py) -------------------------------------------------- */

#define TB_TARGET 8000000 /* ns; longer round trips are never accepted */
#define TB_LONG 3 /* long ones running that lower a rate: hosts that share cores make single ones */
#define TB_PAUSE 4000000 /* ns between two raises */
#define TB_MARKED 0.01 /* smoothed share of marked packets above which marks count as coming */
#define TB_SILENT 8 /* probes lost running after which a rate rises */

/* One above the speed of the link ends the limit, and none is below half of an equal share of the floor. */
static void tb_set_rate(struct tb_path *p, const struct tb_link *link, double rate, __s64 now)
{
	double least = tb_lower(link->floor, link->speed) / link->peers / 2;

	p->raised = now;
	p->limited = rate <= link->speed;
	p->rate = rate > least ? rate : least;
}

static void tb_raise(struct tb_path *p, const struct tb_link *link, __s64 now)
{
	double more = p->marked > TB_MARKED ? 0.05 * link->speed / link->peers : 0.1 * p->rate;

	if (p->limited && now - p->raised >= TB_PAUSE)
		tb_set_rate(p, link, p->rate + more, now);
}

/* An echo that took rtt ns, without what its probe waited in own queues; share: of marked packets. */
TB_EXPORT void tb_echoed(struct tb_path *p, const struct tb_link *link, __s64 rtt, double share,
			 __s64 now)
{
	double rate = p->limited ? tb_lower(p->rate, link->speed) : link->speed, lower = rate;
	int rises = rtt >= p->rtt;

	p->rtt = rtt;
	p->over = rtt > TB_TARGET ? p->over + 1 : 0;
	p->marked += (p->limited ? 0.25 : 1) * (share - p->marked);
	if (!p->over && !share) {
		tb_raise(p, link, now);
		return;
	}
	if (p->over >= TB_LONG && rises)
		lower = rate * (1 - 0.8 * (1 - TB_TARGET / (double)rtt));
	if (share && rate * (1 - p->marked / 2) < lower) {
		lower = rate * (1 - p->marked / 2);
		p->slowed++;
	}
	if (lower < rate)
		tb_set_rate(p, link, lower, now);
}

/* -- submissions ------------------------------------------------------------------------------------------------ */

/*
 * o: whose rows they are, NULL: of no op in flight. runs: destination, address and packets of each. owned: memory that goes
 * with the packets, in any case, or NULL. 0, or ENOMEM.
 */
TB_EXPORT int tb_submit(struct tb_line *l, __u32 queue, struct tb_own_op *o, __u32 label,
			__s64 until, __u32 stride, __u32 largest, const __u64 *runs, __u32 count,
			void *owned)
{
	struct tb_item *item = calloc(1, sizeof(*item) + count * sizeof(*item->flows));
	__u32 i, k, channel;

	if (!item) {
		free(owned);
		return ENOMEM;
	}
	item->owned = owned;
	item->op = o;
	item->label = label;
	item->until = until;
	item->queue = queue;
	item->stride = stride;
	item->largest = largest;
	item->count = count;
	item->whole = queue != TB_AGAIN && !(o && o->switched);
	for (i = 0; i < count; i++, runs += 3) {
		item->flows[i] =
			(struct tb_flow){ .to = runs[0], .base = runs[1], .total = runs[2] };
		item->left += runs[2];
		channel = l->targets[runs[0]].channel;
		for (k = 0; k < item->channels && item->channel[k] != channel; k++)
			;
		if (k == item->channels)
			item->channel[item->channels++] = channel;
	}
	l->s->left += item->left;
	*l->tail[queue] = item;
	l->tail[queue] = &item->after;
	return 0;
}

/* The same of copies, which leave before all others and are let go of once they have. */
void tb_submit_copies(struct tb_line *l, __u32 label, __u32 to, __s64 until, __u32 stride,
		      __u32 largest, __u8 *copies, __u32 count)
{
	__u64 run[] = { to, (__u64)copies, count };

	l->lossy = l->s->now + TB_LOSSY;
	if (count)
		tb_submit(l, TB_AGAIN, NULL, label, until, stride, largest, run, 1, copies);
	else
		free(copies);
}

/* The results of an op have left. */
void tb_results_left(const struct tb_line *l, struct tb_own_op *o, __s64 now)
{
	tb_half_of(o, 0)->phase = TB_PHASE_DONE;
	o->published_at = now;
	o->stirred |= tb_half_of(o, 1)->phase != TB_PHASE_OPEN; /* its place is free by that */
	if (l->s->voice)
		tb_publish((struct tb_voice *)l->s->voice);
}

/* The own rows of an op have left, or will not; the op may be over. */
static void tb_rows_left(const struct tb_line *l, const struct tb_item *item)
{
	struct tb_voice *v = (struct tb_voice *)l->s->voice;
	struct tb_own_marks *m = v ? (struct tb_own_marks *)v->marks : NULL;
	struct tb_own_op *o = item->op;

	if (m && tb_distance(item->label, m->contributed) > 0)
		m->contributed = item->label;
	if (!o)
		return;
	o->left = 1;
	o->sent_at = l->s->now;
	o->stirred |= o->switched || tb_half_of(o, 1)->phase != TB_PHASE_OPEN;
	if (o->switched && item->count)
		tb_tell_all(v, o);
}

/* The rest of a flow is not sent; returns the packets that have not left, as those have that were to leave once more. */
static __u32 tb_drop_flow(struct tb_line *l, struct tb_item *item, struct tb_flow *f, __u32 count)
{
	const struct tb_target *t = &l->targets[f->to];
	__u32 lost = item->repeats ? 0 : count, r, w;
	__u64 bits;

	f->next += count;
	item->left -= count;
	item->whole = 0;
	l->s->left -= count;
	if (f->to >= l->s->ranks)
		l->targets[f->to].lost += lost;
	TB_EACH_RANK(r, t->ranks)
	l->targets[r].lost += lost;
	return lost;
}

static __u64 tb_drop_item(struct tb_line *l, struct tb_item *item)
{
	struct tb_flow *f;
	__u64 dropped = 0;

	for (f = item->flows; f < item->flows + item->count; f++)
		dropped += tb_drop_flow(l, item, f, f->total - f->next);
	return dropped;
}

/* An owner that has published an op takes no rows for it any more, and a rank that has left takes no results. */
static int tb_takes(const struct tb_line *l, const struct tb_item *item, __u32 rank)
{
	const struct tb_terms *t = tb_terms_of(l);
	const struct tb_peer_state *state;

	if (!t || rank >= t->ranks || item->queue == TB_AGAIN)
		return 1;
	if (item->queue == TB_RESULTS)
		return !tb_has(t->gone, rank);
	state = (const struct tb_peer_state *)t->states + rank;
	return state->cookie != t->cookie ||
	       tb_distance(TB_READ_ONCE(state->published), item->label) < 0;
}

static __u64 tb_drop_unwanted(struct tb_line *l, struct tb_item *item)
{
	struct tb_flow *f;
	__u64 dropped = 0, bits;
	__u32 r, w, takers;

	for (f = item->flows; f < item->flows + item->count; f++) {
		takers = 0;
		TB_EACH_RANK(r, l->targets[f->to].ranks)
		takers += tb_takes(l, item, r);
		if (!takers)
			dropped += tb_drop_flow(l, item, f, f->total - f->next);
	}
	return dropped;
}

/* port had no room, or the device behind it. */
static void tb_full(struct tb_line *l, __u32 port, __u32 error)
{
	struct tb_sending *s = l->s;
	struct tb_link *link = l->link;
	__s64 leaves;
	__u64 size = 0;
	__u32 p, c, to;

	s->waits++;
	if (error !=
	    EAGAIN) { /* a full device is full for the other sockets of the channel as well */
		for (c = 0; c < s->channels; c++)
			if (port - s->first[c] < s->ports[c])
				s->blocked |= (~0ULL >> (64 - s->ports[c])) << s->first[c];
		tb_pump_at(s, s->now + TB_RETRY);
		return;
	}
	s->blocked |= 1ULL << port;
	s->full |= 1ULL << port;
	for (p = 0; p < s->sockets; p++) {
		__u64 cost = 1;

		if (!(s->full >> p & 1))
			continue;
		for (to = s->ranks; to < s->ranks + TB_SHARED_MOST; to++) {
			c = l->targets[to].channel;
			if (l->targets[to].cost && p - s->first[c] < s->ports[c])
				cost = l->targets[to].cost;
		}
		size += s->rooms[p] * cost;
	}
	leaves = s->now + (__s64)(size * TB_SECOND / link->speed); /* so much waits at least */
	if (leaves > link->leaves)
		link->leaves = leaves;
	tb_pump_at(s, s->now + TB_ROOM);
}

/* -- single packets ---------------------------------------------------------------------------------------------- */

/* A single packet waits for the next pump; 0: there is no memory, and it is lost. */
TB_EXPORT int tb_say(struct tb_line *l, __u32 to, const void *packet, __u32 length)
{
	if (!tb_put_word(&l->words, to, packet, length)) {
		l->targets[to].lost++;
		return 0;
	}
	if (++l->s->words > TB_WORDS_MOST) {
		l->targets[l->words.first->rank].lost++;
		tb_forget_word(l);
	}
	return 1;
}

/* A message for a rank over the first socket. */
static void tb_fill_single(struct tb_line *l, __u32 n, __u32 to, void *packet, __u32 length)
{
	struct msghdr *message = &l->messages[n].msg_hdr;

	l->pieces[n] = (struct iovec){ packet, length };
	message->msg_name = l->targets[to].name;
	message->msg_namelen = sizeof(l->targets->name);
	message->msg_control = 0;
	message->msg_controllen = 0;
	l->bursts[n].flow = to;
}

/* Messages for the oldest words; returns how many. */
static int tb_fill_words(struct tb_line *l)
{
	struct tb_sending *s = l->s;
	struct tb_word *w = l->words.first;
	__u32 n;

	if (!w || s->blocked & 1)
		return 0;
	for (n = 0; w && n < TB_MESSAGES; w = w->after)
		tb_fill_single(l, n++, w->rank, w->packet, w->length);
	s->port = 0;
	l->single = TB_SINGLE_WORDS;
	return s->count = n;
}

/* -- probes ----------------------------------------------------------------------------------------------------- */

/*
 * One probe per rank is on the way at a time: it measures the queue behind the rates so far. Who turns it round stores how
 * long it took, and what share of our packets came there with CE.
 */
static void tb_want_probe(struct tb_line *l, __u32 rank)
{
	const struct tb_path *p = &l->paths[rank];
	struct tb_sending *s = l->s;

	if (!s->voice || tb_has(l->due, rank))
		return;
	if (p->sent && p->bytes < TB_EVERY && !p->limited)
		return;
	if (p->awaited && s->now - p->sent < TB_LOST + s->ways * p->queued)
		return; /* what waits in own queues is not lost yet */
	l->due[rank >> 6] |= 1ULL << (rank & 63);
	s->due++;
}

/* Messages for the probes that are due; returns how many. */
static int tb_fill_probes(struct tb_line *l)
{
	struct tb_sending *s = l->s;
	__u64 bits;
	__u32 r, w, n = 0;

	if (!s->due || s->blocked & 1)
		return 0;
	TB_EACH_RANK(r, l->due)
	{
		struct tb_header *head;

		if (n == TB_MESSAGES)
			continue;
		head = (void *)l->probes[n];
		memset(head, 0, TB_PROBE);
		*head = tb_begin_word((const struct tb_voice *)s->voice, TB_TYPE_PROBE, 0, 0);
		head->owner = r;
		tb_fill_single(l, n++, r, head, TB_PROBE);
	}
	s->port = 0;
	l->single = TB_SINGLE_PROBES;
	return s->count = n;
}

/* After TB_SEND_PROBE, just before the call: the time travels in the packet. */
TB_EXPORT void tb_time_probes(struct tb_line *l, __s64 now)
{
	const struct tb_peer_state *states = (const void *)tb_terms_of(l)->states;
	const struct tb_voice *v = (const struct tb_voice *)l->s->voice;
	struct tb_header *head;
	__u32 i;

	l->probed = now;
	for (i = 0; i < l->s->count; i++) {
		head = (void *)l->probes[i];
		*(__be64 *)(head + 1) = tb_be64(now);
		tb_prove_packet(head, head + 1, TB_ROW_STEP, (const void *)v->key);
		l->paths[head->owner].before = TB_READ_ONCE(states[head->owner].rtt_ns);
	}
}

/* A probe is on the way. The echo after one that is given up tells the marks of its packets, too. */
static void tb_probe_left(struct tb_line *l, __u32 rank)
{
	struct tb_path *p = &l->paths[rank];
	struct tb_sending *s = l->s;

	l->due[rank >> 6] &= ~(1ULL << (rank & 63));
	s->due--;
	s->probes++;
	if (p->awaited && ++p->missed >= TB_SILENT) /* there is nothing to go by */
		tb_raise(p, l->link, s->now);
	p->count = p->packets + (p->awaited ? p->count + 1 : 0);
	p->bytes = p->packets = 0;
	p->queued = tb_most(0, l->link->leaves - l->probed);
	p->sent = l->probed;
	p->awaited = 1;
}

/*
 * The first message, of so many packets, has not left; whether it never will: it waits for room, or leaves in single packets
 * where the path takes no bursts (transport/sender.py).
 */
static int tb_refused(struct tb_line *l, __u32 to, __u32 packets, __u32 error)
{
	struct tb_sending *s = l->s;
	int burst = packets > 1 && (error == EIO || error == EINVAL || error == EOPNOTSUPP);

	if (error == EAGAIN || error == ENOBUFS || error == ENOMEM) {
		l->targets[to].waits++;
		tb_full(l, s->port, error);
		return 0;
	}
	if (s->refused < TB_REFUSED_MOST) {
		s->to[s->refused] = to;
		s->errors[s->refused++] = burst ? -(__s32)error : (__s32)error;
	}
	l->targets[to].plain |= burst;
	return !burst;
}

static void tb_took_singles(struct tb_line *l, __u32 taken, __u32 error)
{
	__u32 i, r = l->bursts[0].flow;

	if (error && tb_refused(l, r, 1, error)) {
		l->targets[r].lost++;
		if (l->single == TB_SINGLE_PROBES)
			tb_probe_left(l, r);
		else
			tb_forget_word(l);
	} else if (error) {
		l->s->blocked |= 1;
	}
	for (i = 0; i < taken; i++) {
		r = l->bursts[i].flow;
		l->targets[r].packets++;
		l->targets[r].bytes += l->pieces[i].iov_len;
		l->targets[r].bursts++;
		if (l->single == TB_SINGLE_PROBES)
			tb_probe_left(l, r);
		else
			tb_forget_word(l);
	}
	l->single = 0;
}

/* Echoes since the last look. */
static void tb_collect(struct tb_line *l)
{
	const struct tb_terms *t = tb_terms_of(l);
	const struct tb_peer_state *states;
	struct tb_sending *s = l->s;
	__u32 r, w, told, marks, live;
	__u64 bits;
	__s64 rtt;

	if (!t)
		return;
	states = (const struct tb_peer_state *)t->states;
	live = tb_count(tb_set_of(t->live));
	l->link->peers = live ? live : l->link->peers;
	TB_EACH_RANK(r, s->peers)
	{
		struct tb_path *p = &l->paths[r];

		rtt = TB_READ_ONCE(states[r].rtt_ns);
		/* a longer one is that of a probe given up before */
		if (!p->awaited || rtt == p->before || !rtt || rtt > s->now - p->sent)
			continue;
		p->awaited = p->missed = 0;
		told = states[r].told;
		marks = p->told ? told - p->marks : 0;
		if (marks >> 31) /* a count that has fallen was begun anew */
			marks = 0;
		p->told = 1;
		p->marks = told;
		s->marked += marks;
		s->echoes++;
		tb_echoed(p, l->link, tb_most(1, rtt - s->ways * p->queued),
			  marks < p->count + 1 ? marks / (p->count + 1.0) : 1, s->now);
	}
}

static void tb_end_item(struct tb_line *l, int queue)
{
	struct tb_item *item = l->head[queue];

	l->head[queue] = item->after;
	if (!item->after)
		l->tail[queue] = &l->head[queue];
	if (queue == TB_AGAIN)
		l->s->copies += item->packets;
	if (queue == TB_RESULTS)
		l->s->results += item->packets;
	if (item->op && queue == TB_RESULTS)
		tb_results_left(l, item->op, l->s->now);
	if (queue == TB_CONTRIBUTIONS) {
		l->s->contributions += item->packets;
		tb_rows_left(l, item);
	}
	free(item->owned);
	free(item);
}

/* Whether last packets are to leave again of a submission of which all have left: in the next pump, behind what that has. */
static int tb_repeats(struct tb_line *l, struct tb_item *item)
{
	__u32 i;

	if (!item->whole || item->repeats || l->s->now >= l->lossy)
		return 0;
	item->repeats = 1;
	for (i = 0; i < item->count; i++)
		if (item->flows[i].total) {
			item->flows[i].next--;
			item->left++;
		}
	l->s->left += item->left;
	tb_pump_at(l->s, l->s->now);
	return item->left > 0;
}

/* Ends submissions at the head of their queues of which nothing is left. */
static void tb_end_items(struct tb_line *l)
{
	struct tb_item *item;
	int i;

	for (i = 0; i < TB_QUEUES; i++)
		while ((item = l->head[i]) && !item->left && !tb_repeats(l, item))
			tb_end_item(l, i);
}

TB_EXPORT __u64 tb_cancel(struct tb_line *l, __u32 label)
{
	struct tb_item *item;
	__u64 dropped = 0;
	int i;

	for (i = 0; i < TB_QUEUES; i++)
		for (item = l->head[i]; item; item = item->after) {
			if (item->label != label)
				continue;
			dropped += tb_drop_item(l, item);
			item->op = NULL;
		}
	tb_end_items(l);
	return dropped;
}

/* -- a pump ----------------------------------------------------------------------------------------------------- */

static int tb_append(struct tb_line *l, struct tb_item *item)
{
	struct tb_item **order;

	if (l->ordered == l->most) {
		order = realloc(l->order, 2 * (l->most + 8) * sizeof(*order));
		if (!order)
			return 0; /* the rest waits */
		l->order = order;
		l->most = 2 * (l->most + 8);
	}
	l->order[l->ordered++] = item;
	return 1;
}

/* Begins a pump at s->now: everything that waits, in the order in which it may leave. */
TB_EXPORT void tb_begin(struct tb_line *l)
{
	struct tb_item *results = l->head[TB_RESULTS], *contributions = l->head[TB_CONTRIBUTIONS];
	struct tb_item *item;

	/* Results go before contributions of later ops, and behind those of their own. */
	l->ordered = l->at = 0;
	l->opened = 0;
	l->budget = TB_BUDGET;
	l->behind = (tb_set){};
	tb_collect(l);
	l->s->again = 0;
	l->s->full = l->s->blocked = 0;
	for (item = l->head[TB_AGAIN]; item; item = item->after)
		tb_append(l, item);
	while (results || contributions) {
		if (!contributions ||
		    (results && tb_distance(results->label, contributions->label) < 0)) {
			tb_append(l, results);
			results = results->after;
		} else {
			tb_append(l, contributions);
			contributions = contributions->after;
		}
	}
}

/* A socket of a channel whose turn it is; -1: all are full. */
static int tb_port(struct tb_line *l, __u32 c)
{
	struct tb_sending *s = l->s;
	__u32 i, port;

	for (i = 0; i < s->ports[c]; i++) {
		port = s->first[c] + (s->turn[c] + i) % s->ports[c];
		if (!(s->blocked >> port & 1)) {
			s->port = port;
			return port;
		}
	}
	return -1;
}

/* Writes messages for the next bursts over a channel, at most so many; returns how many. Nothing counts as sent yet. */
static __u32 tb_fill(struct tb_line *l, struct tb_item *item, __u32 channel, __u32 most)
{
	struct tb_flow *f, *best, *end = item->flows + item->count;
	__u32 n, packets;

	l->control[2] = item->stride;
	for (f = item->flows; f < end; f++) {
		f->ahead = f->next;
		f->quota = l->targets[f->to].channel == channel ? f->allowed : 0;
	}
	for (n = 0; n < most; n++) {
		struct msghdr *message = &l->messages[n].msg_hdr;

		best = 0;
		for (f = item->flows; f < end; f++)
			if (f->quota && f->ahead < f->total && (!best || f->ahead < best->ahead))
				best = f;
		if (!best)
			break;
		packets = best->total - best->ahead < best->size ? best->total - best->ahead
								 : best->size;
		l->pieces[n].iov_base = (void *)(best->base + (__u64)best->ahead * item->stride);
		l->pieces[n].iov_len = (__u64)packets * item->stride;
		message->msg_name = l->targets[best->to].name;
		message->msg_namelen = sizeof(l->targets->name);
		message->msg_control = packets > 1 ? l->control : 0;
		message->msg_controllen = packets > 1 ? sizeof(l->control) : 0;
		l->bursts[n].flow = best - item->flows;
		l->bursts[n].packets = packets;
		best->ahead += packets;
		best->quota--;
	}
	return n;
}

static int tb_cost(const struct tb_line *l, const struct tb_item *item)
{
	__u32 cost = 1, i;

	for (i = 0; i < item->count; i++)
		if (l->targets[item->flows[i].to].cost > cost)
			cost = l->targets[item->flows[i].to].cost;
	return cost;
}

/* The next call for a submission: 1, and 0 where nothing of it may leave now. */
static int tb_next_of(struct tb_line *l, struct tb_item *item)
{
	struct tb_sending *s = l->s;
	int cost = tb_cost(l, item), alone = s->sockets == 1, most;
	__u32 c, i;

	for (i = 0; i < item->count; i++)
		alone |= item->flows[i].to >= s->ranks;
	while (item->left && l->budget > 0) {
		if (l->channel == item->channels) {
			if (!l->moved)
				return 0;
			l->moved = 0;
			l->channel = 0;
		}
		c = item->channel[l->channel++];
		if (tb_port(l, c) < 0)
			continue;
		for (i = 0; i < item->count; i++)
			if (l->targets[item->flows[i].to].channel == c)
				tb_allow(l, item, &item->flows[i]);
		most = alone && TB_MESSAGES / s->ports[c] > TB_TURN ? TB_MESSAGES / s->ports[c]
								    : TB_TURN;
		if (l->budget / cost < most)
			most = l->budget / cost > 0 ? l->budget / cost : 1;
		most = tb_link_bursts(l->link, item, cost, s->now, most);
		if (!most) {
			s->held++;
			tb_pump_at(s, l->link->opens);
			return 0;
		}
		s->count = tb_fill(l, item, c, most);
		if (!s->count)
			continue;
		s->turn[c] = (s->port - s->first[c] + 1) % s->ports[c];
		return 1;
	}
	return 0;
}

TB_EXPORT int tb_next(struct tb_line *l)
{
	struct tb_sending *s = l->s;
	struct tb_item *item;
	struct tb_flow *f;

	l->single = 0;
	if (tb_fill_words(l))
		return TB_SEND_CALL;
	if (tb_fill_probes(l))
		return TB_SEND_PROBE;
	for (; l->at < l->ordered; l->at++, l->opened = 0) {
		item = l->order[l->at];
		if (!l->opened) {
			s->stale += s->now > item->until ? tb_drop_item(l, item)
							 : tb_drop_unwanted(l, item);
			l->opened = l->moved = 1;
			l->channel = item->channels;
		}
		if (tb_next_of(l, item))
			return TB_SEND_CALL;
		if (!item->left)
			continue;
		if (l->budget <= 0) {
			tb_pump_at(s, s->now);
			break;
		}
		for (f = item->flows; f < item->flows + item->count; f++)
			if (f->next < f->total)
				l->behind |= tb_set_of(l->targets[f->to].ranks);
		if (!tb_count(tb_set_of(s->peers) & ~l->behind))
			break;
	}
	l->ordered = 0;
	return TB_SEND_DONE;
}

/* The first so many messages have left; error: why the first was refused where none has. */
TB_EXPORT void tb_took(struct tb_line *l, __u32 taken, __u32 error)
{
	struct tb_sending *s = l->s;
	struct tb_item *item;
	struct tb_flow *f;
	__u64 copies = 0, bits;
	__u32 i, r, w;
	int cost;

	if (l->single) {
		tb_took_singles(l, taken, error);
		return;
	}
	item = l->order[l->at];
	f = &item->flows[l->bursts[0].flow];
	cost = tb_cost(l, item);
	l->moved = 1;
	l->budget -= cost * (taken ? taken : 1);
	if (error && tb_refused(l, f->to, l->bursts[0].packets, error))
		tb_drop_flow(l, item, f, l->bursts[0].packets);
	for (i = 0; i < taken; i++) {
		__u32 packets = l->bursts[i].packets;
		__u64 size = (__u64)packets * item->stride;
		struct tb_target *t;

		f = &item->flows[l->bursts[i].flow];
		t = &l->targets[f->to];
		f->next += packets;
		item->left -= packets;
		s->left -= packets;
		copies += (__u64)packets * (t->cost ? t->cost : 1);
		t->bursts++;
		if (f->to >= s->ranks) {
			t->packets += packets;
			t->bytes += size;
		}
		TB_EACH_RANK(r, t->ranks)
		{
			struct tb_path *path = &l->paths[r];

			l->targets[r].packets += packets;
			l->targets[r].bytes += size;
			item->packets += item->repeats ? 0 : packets;
			path->packets += packets;
			path->bytes += size;
			tb_want_probe(l, r);
			if (path->limited)
				tb_bucket_spend(&path->spent, &path->held, l->link->quantum,
						l->link->quantum, tb_rate(l, r, l->link->speed),
						size, s->now);
		}
	}
	if (taken) {
		s->bytes += copies * item->stride;
		tb_link_left(l->link, taken, copies, item->stride, s->now);
	}
}

static void tb_pump_on(struct tb_line *l)
{
	struct tb_sending *s = l->s;
	int what, taken;

	for (;;) {
		what = tb_next(l);
		if (what == TB_SEND_PROBE)
			tb_time_probes(l, tb_clock());
		else if (what != TB_SEND_CALL)
			return;
		taken = sendmmsg(s->fds[s->port], l->messages, s->count, MSG_DONTWAIT);
		tb_took(l, taken < 0 ? 0 : taken, taken < 0 ? errno : 0);
	}
}

/* Follows how much leaves from when sockets are full until they are not, or for long enough: what the link takes. */
static void tb_measure(struct tb_line *l, __s64 now)
{
	struct tb_sending *s = l->s;
	struct tb_link *link = l->link;
	double rate;

	if (l->crowded && (!s->blocked || now - l->crowded >= TB_MEASURED)) {
		if (s->bytes - l->before >= TB_MEASURED_BYTES) {
			rate = (double)(s->bytes - l->before) * 1e9 /
			       (double)tb_most(1, now - l->crowded);
			link->drained += link->drained ? (rate - link->drained) / 4 : rate;
			link->speed = link->floor =
				tb_lower(link->known ? link->known : link->drained, link->drained);
		}
		l->crowded = 0;
	}
	if (s->blocked && !l->crowded) {
		l->crowded = now;
		l->before = s->bytes;
	}
}

TB_EXPORT void tb_end(struct tb_line *l, __s64 now)
{
	struct tb_sending *s = l->s;

	tb_end_items(l);
	tb_measure(l, now);
	/* nothing waits: another socket of a channel has taken what full ones had no room for */
	if (!(s->left || s->due || s->words))
		s->again = s->full = 0;
}

/* A whole pump. */
void tb_pump_alone(struct tb_line *l, __s64 now)
{
	l->s->now = now;
	tb_begin(l);
	tb_pump_on(l);
	tb_end(l, tb_clock());
}

/* The same for Python; single: of single packets alone. */
TB_EXPORT void tb_pump(struct tb_line *l, int single, __s64 now)
{
	if (single)
		tb_pump_on(l);
	else
		tb_pump_alone(l, now);
	tb_away((struct tb_sleep *)l->s->sleep, TB_AWAY_MIDST, 0);
}
