// SPDX-License-Identifier: Apache-2.0
/*
 * What became of the packets for the switch: a count by verdict and sender for each job, with rows that were given up
 * for newer ones counted besides.
 */
#ifndef TB_LEDGER_P4
#define TB_LEDGER_P4

#include "headers.p4"

control Ledger(in meta_t meta, in bool abandoned) {
    /* (job * (TB_RANKS + 1) + sender) * TB_VERDICTS + verdict; sender TB_RANKS: not to be trusted. */
    register<bit<32>>(TB_JOBS * (TB_RANKS + 1) * TB_VERDICTS) verdicts;

    apply {
        bit<32> n;
        bit<32> row = (bit<32>)meta.job.index * (TB_RANKS + 1) + TB_RANKS;
        if (meta.trusted == 1) {
            row = (bit<32>)meta.job.index * (TB_RANKS + 1) + (bit<32>)meta.rank;
        }
        bit<32> place = row * TB_VERDICTS + (bit<32>)meta.verdict;
        verdicts.read(n, place);
        verdicts.write(place, n + 1);
        if (abandoned) {
            place = row * TB_VERDICTS + (bit<32>)TB_VERDICT_ABANDONED;
            verdicts.read(n, place);
            verdicts.write(place, n + 1);
        }
    }
}

#endif
