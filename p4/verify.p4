// SPDX-License-Identifier: Apache-2.0
/* What the check of a packet with codes ought to be. */
#ifndef TB_VERIFY_P4
#define TB_VERIFY_P4

#include "check.p4"
#include "headers.p4"

control Verify(in headers_t hdr, out word_t check) {
    Fletcher() a;
    Fletcher() b;
    Fletcher() c128;
    Fletcher() c64;
    Fletcher() c32;
    Fletcher() c16;
    Finish() finish;

    apply {
        fletcher_t sum = {0, 0, 0, 0};
        if (hdr.codes_a.isValid()) {
            a.apply(sum, hdr.codes_a.bits, 16);
        }
        if (hdr.codes_b.isValid()) {
            b.apply(sum, hdr.codes_b.bits, 16);
        }
        if (hdr.codes128.isValid()) {
            c128.apply(sum, (chunk_t)hdr.codes128.bits, 8);
        }
        if (hdr.codes64.isValid()) {
            c64.apply(sum, (chunk_t)hdr.codes64.bits, 4);
        }
        if (hdr.codes32.isValid()) {
            c32.apply(sum, (chunk_t)hdr.codes32.bits, 2);
        }
        if (hdr.codes16.isValid()) {
            c16.apply(sum, (chunk_t)hdr.codes16.bits, 1);
        }
        finish.apply(sum, hdr.tb, check);
    }
}

#endif
