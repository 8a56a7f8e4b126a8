/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */
#ifndef TB_WIRE_H
#define TB_WIRE_H

#define TB_VERSION 1
#define TB_HEADER_BYTES 64
#define TB_MAX_RANKS 256
#define TB_WIDTH_STEP 64
#define TB_ROW_STEP 16
#define TB_OP_INDEX_BITS 10
#define TB_EXPONENT_NONE (-32768)
#define TB_TIME_UNIT_US 64
#define TB_KEY_WORDS 11
#define TB_CHECK_K1 0x9e3779b97f4a7c15ULL
#define TB_CHECK_K2 0xc2b2ae3d27d4eb4fULL
#define TB_CHECK_K3 0x2e8a5c3d4b7f9d62ULL
#define TB_CHECK_K4 0x58f1a6b5d3c4e792ULL

#define TB_TYPE_CONTRIBUTION 1
#define TB_TYPE_RESULT 2
#define TB_TYPE_READY 3
#define TB_TYPE_REPAIR 4
#define TB_TYPE_GONE 5
#define TB_TYPE_MAP 6
#define TB_TYPE_HOLD 7
#define TB_TYPE_BYE 8
#define TB_TYPE_PROBE 9
#define TB_TYPE_ECHO 10
#define TB_TYPE_HELLO 12
#define TB_TYPE_LAST 12

#define TB_FLAG_FLUSH 1
#define TB_FLAG_ABSTAIN 2
#define TB_FLAG_REPEAT 4
#define TB_FLAG_LATE 8
#define TB_FLAG_SKIP 16
#define TB_FLAG_STOP 32
#define TB_FLAG_COMPLAINT 64
#define TB_FLAG_FIRST_HALF 128
#define TB_FLAG_SUMS 256
#define TB_FLAG_SWITCHED 512
#define TB_FLAG_OVERFLOW 1024
#define TB_FLAG_HALVES 2048
#define TB_FLAG_EPOCH 4096
#define TB_FLAG_QUORUM 8192

/* Header of every Tailbound packet, after UDP, network byte order. */
struct tb_header {
	__u8 version; /* VERSION */
	__u8 type; /* PacketType */
	__be16 flags; /* Flag bits */
	__be32 cookie; /* the job, drawn at random by rank 0 */
	__be32 op; /* op label: step << 10 | index, a serial number */
	__be16 layout; /* hash of (bucket index, numel, dtype, chunk, world size) */
	__u8 sender; /* rank that sent this packet */
	__u8 owner; /* contribution: the rank it is for; result: the owner that made it */
	__be32 seq; /* row sequence: ring position = seq mod ring (sums ring or result ring); echo: packets of the prober that came with CE */
	__be16 row; /* place of the packet in its sender's order; result: and of the row in its owner's list */
	__be16 rows; /* rows of this owner in this op */
	__be32 contributed; /* highest op whose contributions the sender has fully sent to this peer */
	__be32 published; /* highest op whose results the sender has fully sent to this peer */
	__be16 exponent; /* contribution: e of its scale, for an owner a multiple of 4; result: e of the group for the key's next op */
	__be16 need; /* contribution: largest e this rank would have needed, EXPONENT_NONE if all zero */
	__be32 scale; /* of the row (result; negative: with offsets), of the group (contribution to a switch): value of code 255 */
	__be16 count; /* result: contributors in the mean; contribution to a switch: contributors that complete the row, 0 for all workers of the job; any other contribution: 0 */
	__u8 weight; /* contribution: what codes are multiplied by, at least 1, and 1 for a switch */
	__u8 pad; /* 0 */
	__be16 deadline; /* advertised D1 in units of 64 us */
	__be16 lateness; /* own lateness (launch minus majority arrival) in units of 64 us */
	__be32 map_id; /* owner map of this op */
	__be32 map_known; /* highest owner map id known in full */
	__be64 check; /* check over payload and header (tailbound.wire.check), or with a key the tag (wire.tag) */
};
_Static_assert(sizeof(struct tb_header) == 64, "tb_header");

#endif /* TB_WIRE_H */
