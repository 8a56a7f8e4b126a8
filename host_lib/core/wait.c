// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What threads of Python do without its lock: waiting, and repeating what a thread that has no lock cannot say. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#define TB_SECOND 1000000000LL
#define TB_NAME_BYTES 32
/* The bit of a descriptor in what is ready; those behind share the last one. */
#define TB_LAST 62

TB_EXPORT __s64 tb_wait(struct pollfd *polled, __u32 count, __s64 time, __s64 *woken)
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
