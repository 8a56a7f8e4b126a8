// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What threads of Python do without its lock: sleep and look out, and repeat what a thread that has no lock cannot say. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define TB_SECOND 1000000000LL
/* How long a look that is due by other events may wait after them: as a rule a half is complete meanwhile. */
#define TB_SOON 2000000LL
/* Taken at once, and bits in front of the length of a record of the kernel's ring (Documentation/bpf/ringbuf.rst). */
#define TB_EVENTS 64
#define TB_BUSY (1U << 31)
#define TB_DISCARD (1U << 30)
#define TB_NAME_BYTES 32
/* The bit of a descriptor in what is ready; those behind share the last one. */
#define TB_LAST 62

/* Waits for descriptors, for so many ns: a bitmap of those that are ready, or -errno; woken: when that was. */
static __s64 tb_wait(struct pollfd *polled, __u32 count, __s64 time, __s64 *woken)
{
	struct timespec most = { time / TB_SECOND, time % TB_SECOND };
	int found = ppoll(polled, count, &most, NULL);
	__s64 ready = found < 0 ? -errno : 0;
	__u32 i;

	*woken = tb_clock();
	for (i = 0; found > 0 && i < count; i++)
		if (polled[i].revents)
			ready |= 1LL << tb_least(i, TB_LAST);
	return ready;
}

/* Takes the oldest events, at most so many; how many. fd: an eventfd of tables, which is clear afterwards; -1: none. */
TB_EXPORT int tb_take(const struct tb_source *s, int fd, struct tb_event *out, int most)
{
	__u64 *consumed = (__u64 *)s->consumed, at = *consumed, end;
	int taken = 0;

	if (s->tables)
		tb_clear(fd); /* before: what comes meanwhile is told anew */
	end = __atomic_load_n((__u64 *)s->produced, __ATOMIC_ACQUIRE);
	while (at < end && taken < most) {
		const __u32 *head = (const __u32 *)(s->data + (at & s->mask));
		__u32 length = __atomic_load_n(head, __ATOMIC_ACQUIRE);

		if (length & TB_BUSY)
			break;
		if (!(length & TB_DISCARD))
			memcpy(&out[taken++], head + 2, sizeof(*out));
		at += ((length & ~TB_DISCARD) + 8 + 7) & ~7U;
	}
	__atomic_store_n(consumed, at, __ATOMIC_RELEASE);
	return taken;
}

/* Notes which ops have begun elsewhere. Other events only wake up: maps say what has happened. */
TB_EXPORT void tb_take_opened(struct tb_sleep *s)
{
	const struct tb_source *source = (const struct tb_source *)s->source;
	int fd = ((const struct pollfd *)s->polled)[1].fd, count, i;
	struct tb_event events[TB_EVENTS];

	do {
		count = tb_take(source, fd, events, TB_EVENTS);
		for (i = 0; i < count; i++)
			if (events[i].kind == TB_EVENT_OPENED) /* the newest is among them */
				s->opened[s->count < TB_OPENED_MOST ? s->count++
								    : TB_OPENED_MOST - 1] =
					events[i].op;
	} while (count == TB_EVENTS);
}

/* When to wake up first, before the next turn. */
TB_EXPORT __s64 tb_first(const struct tb_sleep *s, __s64 now)
{
	const struct tb_sending *sending = (const struct tb_sending *)s->sending;
	__s64 first = tb_earlier(((const struct tb_terms *)s->terms)->listen, sending->again);

	first = tb_earlier(tb_earlier(first, ((const struct tb_voice *)s->voice)->again),
			   tb_earlier(s->soon, s->end));
	return tb_least(first, now + s->longest);
}

/* Sends what a rate or a full socket has kept back; what Python has to do of it: all of it, if it answers first. */
__u32 tb_send_on(struct tb_sleep *s, int answers, __s64 now)
{
	const struct tb_sending *sending = (const struct tb_sending *)s->sending;

	if (!(sending->full || (sending->again && sending->again <= now)))
		return 0;
	if (!s->direct || answers)
		return TB_WOKEN_SEND;
	tb_pump_alone((struct tb_line *)s->line, now);
	return 0;
}

