// SPDX-License-Identifier: Apache-2.0
/*
 * What is not for the aggregator: an Ethernet switch with static entries, and an answer to ARP for the switch's
 * addresses.
 */
#ifndef TB_FORWARD_P4
#define TB_FORWARD_P4

#include "headers.p4"

const bit<48> ARP_ETHERNET_IPV4 = 0x000108000604;
const bit<16> ARP_REQUEST = 1;
const bit<16> ARP_REPLY = 2;

control Forward(inout headers_t hdr, inout standard_metadata_t standard_metadata) {
    action discard() {
        mark_to_drop(standard_metadata);
    }

    action send(port_t port) {
        standard_metadata.egress_spec = port;
    }

    /* To all ports but the one it came from (egress.p4). */
    action flood(group_t group) {
        standard_metadata.mcast_grp = group;
    }

    table macs {
        key = {
            hdr.ethernet.destination: exact;
        }
        actions = {
            send;
            flood;
            discard;
        }
        size = 1024;
        default_action = discard();
    }

    action answer(mac_t mac) {
        hdr.arp.operation = ARP_REPLY;
        hdr.arp.target_mac = hdr.arp.sender_mac;
        address_t asked = hdr.arp.target;
        hdr.arp.target = hdr.arp.sender;
        hdr.arp.sender_mac = mac;
        hdr.arp.sender = asked;
        hdr.ethernet.destination = hdr.ethernet.source;
        hdr.ethernet.source = mac;
        standard_metadata.egress_spec = standard_metadata.ingress_port;
    }

    table neighbours {
        key = {
            hdr.arp.target: exact;
        }
        actions = {
            answer;
            NoAction;
        }
        size = TB_JOBS;
        default_action = NoAction();
    }

    apply {
        if (hdr.arp.isValid() && hdr.arp.kind == ARP_ETHERNET_IPV4 && hdr.arp.operation == ARP_REQUEST) {
            if (neighbours.apply().hit) {
                return;
            }
        }
        macs.apply();
    }
}

#endif
