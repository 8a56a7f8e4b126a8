/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */
#ifndef TB_RECORDS_H
#define TB_RECORDS_H

#include <linux/types.h>

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
	__u64 shifts; /* u8[] */
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

#endif /* TB_RECORDS_H */
