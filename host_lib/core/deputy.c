// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who stands in for the transport thread while that waits for Python's interpreter lock, which a trainer may keep.
 *
 * That thread says by tb_away that it is about to wait, and by tb_back that it goes on. A deputy that finds it away for a
 * millisecond does what needs no interpreter: between two turns it seals, publishes, asks, answers and sends, and in the
 * midst of one it answers and sends. Only one of the two works at a time.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

struct tb_deputy {
	struct tb_sleep *s;
	pthread_t thread;
	pthread_mutex_t turn; /* held by who works */
	int timer; /* the transport thread has been away for long */
	int kick; /* an eventfd: it is back */
	int away; /* TB_AWAY_*; 0: it is here */
	int waits; /* the deputy waits for something to do */
	int stop;
	__u32 found; /* what only Python can do */
};

static void tb_set_timer(const struct tb_deputy *d, __s64 after)
{
	struct itimerspec when = { .it_value.tv_nsec = after };

	timerfd_settime(d->timer, 0, &when, NULL);
}

void tb_away(struct tb_sleep *s, int how, __u32 found)
{
	struct tb_deputy *d = s ? (struct tb_deputy *)s->deputy : NULL;

	if (!d)
		return;
	d->away = how;
	d->found = found;
	tb_set_timer(d, TB_SERVE_AFTER);
	pthread_mutex_unlock(&d->turn);
}

/* It has got the interpreter, and what waits for it, with what was found meanwhile. */
TB_EXPORT __u32 tb_back(struct tb_sleep *s)
{
	struct tb_deputy *d = s ? (struct tb_deputy *)s->deputy : NULL;

	if (!d)
		return 0;
	pthread_mutex_lock(&d->turn);
	d->away = 0;
	tb_set_timer(d, 0);
	if (d->waits)
		eventfd_write(d->kick, 1);
	return d->found;
}

/* What to wait for, with the kick last; and when something is due by the clock. */
static __u32 tb_awaited(const struct tb_deputy *d, struct pollfd *polled, __s64 *first)
{
	const struct tb_sleep *s = d->s;
	const struct tb_sending *sending = (const struct tb_sending *)s->sending;
	const struct tb_terms *t = (const struct tb_terms *)s->terms;
	__u32 i;

	*first = ((const struct tb_voice *)s->voice)->again;
	if (d->away == TB_AWAY_BETWEEN)
		*first = tb_earlier(*first, t->listen);
	if (s->direct)
		*first = tb_earlier(*first, sending->again);
	for (i = 0; i < s->fds; i++)
		polled[i] = ((const struct pollfd *)s->polled)[i];
	polled[0].fd = -1; /* a turn is due anyway */
	if (d->away != TB_AWAY_BETWEEN)
		polled[1].fd = -1;
	for (i = TB_SOCKETS_AT; i < s->fds; i++)
		polled[i].fd = s->direct && sending->full >> (i - TB_SOCKETS_AT) & 1
				       ? sending->fds[i - TB_SOCKETS_AT]
				       : -1;
	polled[i] = (struct pollfd){ .fd = d->kick, .events = POLLIN };
	return s->fds + 1;
}

/* Waits until there is something to do, or the transport thread is back, and does it. */
static void tb_relieve(struct tb_deputy *d)
{
	struct pollfd polled[TB_SOCKETS_AT + sizeof(((struct tb_sending *)0)->fds) / 4 + 1];
	struct tb_sleep *s = d->s;
	struct tb_terms *t = (struct tb_terms *)s->terms;
	struct tb_voice *v = (struct tb_voice *)s->voice;
	__s64 first, now = tb_clock(), time;
	__u32 count = tb_awaited(d, polled, &first), found = 0;
	struct timespec most;

	time = tb_most(0, tb_least(first ? first - now : s->longest, s->longest));
	most = (struct timespec){ time / 1000000000, time % 1000000000 };
	d->waits = 1;
	pthread_mutex_unlock(&d->turn);
	if (ppoll(polled, count, &most, NULL) < 0)
		count = 0;
	pthread_mutex_lock(&d->turn);
	d->waits = 0;
	if (!count || polled[count - 1].revents)
		tb_clear(d->kick);
	if (!count || !d->away)
		return;
	now = tb_clock();
	/* longer ago: all threads were stopped, and a turn is to notice */
	if (now - s->awake <= s->stopped)
		s->awake = now;
	if (d->away == TB_AWAY_BETWEEN && polled[1].revents) {
		tb_take_opened(s);
		tb_close_alone((const struct tb_owner *)s->owner, now);
		tb_hear(t);
		d->found |= TB_WOKEN_TURN;
	}
	first = v->again;
	if (polled[2].revents || (first && first <= now))
		found = tb_serve(v, now);
	if (d->away == TB_AWAY_BETWEEN && t->listen && t->listen <= now)
		tb_ask_others(v, now);
	if (s->direct)
		found |= tb_send_on(s, 0, now);
	if (d->away == TB_AWAY_MIDST) /* who pumps asks for nothing else */
		s->due |= found & (TB_WOKEN_TURN | TB_WOKEN_SERVE);
	d->found |= found;
}

static void *tb_stand_in(void *given)
{
	struct tb_deputy *d = given;
	__u64 times;

	while (read(d->timer, &times, sizeof(times)) > 0 || errno == EINTR) {
		pthread_mutex_lock(&d->turn);
		while (d->away && !d->stop)
			tb_relieve(d);
		pthread_mutex_unlock(&d->turn);
		if (d->stop)
			break;
	}
	return NULL;
}

static void tb_free(struct tb_deputy *d)
{
	close(d->timer);
	close(d->kick);
	free(d);
}

/* 0, or an errno. */
TB_EXPORT int tb_appoint(struct tb_sleep *s)
{
	struct tb_deputy *d = calloc(1, sizeof(*d));
	int error;

	if (!d)
		return ENOMEM;
	d->s = s;
	d->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
	d->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	pthread_mutex_init(&d->turn, NULL);
	pthread_mutex_lock(&d->turn);
	error = d->timer < 0 || d->kick < 0 ? errno
					    : pthread_create(&d->thread, NULL, tb_stand_in, d);
	if (error) {
		tb_free(d);
		return error;
	}
	s->deputy = (__u64)d;
	s->schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
	return 0;
}

TB_EXPORT void tb_dismiss(struct tb_sleep *s)
{
	struct tb_deputy *d = (struct tb_deputy *)s->deputy;

	if (!d)
		return;
	s->deputy = 0;
	close(s->schedstat);
	d->stop = 1;
	tb_set_timer(d, 1);
	pthread_mutex_unlock(&d->turn);
	pthread_join(d->thread, NULL);
	tb_free(d);
}
