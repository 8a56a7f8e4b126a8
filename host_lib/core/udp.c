// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The receiving thread: waiting, receiving, taking in and waking Python up happen in one call for the life of a socket. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef SOL_UDP
#define SOL_UDP 17
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

#define TB_BATCH 8
#define TB_BUFFER_BYTES 65536 /* the largest super-packet of GRO */
#define TB_CMSG_BYTES 128
#define TB_ECHOES 64

struct tb_buffers {
	struct mmsghdr messages[TB_BATCH];
	struct iovec pieces[TB_BATCH];
	struct sockaddr_storage names[TB_BATCH];
	_Alignas(8) char controls[TB_BATCH][TB_CMSG_BYTES];
	_Alignas(64) __u8 data[TB_BATCH][TB_BUFFER_BYTES];
};

static void tb_prepare(struct tb_buffers *b)
{
	int i;

	for (i = 0; i < TB_BATCH; i++) {
		b->pieces[i] = (struct iovec){ b->data[i], TB_BUFFER_BYTES };
		b->messages[i].msg_hdr = (struct msghdr){
			.msg_name = &b->names[i],
			.msg_namelen = sizeof(b->names[i]),
			.msg_iov = &b->pieces[i],
			.msg_iovlen = 1,
			.msg_control = b->controls[i],
			.msg_controllen = TB_CMSG_BYTES,
		};
	}
}

/* What came beside a message: the size of its segments, or 0, and whether it came with CE. Notes drops in front of it. */
static void tb_options(struct tb_state *s, struct msghdr *message, __u32 *segment, int *marked)
{
	struct cmsghdr *c;
	__u32 word;

	*segment = 0;
	*marked = 0;
	for (c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
		word = 0;
		memcpy(&word, CMSG_DATA(c), c->cmsg_len < CMSG_LEN(4) ? 1 : 4);
		if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO)
			*segment = word;
		else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL)
			TB_WRITE_ONCE(s->kernel_drops, word);
		else if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS) ||
			 (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_TCLASS))
			*marked = (word & TB_ECN_CE) == TB_ECN_CE;
	}
}

/* The address alone: peers use several ports. */
void tb_source_of(const struct sockaddr_storage *name, __be32 *words)
{
	memset(words, 0, 16);
	if (name->ss_family == AF_INET6)
		memcpy(words, &((const struct sockaddr_in6 *)name)->sin6_addr, 16);
	else
		memcpy(&words[3], &((const struct sockaddr_in *)name)->sin_addr, 4);
}

static void tb_buffer_in(struct tb_tables *t, int fd, struct tb_buffers *b, int i)
{
	struct msghdr *message = &b->messages[i].msg_hdr;
	struct tb_echo echoes[TB_ECHOES];
	__be32 source[4];
	__u32 segment;
	int marked, count, k;

	tb_options(t->state, message, &segment, &marked);
	tb_source_of(&b->names[i], source);
	count = tb_take_in(t, b->data[i], b->messages[i].msg_len, segment, source, tb_clock(),
			   marked, echoes, TB_ECHOES);
	for (k = 0; k < count; k++)
		sendto(fd, b->data[i] + echoes[k].offset, echoes[k].length, MSG_DONTWAIT,
		       message->msg_name, message->msg_namelen);
}

static void tb_wake(int fd)
{
	__u64 one = 1;

	if (write(fd, &one, sizeof(one)) < 0)
		return; /* it is as full as it can be, and readable */
}

/* Receives and takes in until state->stop is set and wake_fd is readable; 0, or an errno. */
TB_EXPORT int tb_udp(struct tb_tables *t, int fd, int wake_fd, int event_fd, int control_fd)
{
	struct pollfd waits[2] = { { .fd = fd, .events = POLLIN },
				   { .fd = wake_fd, .events = POLLIN } };
	struct tb_state *s = t->state;
	struct tb_buffers *b = aligned_alloc(64, sizeof(*b));
	__s64 events, controls;
	int n, i;

	if (!b)
		return ENOMEM;
	memset(b, 0, sizeof(*b));
	while (!TB_READ_ONCE(s->stop)) {
		tb_prepare(b);
		n = recvmmsg(fd, b->messages, TB_BATCH, MSG_DONTWAIT, 0);
		if (n <= 0) {
			poll(waits, 2, -1);
			continue;
		}
		events = s->event_head;
		controls = s->control_head;
		for (i = 0; i < n; i++)
			tb_buffer_in(t, fd, b, i);
		if (s->event_head != events)
			tb_wake(event_fd);
		if (s->control_head != controls)
			tb_wake(control_fd);
	}
	free(b);
	return 0;
}
