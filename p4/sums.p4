// SPDX-License-Identifier: Apache-2.0
/* All chunks of a row: adds the codes to the slot, and with reply takes the sums out of it, in place of the codes. */
#ifndef TB_SUMS_P4
#define TB_SUMS_P4

#include "headers.p4"
#include "lanes.p4"

control Sums(inout headers_t hdr, in slot_t slot, in bool store, in bool add, in bool reply) {
    Lanes() a;
    Lanes() b;
    Lanes() c128;
    Lanes() c64;
    Lanes() c32;
    Lanes() c16;

    apply {
        chunk_t first;
        chunk_t second;
        if (hdr.codes_a.isValid()) {
            a.apply(slot, store, add, reply, hdr.codes_a.bits, first, second);
            if (reply) {
                hdr.codes_a.setInvalid();
                hdr.sums_a0.setValid();
                hdr.sums_a1.setValid();
                hdr.sums_a0.bits = first;
                hdr.sums_a1.bits = second;
            }
        }
        if (hdr.codes_b.isValid()) {
            b.apply(slot, store, add, reply, hdr.codes_b.bits, first, second);
            if (reply) {
                hdr.codes_b.setInvalid();
                hdr.sums_b0.setValid();
                hdr.sums_b1.setValid();
                hdr.sums_b0.bits = first;
                hdr.sums_b1.bits = second;
            }
        }
        // a shorter chunk stands at the low end, so that `second` is all of it
        if (hdr.codes128.isValid()) {
            c128.apply(slot, store, add, reply, (chunk_t)hdr.codes128.bits, first, second);
            if (reply) {
                hdr.codes128.setInvalid();
                hdr.sums128.setValid();
                hdr.sums128.bits = second;
            }
        }
        if (hdr.codes64.isValid()) {
            c64.apply(slot, store, add, reply, (chunk_t)hdr.codes64.bits, first, second);
            if (reply) {
                hdr.codes64.setInvalid();
                hdr.sums64.setValid();
                hdr.sums64.bits = second[1023:0];
            }
        }
        if (hdr.codes32.isValid()) {
            c32.apply(slot, store, add, reply, (chunk_t)hdr.codes32.bits, first, second);
            if (reply) {
                hdr.codes32.setInvalid();
                hdr.sums32.setValid();
                hdr.sums32.bits = second[511:0];
            }
        }
        if (hdr.codes16.isValid()) {
            c16.apply(slot, store, add, reply, (chunk_t)hdr.codes16.bits, first, second);
            if (reply) {
                hdr.codes16.setInvalid();
                hdr.sums16.setValid();
                hdr.sums16.bits = second[255:0];
            }
        }
    }
}

#endif
