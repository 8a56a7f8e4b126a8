// SPDX-License-Identifier: Apache-2.0
/* Once for every copy: a result's receiver becomes its destination. */
#ifndef TB_EGRESS_P4
#define TB_EGRESS_P4

#include "drops.p4"
#include "headers.p4"

control TailboundEgress(inout headers_t hdr, inout meta_t meta, inout standard_metadata_t standard_metadata) {
    counter(TB_PORTS, CounterType.packets_and_bytes) results;
    counter(TB_PORTS, CounterType.packets_and_bytes) answers;
    Drops() drops;

    action discard() {
        mark_to_drop(standard_metadata);
    }

    action send_to(mac_t mac, address_t address) {
        hdr.ethernet.destination = mac;
        hdr.ipv4.destination = address;
    }

    /* The replication id of a copy is the rank it is for. */
    table receivers {
        key = {
            meta.job.index: exact;
            meta.rank: exact;
        }
        actions = {
            send_to;
            discard;
        }
        size = TB_JOBS * TB_RANKS;
        default_action = discard();
    }

    apply {
        bool lost = false;
        if (meta.reply == 1) {
            if (meta.broadcast == 1) {
                meta.rank = (rank_t)standard_metadata.egress_rid;
            }
            drops.apply(standard_metadata.egress_port, lost);
            if (lost || !receivers.apply().hit) {
                discard();
            } else if (meta.broadcast == 1) {
                results.count((bit<32>)standard_metadata.egress_port);
            } else {
                answers.count((bit<32>)standard_metadata.egress_port);
            }
        } else if (standard_metadata.mcast_grp != 0 &&
                   standard_metadata.egress_port == standard_metadata.ingress_port) {
            discard(); // a flooded packet does not go back
        }
    }
}

#endif
