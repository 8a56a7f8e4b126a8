// SPDX-License-Identifier: Apache-2.0
/*
 * The drop simulator: loses packets of jobs at a port, in one direction, by a seeded generator (xorshift32), so that a
 * test knows which ones. Settings are registers that the control plane writes: `loss` in units of 2^-32, `state` the
 * seed. A port whose loss is 0 loses nothing and draws nothing.
 */
#ifndef TB_DROPS_P4
#define TB_DROPS_P4

#include "sizes.p4"

control Drops(in port_t port, out bool lost) {
    register<bit<32>>(TB_PORTS) loss;
    register<bit<32>>(TB_PORTS) state;
    register<bit<32>>(TB_PORTS) count;

    apply {
        bit<32> limit;
        lost = false;
        loss.read(limit, (bit<32>)port);
        if (limit != 0) {
            bit<32> x;
            state.read(x, (bit<32>)port);
            if (x == 0) {
                x = 0x9e3779b9; // never seeded
            }
            x = x ^ x << 13;
            x = x ^ x >> 17;
            x = x ^ x << 5;
            state.write((bit<32>)port, x);
            if (x < limit) {
                bit<32> n;
                lost = true;
                count.read(n, (bit<32>)port);
                count.write((bit<32>)port, n + 1);
            }
        }
    }
}

#endif
