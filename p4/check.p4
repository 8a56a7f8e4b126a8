// SPDX-License-Identifier: Apache-2.0
/*
 * The 64-bit check over payload and header: a Fletcher sum of little-endian 64-bit words in two lanes, mixed at the end
 * (defined by host_lib/tailbound/wire/check.py).
 *
 * A chunk is taken at once. Every other word of it is masked out into lanes of 128 bits, where 16 words can be summed
 * without a carry, and one multiplication sums them all: plainly for a, by their weights for b. A chunk shorter than
 * 256 bytes stands at the low end; the words of zero before it add nothing, and the weights count from the end.
 */
#ifndef TB_CHECK_P4
#define TB_CHECK_P4

#include "masks.p4"

struct fletcher_t {
    word_t a0;
    word_t b0;
    word_t a1;
    word_t b1;
}

/* The next chunk: `words` is its number of words a lane. */
control Fletcher(inout fletcher_t sum, in chunk_t bytes, in word_t words) {
    chunk_t x;

    /* The bytes of each word the other way round. An action for the reason given in lanes.p4. */
    action swap() {
        x = (x & LOW_8) << 8 | x >> 8 & LOW_8;
        x = (x & LOW_16) << 16 | x >> 16 & LOW_16;
        x = (x & LOW_32) << 32 | x >> 32 & LOW_32;
    }

    action take() {
        chunk_t product = (x >> 64 & LOW_64) * RAMP_128;
        sum.b0 = sum.b0 + words * sum.a0 + product[1983:1920];
        product = (x & LOW_64) * RAMP_128;
        sum.b1 = sum.b1 + words * sum.a1 + product[1983:1920];
        product = (x >> 64 & LOW_64) * SUM_128;
        sum.a0 = sum.a0 + product[1983:1920];
        product = (x & LOW_64) * SUM_128;
        sum.a1 = sum.a1 + product[1983:1920];
    }

    apply {
        x = bytes;
        swap();
        take();
    }
}

/* The header behind the payload, and the mix. */
control Finish(inout fletcher_t sum, in tb_header_t tb, out word_t check) {
    Fletcher() behind;

    apply {
        behind.apply(sum, (chunk_t)tb_header_bits(tb), 4);
        word_t c = sum.a0 * TB_CHECK_K1 + sum.a1 * TB_CHECK_K2 + sum.b0 * TB_CHECK_K3 + sum.b1 * TB_CHECK_K4;
        check = c ^ c >> 32;
    }
}

#endif
