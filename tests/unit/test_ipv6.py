"""Addresses of IPv6 on the host's side: as words and bytes, through sockets, and never beside those of IPv4."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import pytest

import cases
from support import await_that, greeting
from tailbound.datapath.udp import UdpDatapath
from tailbound.errors import LayoutError
from tailbound.transport.rendezvous import check, describe
from tailbound.transport.sockets import SOCKADDR_BYTES, sending_socket, sockaddr
from tailbound.wire import packets
from tailbound.wire.address import Words, endpoint, ip_bytes, is_loopback, words_of
from tailbound.wire.schema import PacketType, Verdict

OWN = "::1"


def test_words_of_addresses() -> None:
    assert words_of("198.18.0.2") == Words(0x020012C6)
    assert words_of("fd00:1:2:3:4:5:6:7") == Words(0x07000600, (0x010000FD, 0x03000200, 0x05000400))
    assert words_of("fd00:1::") == (0, (0x010000FD, 0, 0))
    for wrong in ("fd00::1::2", "fe80::1%lo", "198.18.0", "here", ""):
        with pytest.raises(OSError, match=r"."):
            words_of(wrong)


def test_addresses_of_sockets() -> None:
    """``sockaddr_in6`` of RFC 3493: family, port, flow, address, scope."""
    assert sockaddr(("fd00::2", 0x1234)) == bytes.fromhex("0a00 1234 00000000" + "fd" + "00" * 14 + "02" + "00" * 8)
    assert sockaddr(("198.18.0.2", 0x1234)) == bytes.fromhex("0200 1234 c6120002").ljust(SOCKADDR_BYTES, b"\0")
    assert (endpoint("fd00::2", 9), endpoint("10.0.0.2", 9)) == ("[fd00::2]:9", "10.0.0.2:9")
    assert (ip_bytes("fd00::1"), ip_bytes("10.0.0.1")) == (40, 20)
    assert [is_loopback(a) for a in ("::1", "127.0.1.1", "fd00::1", "1.127.0.0")] == [True, True, False, False]


_two = partial(greeting, ranks=2)


def test_a_job_is_of_one_family() -> None:
    with pytest.raises(LayoutError, match=r"rank 0 is at 10\.0\.0\.1 and rank 1 at fd00::2: .* all over IPv6; give"):
        check([_two(0, address="10.0.0.1"), _two(1, address="fd00::2")])
    with pytest.raises(LayoutError, match=r"rank 1 is at ::1 and rank 0 at fd00::2: a loopback address"):
        check([_two(0, address="fd00::2"), _two(1, address="::1")])
    both = [_two(0, address="fd00::1"), _two(1, address="fd00::2")]
    check(both)
    assert describe(both) == {"0": "[fd00::1]:5515 (udp)", "1": "[fd00::2]:5515 (udp)"}


@pytest.fixture
def path() -> Iterator[UdpDatapath]:
    """Rank 0 of ``cases`` on loopback; all other ranks are there, too."""
    made = UdpDatapath(OWN, 0, cases.WIDTH, cases.SUM_ROWS, cases.RESULT_ROWS)
    address, prefix = words_of(OWN)
    made.store.peers[1 : cases.RANKS] = (address, 1, prefix, 0)
    for name, value in cases.control_values().items():
        made.store.control[name][0] = value
    yield made
    made.close()


def counted(path: UdpDatapath, sender: int, verdict: Verdict) -> int:
    return int(path.store.ledger["verdict"][sender, verdict])


def test_packets_by_sockets(path: UdpDatapath) -> None:
    """Sums, marks by the traffic class, a source that is compared in all its words, and echoes."""
    out = sending_socket(OWN, 1 << 16)
    with out:
        out.setblocking(True)
        out.settimeout(10)
        assert out.send_one(cases.contribution(), path.endpoint) == 0
        await_that(lambda: counted(path, 1, Verdict.STORED), "a row")
        out.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 3)
        assert out.send_one(cases.contribution(2), path.endpoint) == 0
        await_that(lambda: counted(path, 2, Verdict.ADDED), "another row")
        await_that(lambda: int(path.store.peer_states["marked"][2]) == 1, "its mark")
        out.send_one(cases.control_packet(PacketType.PROBE, bytes(range(16)), sender=3), path.endpoint)
        echo, (host, port, *_) = out.recvfrom(1 << 16)
        assert (host, port) == path.endpoint
        head, body = packets.parse(echo) or pytest.fail("no packet")
        assert (head["type"][0], head["owner"][0], body) == (PacketType.ECHO, 3, bytes(range(16)))
        for word in range(3):
            path.store.peers["prefix"][1] = [word == i for i in range(3)]
            out.send_one(cases.contribution(), path.endpoint)
            await_that(lambda n=word + 1: counted(path, 256, Verdict.WRONG_ADDRESS) == n, "a refusal")