/* Looks at all ops, as a turn does: whether one is due, and by what. */
static int tb_decide(struct tb_sleep *s, __s64 now)
{
	struct tb_terms *t = (struct tb_terms *)s->terms;
	__u32 i;

	if (t->suspects || t->holds)
		return 1;
	for (i = 0; i < s->count; i++)
		if (!tb_own_of(t, s->opened[i])) /* it is to be foreseen */
			return 1;
	tb_begin_turn(t, 0, 0);
	t->alone = t->first && !((const struct tb_own_op *)t->first)->after;
	s->found = tb_next_op(t, now);
	s->label = t->label;
	if (s->found)
		return 1;
	s->count = 0;
	s->soon = t->due;
	t->listen = 1;
	return 0;
}

/* Takes what was launched, and codes and sends it; what only Python can do first. */
static __u32 tb_launch_handed(struct tb_sleep *s, __s64 now)
{
	__u32 count = 0, found;

	tb_take_handed((struct tb_terms *)s->terms);
	found = tb_launch_all((const struct tb_owner *)s->owner, s, now, &count);
	s->unsent = found != 0;
	s->soon = 1;
	return found;
}

/*
 * The thread is awake, and found s->ready: what only Python can do. A turn for each wake-up would take most of a core: to
 * answer, to look out for silences and to send is due once or twice a millisecond.
 */
TB_EXPORT __u32 tb_look_out(struct tb_sleep *s, __s64 now)
{
	struct tb_terms *t = (struct tb_terms *)s->terms;
	struct tb_voice *v = (struct tb_voice *)s->voice;
	__s64 owed = v->again;
	struct tb_own_op *complete;
	int left, poked = 0;
	__u32 found = 0;

	if (s->ready & TB_READY_HANDED)
		poked = tb_clear(((const struct pollfd *)s->polled)[0].fd) >= TB_POKED;
	if (s->ready & TB_READY_HANDED || s->unsent) {
		found = tb_launch_handed(s, now);
		if (found)
			return found | poked * TB_WOKEN_TURN;
		now = tb_clock();
	}
	if (s->ready & TB_READY_EVENTS) {
		tb_take_opened(s);
		left = tb_close_alone((const struct tb_owner *)s->owner, now);
		complete = tb_complete(t);
		if (left || complete) {
			found = tb_send_on(s, (s->ready & TB_READY_CONTROLS) != 0, now);
			if (!left && !found) /* else others wait for a turn */
				found = tb_finish_alone((const struct tb_owner *)s->owner, complete,
							s, now);
			return found | TB_WOKEN_TURN;
		}
		tb_hear(t);
		s->soon = tb_earlier(s->soon, now + TB_SOON);
	}
	if (now >= s->end || now - s->awake > s->stopped || poked ||
	    (s->soon && s->soon <= now && tb_decide(s, now)))
		return TB_WOKEN_TURN;
	s->awake = now;
	if (s->ready & TB_READY_CONTROLS || (owed && owed <= now))
		found = tb_serve(v, now); /* first: what is lacking may have been said */
	if (found == TB_WOKEN_TURN && !tb_decide(s, now))
		found = 0;
	if (!found && t->listen && t->listen <= now)
		tb_ask_others(v, now);
	found |= tb_send_on(s, 0, now);
	return found ? found : tb_stirred(t) ? TB_WOKEN_TURN : 0;
}

/* Room in which sockets ends a wait: of those that were full. */
static void tb_want_room(struct tb_sleep *s)
{
	const struct tb_sending *sending = (const struct tb_sending *)s->sending;
	struct pollfd *polled = (struct pollfd *)s->polled + TB_SOCKETS_AT;
	__u32 i;

	for (i = 0; i + TB_SOCKETS_AT < s->fds; i++)
		polled[i].fd = sending->full >> i & 1 ? sending->fds[i] : -1;
}

