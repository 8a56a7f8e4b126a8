// SPDX-License-Identifier: Apache-2.0
/*
 * Sizes and types: every width has a name. What a deployment may want to change is a macro (p4c -D).
 */
#ifndef TB_SIZES_P4
#define TB_SIZES_P4

/* Slots of the switch, for all jobs together; a job has a range of them, a power of two. */
#ifndef TB_SLOTS
#define TB_SLOTS 4096
#endif
/* Jobs at once: rows of the ledger. */
#ifndef TB_JOBS
#define TB_JOBS 8
#endif
/* Ranks of a job at most (TB_MAX_RANKS is what the wire format allows). */
#ifndef TB_RANKS
#define TB_RANKS 64
#endif
/* Ports, numbered from 0: rows of the counters and of the drop simulator. */
#ifndef TB_PORTS
#define TB_PORTS 64
#endif

/*
 * Codes of a contribution at most. The program takes 752, and an MTU of 1500 has room for the sums of 704; a packet grows
 * by this many bytes when it becomes a result, and bmv2 keeps room for 512.
 */
#ifndef TB_CODES
#define TB_CODES 512
#endif

/* Columns of a ledger row. */
const bit<32> TB_VERDICTS = 64;

typedef bit<48> mac_t;
typedef bit<32> address_t;
typedef bit<9> port_t;
typedef bit<16> group_t;
typedef bit<8> job_t;
typedef bit<8> rank_t;
typedef bit<TB_RANKS> ranks_t;
typedef bit<8> verdict_t;
typedef bit<32> slot_t;
typedef bit<64> word_t;
/* p4c takes values of up to 2048 bits: a chunk of 256 codes, or the sums of 128. */
typedef bit<2048> chunk_t;

/* No verdict yet: 0 is TB_VERDICT_STORED. */
const verdict_t TB_GO_ON = 255;

#endif
