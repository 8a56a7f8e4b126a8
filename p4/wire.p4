// SPDX-License-Identifier: Apache-2.0
/* Generated from host_lib/tailbound/wire/schema.py: change that, then run `make generate`. */
#ifndef TB_WIRE_P4
#define TB_WIRE_P4

const bit<8> TB_VERSION = 1;
const bit<16> TB_HEADER_BYTES = 64;
const bit<16> TB_ROW_STEP = 16;
const int<16> TB_EXPONENT_NONE = -32768;
const bit<64> TB_CHECK_K1 = 0x9e3779b97f4a7c15;
const bit<64> TB_CHECK_K2 = 0xc2b2ae3d27d4eb4f;
const bit<64> TB_CHECK_K3 = 0x2e8a5c3d4b7f9d62;
const bit<64> TB_CHECK_K4 = 0x58f1a6b5d3c4e792;

const bit<8> TB_TYPE_CONTRIBUTION = 1;
const bit<8> TB_TYPE_RESULT = 2;
const bit<8> TB_TYPE_READY = 3;
const bit<8> TB_TYPE_REPAIR = 4;
const bit<8> TB_TYPE_GONE = 5;
const bit<8> TB_TYPE_MAP = 6;
const bit<8> TB_TYPE_HOLD = 7;
const bit<8> TB_TYPE_BYE = 8;
const bit<8> TB_TYPE_PROBE = 9;
const bit<8> TB_TYPE_ECHO = 10;
const bit<8> TB_TYPE_HELLO = 12;
const bit<8> TB_TYPE_LAST = 12;

const bit<16> TB_FLAG_FLUSH = 1;
const bit<16> TB_FLAG_ABSTAIN = 2;
const bit<16> TB_FLAG_REPEAT = 4;
const bit<16> TB_FLAG_LATE = 8;
const bit<16> TB_FLAG_SKIP = 16;
const bit<16> TB_FLAG_STOP = 32;
const bit<16> TB_FLAG_COMPLAINT = 64;
const bit<16> TB_FLAG_FIRST_HALF = 128;
const bit<16> TB_FLAG_SUMS = 256;
const bit<16> TB_FLAG_SWITCHED = 512;
const bit<16> TB_FLAG_OVERFLOW = 1024;
const bit<16> TB_FLAG_HALVES = 2048;
const bit<16> TB_FLAG_EPOCH = 4096;
const bit<16> TB_FLAG_QUORUM = 8192;

const bit<8> TB_VERDICT_STORED = 0;
const bit<8> TB_VERDICT_ADDED = 1;
const bit<8> TB_VERDICT_RESULT_TAKEN = 2;
const bit<8> TB_VERDICT_CONTROL_PASSED = 3;
const bit<8> TB_VERDICT_REFLECTED = 4;
const bit<8> TB_VERDICT_ECHO_TAKEN = 5;
const bit<8> TB_VERDICT_ANSWERED = 6;
const bit<8> TB_VERDICT_FLUSHED = 7;
const bit<8> TB_VERDICT_BAD_LENGTH = 8;
const bit<8> TB_VERDICT_NOT_LINEAR = 9;
const bit<8> TB_VERDICT_BAD_VERSION = 10;
const bit<8> TB_VERDICT_BAD_TYPE = 11;
const bit<8> TB_VERDICT_WRONG_COOKIE = 12;
const bit<8> TB_VERDICT_UNKNOWN_RANK = 13;
const bit<8> TB_VERDICT_WRONG_ADDRESS = 14;
const bit<8> TB_VERDICT_NOT_FOR_THIS_RANK = 15;
const bit<8> TB_VERDICT_CORRUPT = 16;
const bit<8> TB_VERDICT_SLOT_OUT_OF_RANGE = 17;
const bit<8> TB_VERDICT_STALE_OP = 18;
const bit<8> TB_VERDICT_FUTURE_OP = 19;
const bit<8> TB_VERDICT_DUPLICATE = 20;
const bit<8> TB_VERDICT_LATE = 21;
const bit<8> TB_VERDICT_SCALE_MISMATCH = 22;
const bit<8> TB_VERDICT_BAD_WEIGHT = 23;
const bit<8> TB_VERDICT_LAYOUT_MISMATCH = 24;
const bit<8> TB_VERDICT_WRONG_MAP = 25;
const bit<8> TB_VERDICT_ABANDONED = 26;
const bit<8> TB_VERDICT_DUPLICATE_RESULT = 27;
const bit<8> TB_VERDICT_STALE_RESULT = 28;
const bit<8> TB_VERDICT_FUTURE_RESULT = 29;
const bit<8> TB_VERDICT_INACTIVE = 30;
const bit<8> TB_VERDICT_FRAGMENT = 31;
const bit<8> TB_VERDICT_DUPLICATE_REPAIR = 32;
const bit<8> TB_VERDICT_DUPLICATE_REPAIR_RESULT = 33;
const bit<8> TB_VERDICT_FORGED = 34;

/* Header of every Tailbound packet, after UDP, network byte order. */
header tb_header_t {
    bit<8> version; // VERSION
    bit<8> type_; // PacketType
    bit<16> flags; // Flag bits
    bit<32> cookie; // the job, drawn at random by rank 0
    bit<32> op; // op label: step << 10 | index, a serial number
    bit<16> layout; // hash of (bucket index, numel, dtype, chunk, world size)
    bit<8> sender; // rank that sent this packet
    bit<8> owner; // contribution: the rank it is for; result: the owner that made it
    bit<32> seq; // row sequence: ring position = seq mod ring (sums ring or result ring); echo: packets of the prober that came with CE
    bit<16> row; // place of the packet in its sender's order; result: and of the row in its owner's list
    bit<16> rows; // rows of this owner in this op
    bit<32> contributed; // highest op whose contributions the sender has fully sent to this peer
    bit<32> published; // highest op whose results the sender has fully sent to this peer
    int<16> exponent; // contribution: e of its scale, for an owner a multiple of 4; result: e of the group for the key's next op
    int<16> need; // contribution: largest e this rank would have needed, EXPONENT_NONE if all zero
    bit<32> scale; // of the row (result; negative: with offsets), of the group (contribution to a switch): value of code 255
    bit<16> count; // result: contributors in the mean; contribution to a switch: contributors that complete the row, 0 for all workers of the job; any other contribution: 0
    bit<8> weight; // contribution: what codes are multiplied by, at least 1, and 1 for a switch
    bit<8> pad; // 0
    bit<16> deadline; // advertised D1 in units of 64 us
    bit<16> lateness; // own lateness (launch minus majority arrival) in units of 64 us
    bit<32> map_id; // owner map of this op
    bit<32> map_known; // highest owner map id known in full
    bit<64> check; // check over payload and header (tailbound.wire.check), or with a key the tag (wire.tag)
}

/* The header as one number, its check taken as zero. */
bit<512> tb_header_bits(in tb_header_t h) {
    return h.version ++
           h.type_ ++
           h.flags ++
           h.cookie ++
           h.op ++
           h.layout ++
           h.sender ++
           h.owner ++
           h.seq ++
           h.row ++
           h.rows ++
           h.contributed ++
           h.published ++
           (bit<16>)h.exponent ++
           (bit<16>)h.need ++
           h.scale ++
           h.count ++
           h.weight ++
           h.pad ++
           h.deadline ++
           h.lateness ++
           h.map_id ++
           h.map_known ++
           64w0;
}

#endif
