// SPDX-License-Identifier: Apache-2.0
/*
 * Whose packet it is, and whether it may be summed: everything up to the slot. The order of the rules is that of the
 * XDP switch (xdp_programs/aggregate.h); the check is made between the two halves.
 */
#ifndef TB_ADMIT_P4
#define TB_ADMIT_P4

#include "headers.p4"

/* Job, form and sender. */
control Admit(in headers_t hdr, inout meta_t meta, in standard_metadata_t standard_metadata) {
    address_t registered = 0;
    bit<9> port = 0;

    action serve(job_t index) {
        meta.ours = 1;
        meta.job.index = index;
    }

    /* Addresses and ports that jobs listen at; several jobs may share them. What has no cookie is charged to `index`. */
    table services {
        key = {
            hdr.ipv4.destination: exact;
            hdr.udp.destination: exact;
        }
        actions = {
            serve;
            NoAction;
        }
        size = TB_JOBS;
        default_action = NoAction();
    }

    action join(job_t index, rank_t ranks, slot_t base, slot_t mask, int<16> headroom, group_t group, mac_t mac) {
        meta.job.index = index;
        meta.job.cookie = hdr.tb.cookie;
        meta.job.ranks = ranks;
        meta.job.base = base;
        meta.job.mask = mask;
        meta.job.headroom = headroom;
        meta.job.group = group;
        meta.job.mac = mac;
    }

    action refuse_cookie() {
        meta.verdict = TB_VERDICT_WRONG_COOKIE;
    }

    table jobs {
        key = {
            hdr.ipv4.destination: exact;
            hdr.udp.destination: exact;
            hdr.tb.cookie: exact;
        }
        actions = {
            join;
            refuse_cookie;
        }
        size = TB_JOBS;
        default_action = refuse_cookie();
    }

    /* A worker sends with its address, by the port towards it. */
    action know(address_t address, bit<9> towards) {
        registered = address;
        port = towards;
    }

    action refuse_rank() {
        meta.verdict = TB_VERDICT_UNKNOWN_RANK;
    }

    table senders {
        key = {
            meta.job.index: exact;
            hdr.tb.sender: exact;
        }
        actions = {
            know;
            refuse_rank;
        }
        size = TB_JOBS * TB_RANKS;
        default_action = refuse_rank();
    }

    apply {
        if (!hdr.udp.isValid() || !services.apply().hit) {
            return;
        }
        meta.rank = hdr.tb.sender;
        bool row = hdr.tb.type_ == TB_TYPE_CONTRIBUTION || hdr.tb.type_ == TB_TYPE_RESULT;
        // the frame has to end where the IP packet ends, and that where UDP does
        if (hdr.ipv4.bytes != IPV4_BYTES + hdr.udp.bytes ||
            standard_metadata.packet_length != (bit<32>)(ETHERNET_BYTES + hdr.ipv4.bytes) || !hdr.tb.isValid() ||
            meta.codes[3:0] != 0 || meta.codes > TB_CODES || (meta.codes == 0 && row)) {
            meta.verdict = TB_VERDICT_BAD_LENGTH;
        } else if (hdr.tb.version != TB_VERSION) {
            meta.verdict = TB_VERDICT_BAD_VERSION;
        } else if (hdr.tb.type_ < TB_TYPE_CONTRIBUTION || hdr.tb.type_ > TB_TYPE_LAST) {
            meta.verdict = TB_VERDICT_BAD_TYPE;
        } else if (jobs.apply().hit) {
            if (senders.apply().hit &&
                (registered != hdr.ipv4.source || port != standard_metadata.ingress_port)) {
                meta.verdict = TB_VERDICT_WRONG_ADDRESS;
            }
        }
    }
}

/* What the check has shown to be as it was sent. */
control Address(in headers_t hdr, inout meta_t meta) {
    apply {
        meta.trusted = 1;
        meta.slot = meta.job.base + (hdr.tb.seq & meta.job.mask);
        if (hdr.tb.owner != meta.job.ranks) {
            meta.verdict = TB_VERDICT_NOT_FOR_THIS_RANK;
        } else if (hdr.tb.type_ == TB_TYPE_PROBE) {
            meta.verdict = TB_VERDICT_REFLECTED;
        } else if (hdr.tb.type_ != TB_TYPE_CONTRIBUTION) {
            meta.verdict = TB_VERDICT_BAD_TYPE;
        } else if (hdr.tb.row >= hdr.tb.rows) {
            meta.verdict = TB_VERDICT_SLOT_OUT_OF_RANGE;
        } else if (hdr.tb.weight != 1) {
            meta.verdict = TB_VERDICT_BAD_WEIGHT;
        }
    }
}

#endif
