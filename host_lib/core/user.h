/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * In a process, in the place of the kernel: maps are plain memory, one thread writes them, and the time is that of the
 * buffer in hand. Packets are taken in under one mutex (tables.c), which stands for all locks of rows, ops and peers.
 */
#ifndef TB_USER_H
#define TB_USER_H

#include <linux/types.h>
#include <pthread.h>
#include <sys/cdefs.h>

struct bpf_spin_lock {
	__u32 val;
};

#include "abi.h"

enum { XDP_ABORTED, XDP_DROP, XDP_PASS, XDP_TX };

/* A map: values of so many bytes each. */
struct tb_map {
	char *values;
	__u64 entries;
	__u64 bytes;
};

/* Control packets that wait at most; one beyond is counted. */
#define TB_CONTROL_QUEUE 1024
/* Bytes of a ring of events, a power of two. An event beyond is a hint lost. */
#define TB_EVENT_BYTES (1024 * sizeof(struct tb_event_record))

/* As the kernel's ring has it (wait.c); the next one is behind it. */
struct tb_event_record {
	__u32 length, page;
	struct tb_event event;
	__u64 unused;
};

/*
 * Python reads it besides the maps. The receiving thread moves the heads of queues, and the taking thread their tails.
 * Each reads the other's word with an acquire.
 */
struct tb_state {
	__s64 event_head;
	__s64 event_tail;
	__s64 control_head;
	__s64 control_tail;
	__s64 events_lost;
	__s64 controls_lost;
	__s64 stop;
	__s64 kernel_drops; /* as SO_RXQ_OVFL counts them */
};

#define TB_MAP_FIELD(name) struct tb_map name;
struct tb_tables {
	TB_WORKER_MAPS(TB_MAP_FIELD)
	__u32 width; /* codes of a row at most */
	__u32 result_rows;
	__u64 now; /* CLOCK_MONOTONIC, ns: when the buffer in hand was received */
	struct tb_state *state;
	char *events; /* their ring */
	struct tb_word *taken; /* control packets wait behind it; at first it is none */
	struct tb_word *last;
	__u64 *spare; /* a packet, aligned */
	pthread_mutex_t mutex; /* held while a buffer is taken in, and while slots are sealed */
};

/* The tables that this thread works on. A thread takes in for one rank at a time, a process for several. */
extern __thread struct tb_tables *tb_here __attribute__((tls_model("initial-exec")));

#define TB_WIDTH (tb_here->width)
#define TB_RESULT_ROWS (tb_here->result_rows)
#define TB_PORT 0 /* the socket has it */

static __always_inline void *tb_value(const struct tb_map *map, __u32 index)
{
	return index < map->entries ? map->values + index * map->bytes : 0;
}

#define TB_LOOKUP(name, index) tb_value(&tb_here->name, index)
#define TB_MAP(name) 0

#define bpf_spin_lock(lock) ((void)(lock))
#define bpf_spin_unlock(lock) ((void)(lock))
#define bpf_ktime_get_ns() (tb_here->now)
#define bpf_get_smp_processor_id() 0

static __always_inline void bpf_ringbuf_output(void *ring, const struct tb_event *event, __u64 size,
					       __u64 flags)
{
	struct tb_state *s = tb_here->state;
	__s64 end = s->event_head;

	(void)ring;
	(void)size;
	(void)flags;
	if (end - __atomic_load_n(&s->event_tail, __ATOMIC_ACQUIRE) >= (__s64)TB_EVENT_BYTES) {
		s->events_lost++;
		return;
	}
	*(struct tb_event_record *)(tb_here->events + (end & (TB_EVENT_BYTES - 1))) =
		(struct tb_event_record){ .length = sizeof(struct tb_event_record) - 8,
					  .event = *event };
	__atomic_store_n(&s->event_head, end + sizeof(struct tb_event_record), __ATOMIC_RELEASE);
}

#endif /* TB_USER_H */
