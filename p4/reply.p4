// SPDX-License-Identifier: Apache-2.0
/* A contribution becomes the result, or a probe its echo: headers only; addresses of receivers are for the egress. */
#ifndef TB_REPLY_P4
#define TB_REPLY_P4

#include "headers.p4"
#include "seal.p4"

/* The mark of what came in is none of what leaves (kernel-26): CE becomes ECT(0) again. The class of service stays. */
control Unmark(inout headers_t hdr, inout meta_t meta) {
    apply {
        if (hdr.ipv4.service[1:0] == 3) {
            hdr.ipv4.service = hdr.ipv4.service & 0xfe;
            meta.renumber = 1;
        }
    }
}

control Result(inout headers_t hdr, inout meta_t meta) {
    Seal() seal;
    Unmark() unmark;

    apply {
        hdr.tb.type_ = TB_TYPE_RESULT;
        hdr.tb.flags = TB_FLAG_SUMS;
        hdr.tb.sender = meta.job.ranks;
        hdr.tb.owner = meta.job.ranks;
        hdr.tb.contributed = hdr.tb.op - 1;
        hdr.tb.published = hdr.tb.op - 1;
        hdr.tb.exponent = meta.exponent;
        if (meta.need != TB_EXPONENT_NONE) {
            hdr.tb.exponent = meta.need + meta.job.headroom;
        }
        hdr.tb.need = meta.need;
        hdr.tb.scale = meta.scale;
        hdr.tb.count = meta.count;
        hdr.tb.weight = 0;
        hdr.tb.pad = 0;
        hdr.tb.deadline = 0;
        hdr.tb.lateness = 0;
        seal.apply(hdr);

        hdr.ethernet.source = meta.job.mac;
        hdr.udp.source = hdr.udp.destination;
        hdr.udp.bytes = hdr.udp.bytes + meta.codes;
        hdr.udp.checksum = 0;
        hdr.ipv4.source = hdr.ipv4.destination;
        hdr.ipv4.bytes = hdr.ipv4.bytes + meta.codes;
        unmark.apply(hdr, meta);
        hdr.ipv4.id = 0;
        hdr.ipv4.flags = 2; // not to be fragmented
        hdr.ipv4.ttl = 64;
    }
}

/* A probe turned round, payload as it was; Verify makes its check anew. */
control Reflect(inout headers_t hdr, inout meta_t meta) {
    Unmark() unmark;

    apply {
        unmark.apply(hdr, meta);
        mac_t mac = hdr.ethernet.destination;
        hdr.ethernet.destination = hdr.ethernet.source;
        hdr.ethernet.source = mac;
        address_t address = hdr.ipv4.destination;
        hdr.ipv4.destination = hdr.ipv4.source;
        hdr.ipv4.source = address;
        bit<16> port = hdr.udp.destination;
        hdr.udp.destination = hdr.udp.source;
        hdr.udp.source = port;
        hdr.udp.checksum = 0;
        hdr.tb.type_ = TB_TYPE_ECHO;
        hdr.tb.owner = hdr.tb.sender;
        hdr.tb.sender = meta.job.ranks;
    }
}

#endif
