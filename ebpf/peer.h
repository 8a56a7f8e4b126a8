/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Marks of a peer (kernel-12): what its newest packets said about it. Looked at without a lock, and written, under the
 * peer's lock, only when one of them rises or changes, so that the common packet takes no lock here.
 */
#ifndef TB_PEER_H
#define TB_PEER_H

#include "compat.h"

#include "abi.h"
#include "packet.h"

struct tb_marks {
	__u32 map_known;
	__u32 deadline;
	__u32 lateness;
};

static __always_inline void tb_marks_of(struct tb_marks *m, const struct tb_header *head)
{
	m->map_known = tb_be32(head->map_known);
	m->deadline = tb_be16(head->deadline);
	m->lateness = tb_be16(head->lateness);
}

/* Whether a packet says what no packet of the rank has said before. One sign for four: the verifier follows branches. */
static __always_inline int tb_peer_rises(const struct tb_peer_state *s, const struct tb_packet *p,
					 const struct tb_marks *m)
{
	__u32 over = (s->newest - p->op) | (s->contributed - p->contributed) |
		     (s->published - p->published) | (s->map_known - m->map_known);

	return TB_READ_ONCE(s->cookie) != p->cookie || (__s32)over < 0;
}

/*
 * Whether a packet is not to be believed about what may change both ways. In a job with a key somebody may record it and
 * send it again later: then another op has been named since.
 */
static __always_inline int tb_peer_aged(const struct tb_peer_state *s, const struct tb_packet *p)
{
#ifdef TB_TAGGED
	return s->cookie == p->cookie && tb_distance(p->op, s->newest) < 0;
#else
	(void)s;
	(void)p;
	return 0;
#endif
}

/* With a key a packet in which nothing rises is no news, whatever else it says: it may be a recorded one. */
static __always_inline int tb_peer_news(const struct tb_peer_state *s, const struct tb_packet *p,
					const struct tb_marks *m)
{
#ifdef TB_TAGGED
	return tb_peer_rises(s, p, m);
#else
	return tb_peer_rises(s, p, m) || m->deadline != s->deadline || m->lateness != s->lateness;
#endif
}

static __always_inline __u32 tb_later(__u32 a, __u32 b)
{
	return tb_distance(a, b) > 0 ? a : b;
}

/* Under the peer's lock. */
static __always_inline void tb_peer_take(struct tb_peer_state *s, const struct tb_packet *p,
					 const struct tb_marks *m, __u64 now)
{
	int aged = tb_peer_aged(s, p);

	if (s->cookie != p->cookie) {
		s->contributed = p->contributed;
		s->published = p->published;
		s->newest = p->op;
		s->map_known = m->map_known;
		s->cookie = p->cookie;
	} else {
		s->contributed = tb_later(p->contributed, s->contributed);
		s->published = tb_later(p->published, s->published);
		s->map_known = tb_later(m->map_known, s->map_known);
		s->newest = tb_later(p->op, s->newest);
	}
	if (!aged) {
		s->deadline = m->deadline;
		s->lateness = m->lateness;
	}
	s->last_ns = now;
}

#endif /* TB_PEER_H */
