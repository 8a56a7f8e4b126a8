// SPDX-License-Identifier: Apache-2.0
/*
 * Headers of a packet, in the order in which they are parsed and sent, and what the pipeline notes of it.
 *
 * Codes come as up to two chunks of 256 and a rest of 128, 64, 32 and 16, as the bits of their number say. Sums are
 * twice as wide, and a value has at most 2048 bits: a chunk of codes becomes two headers of sums.
 */
#ifndef TB_HEADERS_P4
#define TB_HEADERS_P4

#include "sizes.p4"
#include "wire.p4"

const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<16> ETHERTYPE_ARP = 0x0806;
const bit<8> PROTOCOL_UDP = 17;
const bit<16> ETHERNET_BYTES = 14;
const bit<16> IPV4_BYTES = 20;
const bit<16> UDP_BYTES = 8;

header ethernet_t {
    mac_t destination;
    mac_t source;
    bit<16> kind;
}

header arp_t {
    bit<48> kind; // Ethernet, IPv4, lengths 6 and 4
    bit<16> operation;
    mac_t sender_mac;
    address_t sender;
    mac_t target_mac;
    address_t target;
}

header ipv4_t {
    bit<4> version;
    bit<4> words;
    bit<8> service;
    bit<16> bytes;
    bit<16> id;
    bit<3> flags;
    bit<13> fragment;
    bit<8> ttl;
    bit<8> protocol;
    bit<16> checksum;
    address_t source;
    address_t destination;
}

header udp_t {
    bit<16> source;
    bit<16> destination;
    bit<16> bytes;
    bit<16> checksum;
}

header bits2048_t { bit<2048> bits; }
header bits1024_t { bit<1024> bits; }
header bits512_t { bit<512> bits; }
header bits256_t { bit<256> bits; }
header bits128_t { bit<128> bits; }

struct headers_t {
    ethernet_t ethernet;
    arp_t arp;
    ipv4_t ipv4;
    udp_t udp;
    tb_header_t tb;
    // codes, of contributions
    bits2048_t codes_a;
    bits2048_t codes_b;
    bits1024_t codes128;
    bits512_t codes64;
    bits256_t codes32;
    bits128_t codes16;
    // sums, of results
    bits2048_t sums_a0;
    bits2048_t sums_a1;
    bits2048_t sums_b0;
    bits2048_t sums_b1;
    bits2048_t sums128;
    bits1024_t sums64;
    bits512_t sums32;
    bits256_t sums16;
}

/* What a job's entry says, and which one it is. */
struct job_entry_t {
    job_t index;
    bit<32> cookie;
    rank_t ranks; // number of workers, and the rank of the switch
    slot_t base;
    slot_t mask; // slots - 1, a power of two less one
    int<16> headroom;
    group_t group;
    mac_t mac; // the switch's
}

struct meta_t {
    job_entry_t job;
    bit<1> ours; // a job has this port and address
    bit<1> trusted; // sender and check are right: it is charged to its sender
    bit<1> reply; // the packet has become a result
    bit<1> broadcast; // ... for all ranks; else for its sender
    bit<1> renumber; // the IPv4 checksum has to be made anew
    verdict_t verdict;
    bit<16> codes; // codes in the packet
    bit<8> chunks; // whole chunks of 256 among them
    bit<4> rest; // the rest in steps of 16
    rank_t rank; // the sender; of a copy of a result: its receiver
    slot_t slot;
    // what the slot says of its row
    bit<16> count;
    int<16> need;
    int<16> exponent;
    bit<32> scale;
}

#endif
