// SPDX-License-Identifier: Apache-2.0
/* The check of a result, over its sums and its header. */
#ifndef TB_SEAL_P4
#define TB_SEAL_P4

#include "check.p4"
#include "headers.p4"

control Seal(inout headers_t hdr) {
    Fletcher() a0;
    Fletcher() a1;
    Fletcher() b0;
    Fletcher() b1;
    Fletcher() c128;
    Fletcher() c64;
    Fletcher() c32;
    Fletcher() c16;
    Finish() finish;

    apply {
        fletcher_t sum = {0, 0, 0, 0};
        if (hdr.sums_a0.isValid()) {
            a0.apply(sum, hdr.sums_a0.bits, 16);
            a1.apply(sum, hdr.sums_a1.bits, 16);
        }
        if (hdr.sums_b0.isValid()) {
            b0.apply(sum, hdr.sums_b0.bits, 16);
            b1.apply(sum, hdr.sums_b1.bits, 16);
        }
        if (hdr.sums128.isValid()) {
            c128.apply(sum, hdr.sums128.bits, 16);
        }
        if (hdr.sums64.isValid()) {
            c64.apply(sum, (chunk_t)hdr.sums64.bits, 8);
        }
        if (hdr.sums32.isValid()) {
            c32.apply(sum, (chunk_t)hdr.sums32.bits, 4);
        }
        if (hdr.sums16.isValid()) {
            c16.apply(sum, (chunk_t)hdr.sums16.bits, 2);
        }
        finish.apply(sum, hdr.tb, hdr.tb.check);
    }
}

#endif
