// SPDX-License-Identifier: Apache-2.0
/*
 * The state machine of a slot (kernel-24), as in ebpf/switch.h.
 *
 *   another job, or a newer row: store     an older row: stale     the same: add, or refuse, or answer
 *
 * A row is final once it is released, by its last contribution or by a flush, and never changes from then on. A slot is
 * a cell in several registers; they are read, judged and written for one packet before the next one comes (the pipeline
 * of bmv2 has one thread; what else would do is in README.md).
 */
#ifndef TB_SLOTS_P4
#define TB_SLOTS_P4

#include "headers.p4"

control Slots(inout headers_t hdr, inout meta_t meta, out bool store, out bool add, out bool release,
              out bool abandoned) {
    register<bit<32>>(TB_SLOTS) cookies;
    register<bit<32>>(TB_SLOTS) sequences;
    register<bit<96>>(TB_SLOTS) labels;
    register<ranks_t>(TB_SLOTS) ranks;
    register<bit<16>>(TB_SLOTS) counts;
    register<bit<16>>(TB_SLOTS) needs;
    register<bit<16>>(TB_SLOTS) exponents;
    register<bit<32>>(TB_SLOTS) scales;
    register<bit<1>>(TB_SLOTS) finals;

    apply {
        store = false;
        add = false;
        release = false;
        abandoned = false;

        bit<32> cookie;
        bit<32> sequence;
        bit<96> label;
        ranks_t summed;
        bit<16> need_bits;
        bit<16> exponent;
        bit<1> final;
        cookies.read(cookie, meta.slot);
        sequences.read(sequence, meta.slot);
        labels.read(label, meta.slot);
        ranks.read(summed, meta.slot);
        counts.read(meta.count, meta.slot);
        needs.read(need_bits, meta.slot);
        exponents.read(exponent, meta.slot);
        finals.read(final, meta.slot);
        int<16> need = (int<16>)need_bits;

        bit<32> ahead = hdr.tb.seq - sequence; // serial numbers: at most half the circle ahead is newer
        bool flush = hdr.tb.flags & TB_FLAG_FLUSH != 0;
        // what has to be the same in all contributions of a row
        bit<96> mine = hdr.tb.op ++ hdr.tb.layout ++ hdr.tb.row ++ hdr.tb.rows ++ meta.codes;
        ranks_t bit_ = (ranks_t)1 << hdr.tb.sender;
        // contributors that the sender waits for: as many as there are, unless it says less
        bit<16> wanted = hdr.tb.count;
        if (wanted == 0 || wanted > (bit<16>)meta.job.ranks) {
            wanted = (bit<16>)meta.job.ranks;
        }

        if (cookie != hdr.tb.cookie || (ahead != 0 && ahead[31:31] == 0)) {
            meta.verdict = TB_VERDICT_STORED;
            store = true;
            abandoned = cookie == hdr.tb.cookie && final == 0;
            cookies.write(meta.slot, hdr.tb.cookie);
            sequences.write(meta.slot, hdr.tb.seq);
            labels.write(meta.slot, mine);
            exponents.write(meta.slot, (bit<16>)hdr.tb.exponent);
            scales.write(meta.slot, hdr.tb.scale);
            exponent = (bit<16>)hdr.tb.exponent;
            summed = 0;
            meta.count = 0;
            need = TB_EXPONENT_NONE;
            final = 0;
        } else if (ahead != 0) {
            meta.verdict = TB_VERDICT_STALE_OP;
        } else if (label != mine) {
            meta.verdict = TB_VERDICT_LAYOUT_MISMATCH;
        } else if (final == 1) {
            meta.verdict = TB_VERDICT_ANSWERED;
        } else if (summed & bit_ != 0) {
            meta.verdict = TB_VERDICT_DUPLICATE;
            if (flush) {
                meta.verdict = TB_VERDICT_FLUSHED;
                release = true;
            }
        } else if (exponent != (bit<16>)hdr.tb.exponent) {
            meta.verdict = TB_VERDICT_SCALE_MISMATCH;
        } else {
            meta.verdict = TB_VERDICT_ADDED;
            add = true;
        }

        if (store || add) {
            summed = summed | bit_;
            meta.count = meta.count + 1;
            if (hdr.tb.need > need) {
                need = hdr.tb.need;
            }
            release = flush || meta.count >= wanted;
            ranks.write(meta.slot, summed);
            counts.write(meta.slot, meta.count);
            needs.write(meta.slot, (bit<16>)need);
        }
        if (release) {
            final = 1;
        }
        if (store || release) {
            finals.write(meta.slot, final);
        }
        meta.need = need;
        meta.exponent = (int<16>)exponent;
        scales.read(meta.scale, meta.slot);
    }
}

#endif
