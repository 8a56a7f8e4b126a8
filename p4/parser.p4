// SPDX-License-Identifier: Apache-2.0
/*
 * Parser and deparser. What is parsed is sent again as it was, so a foreign packet that looks like one of ours comes to
 * no harm; who is ours is for tables to say (admit.p4).
 */
#ifndef TB_PARSER_P4
#define TB_PARSER_P4

#include "headers.p4"

parser TailboundParser(packet_in packet, out headers_t hdr, inout meta_t meta,
                       inout standard_metadata_t standard_metadata) {
    state start {
        meta.verdict = TB_GO_ON;
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.kind) {
            ETHERTYPE_IPV4: ipv4;
            ETHERTYPE_ARP: arp;
            default: accept;
        }
    }

    state arp {
        packet.extract(hdr.arp);
        transition accept;
    }

    /* Options and fragments are foreign. */
    state ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.version, hdr.ipv4.words, hdr.ipv4.flags, hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (4, 5, 0 &&& 1, 0, PROTOCOL_UDP): udp;
            default: accept;
        }
    }

    state udp {
        packet.extract(hdr.udp);
        meta.codes = hdr.udp.bytes - (UDP_BYTES + TB_HEADER_BYTES);
        meta.chunks = (bit<8>)(meta.codes >> 8);
        meta.rest = meta.codes[7:4];
        transition select(hdr.udp.bytes) {
            0 .. UDP_BYTES + TB_HEADER_BYTES - 1: accept;
            default: tailbound;
        }
    }

    /* A body that is no row of codes, or too long for one, stays where it is. */
    state tailbound {
        packet.extract(hdr.tb);
        transition select(hdr.tb.version, meta.codes[3:0]) {
            (TB_VERSION, 0): codes;
            default: accept;
        }
    }

    state codes {
        transition select(meta.chunks) {
            0: codes128;
            1: codes_a;
            2: codes_ab;
            default: accept;
        }
    }

    state codes_a {
        packet.extract(hdr.codes_a);
        transition codes128;
    }

    state codes_ab {
        packet.extract(hdr.codes_a);
        packet.extract(hdr.codes_b);
        transition codes128;
    }

    state codes128 {
        transition select(meta.rest) {
            8 &&& 8: take128;
            default: codes64;
        }
    }

    state take128 {
        packet.extract(hdr.codes128);
        transition codes64;
    }

    state codes64 {
        transition select(meta.rest) {
            4 &&& 4: take64;
            default: codes32;
        }
    }

    state take64 {
        packet.extract(hdr.codes64);
        transition codes32;
    }

    state codes32 {
        transition select(meta.rest) {
            2 &&& 2: take32;
            default: codes16;
        }
    }

    state take32 {
        packet.extract(hdr.codes32);
        transition codes16;
    }

    state codes16 {
        transition select(meta.rest) {
            1 &&& 1: take16;
            default: accept;
        }
    }

    state take16 {
        packet.extract(hdr.codes16);
        transition accept;
    }
}

control TailboundDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr);
    }
}

#endif
