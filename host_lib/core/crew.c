// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Passes over many groups, in pieces, and threads that share them with the one that runs them. None of them needs the
 * interpreter. One that has not begun when no piece is left is not waited for.
 */
#include "core.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

struct tb_member {
	struct tb_crew *crew;
	pthread_t thread;
	__s64 memory; /* words of what it works in */
	__u32 number;
};

struct tb_crew {
	pthread_mutex_t lock;
	pthread_cond_t begun, ended;
	struct tb_work *work; /* NULL: none is shared */
	__u64 round; /* how many were */
	__u32 busy; /* members at work */
	__u32 count;
	int stop;
	struct tb_member members[];
};

/* Takes pieces until none is left, or, with the transport thread's s, something cannot wait. */
static __u32 tb_take_pieces(struct tb_work *w, __s64 memory, struct tb_sleep *s)
{
	tb_code *pass = (tb_code *)w->code;
	__u32 found = 0;

	while (!found && !__atomic_load_n(&w->failed, __ATOMIC_RELAXED)) {
		__s64 low = __atomic_fetch_add(&w->next, w->piece, __ATOMIC_RELAXED), result = 0;
		void *error;

		if (low >= w->end)
			break;
		if (pass(&result, &error, w->call, low, tb_least(low + w->piece, w->end), memory) ||
		    result < 0)
			__atomic_store_n(&w->failed, 1, __ATOMIC_RELAXED);
		__atomic_fetch_add(&w->sum, result, __ATOMIC_RELAXED);
		found = s ? tb_meanwhile(s) : 0;
	}
	return found;
}

static void *tb_serve_crew(void *given)
{
	struct tb_member *m = given;
	struct tb_crew *c = m->crew;
	struct tb_work *work;
	__u64 seen = 0;

	pthread_mutex_lock(&c->lock);
	while (!c->stop) {
		work = c->round != seen ? c->work : NULL;
		seen = c->round;
		if (!work || m->number >= work->members) {
			pthread_cond_wait(&c->begun, &c->lock);
			continue;
		}
		c->busy++;
		pthread_mutex_unlock(&c->lock);
		tb_take_pieces(work, m->memory, NULL);
		pthread_mutex_lock(&c->lock);
		if (!--c->busy)
			pthread_cond_signal(&c->ended);
	}
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

static void tb_share_work(struct tb_crew *c, struct tb_work *w)
{
	pthread_mutex_lock(&c->lock);
	if (c->work != w) { /* else it goes on */
		c->work = w;
		c->round++;
		pthread_cond_broadcast(&c->begun);
	}
	pthread_mutex_unlock(&c->lock);
}

/* No piece is left: when this returns, none is at work either. */
static void tb_end_sharing(struct tb_crew *c)
{
	pthread_mutex_lock(&c->lock);
	c->work = NULL;
	while (c->busy)
		pthread_cond_wait(&c->ended, &c->lock);
	pthread_mutex_unlock(&c->lock);
}

__u32 tb_pieces(struct tb_work *w, __s64 memory, struct tb_sleep *s)
{
	struct tb_crew *c = w->members ? (struct tb_crew *)w->crew : NULL;
	__u32 found;

	if (c)
		tb_share_work(c, w);
	found = tb_take_pieces(w, memory, s);
	if (c && !found)
		tb_end_sharing(c);
	return found;
}

TB_EXPORT __u32 tb_work(struct tb_work *w, __s64 memory, struct tb_sleep *s)
{
	__u32 found = tb_pieces(w, memory, s);

	tb_away(s, TB_AWAY_MIDST, found);
	return found;
}

TB_EXPORT void tb_crew_close(struct tb_crew *c)
{
	__u32 i;

	pthread_mutex_lock(&c->lock);
	c->stop = 1;
	pthread_cond_broadcast(&c->begun);
	pthread_mutex_unlock(&c->lock);
	for (i = 0; i < c->count; i++)
		pthread_join(c->members[i].thread, NULL);
	free(c);
}

/* NULL: no memory, or no threads. */
TB_EXPORT struct tb_crew *tb_crew_open(const __s64 *memories, __u32 count)
{
	struct tb_crew *c = calloc(1, sizeof(*c) + count * sizeof(*c->members));

	if (!c)
		return NULL;
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->begun, NULL);
	pthread_cond_init(&c->ended, NULL);
	for (; c->count < count; c->count++) {
		struct tb_member *m = &c->members[c->count];

		*m = (struct tb_member){ c, 0, memories[c->count], c->count };
		if (pthread_create(&m->thread, NULL, tb_serve_crew, m)) {
			tb_crew_close(c);
			return NULL;
		}
	}
	return c;
}
