// SPDX-License-Identifier: Apache-2.0
/*
 * One chunk of a row: 256 codes, summed as u16 lanes in two wide registers.
 *
 * Each code becomes a lane of 16 bits by masking every other byte, so two additions sum 256 codes; 255 a code and 256
 * ranks fill a lane without a carry. `even` holds the sums of codes 0, 2, 4, ..., `odd` those between: they are put into
 * the order of the codes only when a result leaves.
 */
#ifndef TB_LANES_P4
#define TB_LANES_P4

#include "masks.p4"

/*
 * store: the first contributor replaces what an earlier row left; add: another one. With reply, `first` and `second`
 * are the sums of the first and the last 128 codes in their order.
 */
control Lanes(in slot_t slot, in bool store, in bool add, in bool reply, in chunk_t codes, out chunk_t first,
              out chunk_t second) {
    register<chunk_t>(TB_SLOTS) even;
    register<chunk_t>(TB_SLOTS) odd;
    chunk_t e = 0;
    chunk_t o = 0;
    chunk_t left;
    chunk_t right;

    /*
     * From 64 lanes of 16 bits, the first half of them 512 bits further up, to 64 of 32 bits. An action, because p4c
     * copies values forward inside of a block: written out below, each step would double the expression.
     */
    action spread() {
        left = (left | left << 256) & LOW_256;
        left = (left | left << 128) & LOW_128;
        left = (left | left << 64) & LOW_64;
        left = (left | left << 32) & LOW_32;
        left = (left | left << 16) & LOW_16;
        right = (right | right << 256) & LOW_256;
        right = (right | right << 128) & LOW_128;
        right = (right | right << 64) & LOW_64;
        right = (right | right << 32) & LOW_32;
        right = (right | right << 16) & LOW_16;
    }

    apply {
        first = 0;
        second = 0;
        if (!store) {
            even.read(e, slot);
            odd.read(o, slot);
        }
        if (store || add) {
            e = e + (codes >> 8 & LOW_8);
            o = o + (codes & LOW_8);
            even.write(slot, e);
            odd.write(slot, o);
        }
        if (reply) {
            left = 512w0 ++ e[2047:1536] ++ 512w0 ++ e[1535:1024];
            right = 512w0 ++ o[2047:1536] ++ 512w0 ++ o[1535:1024];
            spread();
            first = left << 16 | right;
            left = 512w0 ++ e[1023:512] ++ 512w0 ++ e[511:0];
            right = 512w0 ++ o[1023:512] ++ 512w0 ++ o[511:0];
            spread();
            second = left << 16 | right;
        }
    }
}

#endif
