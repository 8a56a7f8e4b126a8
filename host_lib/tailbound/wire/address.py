"""Addresses of ranks, IPv4 or IPv6, as the maps hold them. A job is of one family."""

from __future__ import annotations

import socket
from typing import NamedTuple

from tailbound.wire.schema import IPV4_BYTES, IPV6_BYTES


class Words(NamedTuple):
    """An address in 32-bit words, network byte order, each read as a host integer."""

    address: int  #: an IPv4 address, or the last 32 bits of an IPv6 one
    prefix: tuple[int, int, int] = (0, 0, 0)  #: the 96 bits before; 0 for IPv4


def is_ipv6(address: str) -> bool:
    """Whether ``address``, an address in text, is of IPv6."""
    return ":" in address


def family_of(address: str) -> socket.AddressFamily:
    """Of sockets for ``address``."""
    return socket.AF_INET6 if is_ipv6(address) else socket.AF_INET


def family_name(address: str) -> str:
    """``IPv4`` or ``IPv6``."""
    return "IPv6" if is_ipv6(address) else "IPv4"


def ip_bytes(address: str) -> int:
    """Bytes of the IP header of packets from ``address``; there are no options."""
    return IPV6_BYTES if is_ipv6(address) else IPV4_BYTES


def is_loopback(address: str) -> bool:
    """Whether only this host can reach ``address``."""
    return address.startswith("127.") or address == "::1"


def endpoint(address: str, port: int) -> str:
    """Both as one word: ``10.0.0.1:5515`` or ``[fd00::1]:5515``."""
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"


def text_of(words: Words) -> str:
    """The other way; whose prefix is 0 is of IPv4, since no rank's address of IPv6 begins with four bytes of 0."""
    raw = b"".join(word.to_bytes(4, "little") for word in (*words.prefix, words.address))
    return socket.inet_ntop(socket.AF_INET6, raw) if any(words.prefix) else socket.inet_ntop(socket.AF_INET, raw[12:])


def words_of(address: str) -> Words:
    """``address`` as ``tb_control`` and ``tb_peer`` have it.

    Raises:
        OSError: not an address.
    """
    raw = socket.inet_pton(family_of(address), address)
    *prefix, last = (int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4))
    return Words(last, (prefix[0], prefix[1], prefix[2])) if prefix else Words(last)