/* Looks at what is readable. */
TB_EXPORT __s64 tb_peek(struct tb_sleep *s)
{
	__s64 ready = tb_wait((struct pollfd *)s->polled, TB_SOCKETS_AT, 0, &s->woken);

	s->ready = ready < 0 ? 0 : ready;
	return ready;
}

/*
 * A thread that could run and does not waits for a core. That is neither a slow network nor a stop: one that was stopped is
 * on no run queue, and its timers are late all the same. A hypervisor's share is in these alone. The kernel says ns on a
 * core, and on a run queue (Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat"), or zeros.
 */
TB_EXPORT void tb_waited(struct tb_overtime *v, int schedstat)
{
	long long ran, waited;
	char text[64] = {};

	if (schedstat <= 0 || pread(schedstat, text, sizeof(text) - 1, 0) < 0 ||
	    sscanf(text, "%lld %lld", &ran, &waited) != 2 || !ran)
		return;
	v->latest = tb_most(v->latest, waited - v->lacked);
	v->lacked = waited;
}

/* What only Python can do (TB_WOKEN_*), or -errno. */
TB_EXPORT __s64 tb_sleep(struct tb_sleep *s, __s64 now)
{
	struct tb_overtime *v = (struct tb_overtime *)((struct tb_terms *)s->terms)->overtime;
	__s64 ready, took;
	__u32 found;

	for (;; now = tb_clock()) {
		s->asked = tb_most(tb_first(s, now), now);
		tb_want_room(s);
		ready = tb_wait((struct pollfd *)s->polled, s->fds, s->asked - now, &s->woken);
		if (ready < 0 && ready != -EINTR) {
			tb_away(s, TB_AWAY_MIDST, 0);
			return ready;
		}
		s->ready = ready < 0 ? 0 : ready;
		found = tb_look_out(s, s->woken);
		if (found) {
			tb_waited(v, s->schedstat);
			/* what was done meanwhile does not count as a wait for the lock */
			took = tb_clock() - s->woken;
			s->woken += took;
			s->asked += took;
			tb_away(s, TB_AWAY_BETWEEN, found);
			return found;
		}
		if (!ready)
			tb_woke(v, s->woken - s->asked);
	}
}

TB_EXPORT __u32 tb_meanwhile(struct tb_sleep *s)
{
	__s64 now = tb_clock(), woken = s->woken;
	__u64 ready = s->ready;
	__u32 found = 0;

	if (now - s->awake > s->stopped)
		return TB_WOKEN_TURN;
	s->awake = tb_most(s->awake, now);
	if (now - s->served < TB_SERVE_AFTER)
		return 0;
	s->served = now;
	tb_peek(s);
	if (s->ready & TB_READY_CONTROLS)
		found = tb_serve((struct tb_voice *)s->voice, now);
	s->woken = woken; /* what was found when the thread woke up is still to be seen to */
	s->ready |= ready;
	return found | tb_send_on(s, 0, now);
}

/*
 * Sends a packet of size bytes to each name (struct sockaddr, 32 bytes) whenever said (ns) is older than every, until
 * stop_fd is readable. Counts in sent what left. Packets may be written meanwhile: a torn one fails its check.
 */
TB_EXPORT void tb_repeat(int fd, int stop_fd, __s64 every, const __s64 *said, const __u8 *packets,
			 __u32 size, const __u8 *names, __u32 count, __s64 *sent)
{
	struct pollfd stop = { stop_fd, POLLIN, 0 };

	while (poll(&stop, 1, every / 1000000) <= 0) {
		if (tb_clock() - *(const volatile __s64 *)said <= every)
			continue;
		for (__u32 i = 0; i < count; i++) {
			const void *name = names + i * TB_NAME_BYTES;

			sent[i] += sendto(fd, packets + i * size, size, MSG_DONTWAIT, name,
					  TB_NAME_BYTES) > 0;
		}
	}
}
