"""Ethernet frames around Tailbound packets, for test runs of programs, with the checksums that IP asks for."""

from __future__ import annotations

import socket
import struct

from tailbound.wire.address import family_of, is_ipv6

#: Routers that a packet may pass.
_HOPS = 64


def internet_checksum(data: bytes) -> int:
    """Internet checksum (RFC 1071) of an even number of bytes in which it is zero."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame(payload: bytes, source: str, destination: str, source_port: int, port: int) -> bytes:
    """An Ethernet/IP/UDP frame with ``payload`` after UDP. UDP has a checksum over IPv6, and none over IPv4."""
    ethernet = bytes.fromhex("020000000001 020000000002")
    size = 8 + len(payload)
    addresses = b"".join(socket.inet_pton(family_of(address), address) for address in (source, destination))
    udp = struct.pack(">HHHH", source_port, port, size, 0) + payload
    if is_ipv6(source):
        covered = addresses + struct.pack(">II", size, socket.IPPROTO_UDP) + udp + bytes(size % 2)
        udp = udp[:6] + struct.pack(">H", internet_checksum(covered) or 0xFFFF) + udp[8:]
        ip = struct.pack(">IHBB", 6 << 28, size, socket.IPPROTO_UDP, _HOPS) + addresses
        return ethernet + b"\x86\xdd" + ip + udp
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + size, 1, 0x4000, _HOPS, socket.IPPROTO_UDP, 0) + addresses
    ip = ip[:10] + struct.pack(">H", internet_checksum(ip)) + ip[12:]
    return ethernet + b"\x08\x00" + ip + udp
