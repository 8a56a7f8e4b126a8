"""Addresses of IPv6 on the host's side: as words and bytes, through sockets, and never beside those of IPv4."""

from __future__ import annotations

import contextlib
import socket
from functools import partial

import pytest

import cases
from support import await_that, greeting
from tailbound.datapath.udp import UdpDatapath
from tailbound.errors import LayoutError
from tailbound.transport.rendezvous import check
from tailbound.transport.sockets import sending_socket
from tailbound.wire.address import Words, endpoint, words_of
from tailbound.wire.schema import Verdict

OWN = "::1"


def test_words_of_addresses() -> None:
    assert words_of("198.18.0.2") == Words(0x020012C6)
    assert words_of("fd00:1:2:3:4:5:6:7") == Words(0x07000600, (0x010000FD, 0x03000200, 0x05000400))


_two = partial(greeting, ranks=2)


def test_a_job_is_of_one_family() -> None:
    with pytest.raises(LayoutError, match=r"rank 0 is at 10\.0\.0\.1 and rank 1 at fd00::2: .* all over IPv6; give"):
        check([_two(0, address="10.0.0.1"), _two(1, address="fd00::2")])
    with pytest.raises(LayoutError, match=r"rank 1 is at ::1 and rank 0 at fd00::2: a loopback address"):
        check([_two(0, address="fd00::2"), _two(1, address="::1")])
    check([_two(0, address="fd00::1"), _two(1, address="fd00::2")])
    assert endpoint("fd00::1", 5515) == "[fd00::1]:5515"


def test_marks_come_with_the_traffic_class() -> None:
    """Rule: kernel-26."""
    path = UdpDatapath("::1", 0, cases.WIDTH, cases.SUM_ROWS, cases.RESULT_ROWS)
    path.store.peers[1 : cases.RANKS] = (words_of("::1").address, 1, words_of("::1").prefix, 0)
    for name, value in cases.control_values().items():
        path.store.control[name][0] = value
    with contextlib.closing(path), sending_socket("::1", 1 << 16) as out:
        out.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 3)
        assert out.send_one(cases.contribution(2), path.endpoint) == 0
        await_that(lambda: int(path.store.ledger["verdict"][2, Verdict.STORED]) == 1, "a row")
        await_that(lambda: int(path.store.peer_states["marked"][2]) == 1, "its mark")
