// SPDX-License-Identifier: Apache-2.0
/*
 * The aggregator for a P4 switch (v1model): wiring only. README.md says what it does and how to run it.
 */
#include <core.p4>
#include <v1model.p4>

#include "egress.p4"
#include "headers.p4"
#include "ingress.p4"
#include "parser.p4"

/* Tailbound's own check is verified in the pipeline: wrong ones are counted, not only dropped. */
control NoVerification(inout headers_t hdr, inout meta_t meta) {
    apply {}
}

control Renumber(inout headers_t hdr, inout meta_t meta) {
    apply {
        update_checksum(meta.renumber == 1,
                        {hdr.ipv4.version, hdr.ipv4.words, hdr.ipv4.service, hdr.ipv4.bytes, hdr.ipv4.id,
                         hdr.ipv4.flags, hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.source,
                         hdr.ipv4.destination},
                        hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

V1Switch(TailboundParser(), NoVerification(), TailboundIngress(), TailboundEgress(), Renumber(),
         TailboundDeparser()) main;
