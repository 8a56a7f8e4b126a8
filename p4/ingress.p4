// SPDX-License-Identifier: Apache-2.0
/* From the port to the verdict. */
#ifndef TB_INGRESS_P4
#define TB_INGRESS_P4

#include "admit.p4"
#include "drops.p4"
#include "forward.p4"
#include "ledger.p4"
#include "reply.p4"
#include "slots.p4"
#include "sums.p4"
#include "verify.p4"

control TailboundIngress(inout headers_t hdr, inout meta_t meta, inout standard_metadata_t standard_metadata) {
    counter(TB_PORTS, CounterType.packets_and_bytes) ours;
    counter(TB_PORTS, CounterType.packets_and_bytes) foreign;
    Admit() admit;
    Drops() drops;
    Verify() verify_check;
    Address() address;
    Slots() slots;
    Sums() sums;
    Ledger() ledger;
    Result() result;
    Reflect() reflect;
    Verify() sign;
    Forward() forward;

    apply {
        bool lost = false;
        bool store = false;
        bool add = false;
        bool release = false;
        bool abandoned = false;
        word_t check = 0;

        admit.apply(hdr, meta, standard_metadata);
        if (meta.ours == 0) {
            foreign.count((bit<32>)standard_metadata.ingress_port);
            forward.apply(hdr, standard_metadata);
            return;
        }
        drops.apply(standard_metadata.ingress_port, lost);
        if (lost) {
            mark_to_drop(standard_metadata);
            return;
        }
        ours.count((bit<32>)standard_metadata.ingress_port);
        if (meta.verdict == TB_GO_ON) {
            verify_check.apply(hdr, check);
            if (check != hdr.tb.check) {
                meta.verdict = TB_VERDICT_CORRUPT;
            } else {
                address.apply(hdr, meta);
            }
        }
        if (meta.verdict == TB_GO_ON) {
            slots.apply(hdr, meta, store, add, release, abandoned);
            if (release || meta.verdict == TB_VERDICT_ANSWERED) {
                meta.reply = 1;
            }
            sums.apply(hdr, meta.slot, store, add, meta.reply == 1);
        }
        ledger.apply(meta, abandoned);
        if (meta.reply == 1) {
            result.apply(hdr, meta);
            meta.renumber = 1;
            if (release) {
                meta.broadcast = 1;
                standard_metadata.mcast_grp = meta.job.group;
            } else {
                standard_metadata.egress_spec = standard_metadata.ingress_port;
            }
        } else if (meta.verdict == TB_VERDICT_REFLECTED) {
            reflect.apply(hdr, meta);
            sign.apply(hdr, hdr.tb.check);
            standard_metadata.egress_spec = standard_metadata.ingress_port;
        } else {
            mark_to_drop(standard_metadata);
        }
    }
}

#endif
