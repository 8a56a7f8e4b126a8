"""Ethernet frames around Tailbound packets, for test runs of programs: no checksums are needed there but IPv4's."""

from __future__ import annotations

import socket
import struct


def ipv4_checksum(head: bytes) -> int:
    """Internet checksum (RFC 1071) of an IPv4 header whose checksum field is zero."""
    total: int = sum(struct.unpack(f">{len(head) // 2}H", head))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(payload: bytes, source: str, destination: str, source_port: int, port: int) -> bytes:
    """An Ethernet/IPv4/UDP frame with ``payload`` after UDP."""
    ethernet = bytes.fromhex("020000000001 020000000002 0800")
    size = 20 + 8 + len(payload)
    addresses = socket.inet_aton(source) + socket.inet_aton(destination)
    ip = struct.pack(">BBHHHBBH", 0x45, 0, size, 1, 0x4000, 64, socket.IPPROTO_UDP, 0) + addresses
    ip = ip[:10] + struct.pack(">H", ipv4_checksum(ip)) + ip[12:]
    return ethernet + ip + struct.pack(">HHHH", source_port, port, 8 + len(payload), 0) + payload
