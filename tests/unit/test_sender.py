"""Single packets: over a real socket, and over one that answers as told. Rows leave by the send queue."""

from __future__ import annotations

import errno
import select
import socket

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.sender import FULL, Sender
from tailbound.transport.sockets import UdpSocket

ADDRESS = "127.0.0.1"
PEERS = {1: ("192.0.2.1", 5), 2: ("192.0.2.2", 5)}


class Scripted:
    """A ``Socket`` that refuses with the errnos of ``script``, one a packet, then with ``always``; 0: it takes it."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.always = 0
        self.taken: list[tuple[tuple[str, int], bytes]] = []

    def fileno(self) -> int:
        return -1

    def room(self) -> int:
        return 0

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        number = self.script.pop(0) if self.script else self.always
        if not number:
            self.taken.append((target, packet))
        return number

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        raise AssertionError("single packets only")


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


def test_a_packet_arrives_and_is_counted(bound: UdpSocket, receivers: list[socket.socket]) -> None:
    sender = Sender([bound], {1: receivers[0].getsockname()})
    sender.send(1, b"x" * 80)
    assert select.select([receivers[0]], [], [], 5)[0]
    assert receivers[0].recvfrom(65536) == (b"x" * 80, bound.getsockname())
    counts = sender.counts[1]
    assert (counts.packets, counts.bytes, counts.bursts, counts.lost, counts.errors) == (1, 80, 1, 0, {})
    assert not sender.deferred


def test_single_packets_leave_over_the_first_socket(bound: UdpSocket, receivers: list[socket.socket]) -> None:
    with UdpSocket() as other:
        other.bind((ADDRESS, 0))
        sender = Sender([bound, other], {1: receivers[0].getsockname()})
        sender.send(1, b"x" * 80)
        assert receivers[0].recvfrom(65536)[1] == bound.getsockname()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EMSGSIZE, errno.EBADF])
def test_refused_packets_are_counted_not_raised(scripted: Scripted, number: int) -> None:
    scripted.always = number
    sender = Sender([scripted], PEERS)
    sender.send(1, b"x" * 80)
    counts = sender.counts[1]
    assert (counts.errors, counts.lost, counts.packets) == ({errno.errorcode[number]: 1}, 1, 0)
    assert not sender.deferred


def test_a_refused_connection_belongs_to_the_datagram_before(scripted: Scripted) -> None:
    sender = Sender([scripted], PEERS)
    scripted.script = [errno.ECONNREFUSED]
    sender.send(1, b"a")
    assert (scripted.taken, sender.counts[1].lost) == ([(PEERS[1], b"a")], 0)
    scripted.always = errno.ECONNREFUSED
    sender.send(1, b"b")
    assert (sender.counts[1].lost, sender.counts[1].errors) == (1, {"ECONNREFUSED": 3})


@pytest.mark.parametrize("number", FULL)
def test_what_finds_no_room_leaves_later_in_its_order(scripted: Scripted, number: int) -> None:
    scripted.always = number
    sender = Sender([scripted], PEERS)
    for i in range(3):
        sender.send(1 + i % 2, bytes([i]))
    assert not sender.flush()
    assert (sender.counts[1].waits, sender.counts[1].errors, sender.counts[1].lost) == (2, {}, 0)
    scripted.script, scripted.always = [0, number], 0
    assert not sender.flush()
    assert sender.flush()
    assert scripted.taken == [(PEERS[1], b"\0"), (PEERS[2], b"\1"), (PEERS[1], b"\2")]
    assert sender.packets == 3


def test_what_waits_may_be_refused(scripted: Scripted) -> None:
    scripted.script = [errno.EAGAIN, errno.EPERM]
    sender = Sender([scripted], PEERS)
    sender.send(1, b"a")
    assert sender.flush()
    assert (sender.counts[1].lost, sender.counts[1].errors) == (1, {"EPERM": 1})


def test_the_oldest_give_way_when_too_many_wait(scripted: Scripted) -> None:
    scripted.always = errno.EAGAIN
    sender = Sender([scripted], PEERS)
    sender.send(2, b"oldest")
    for _ in range(1024):
        sender.send(1, b"x")
    assert (len(sender.deferred), sender.counts[2].lost, sender.counts[1].lost) == (1024, 1, 0)


def test_a_closed_socket_loses_packets_only(bound: UdpSocket) -> None:
    sender = Sender([bound], {1: (ADDRESS, 9)})
    bound.close()
    sender.send(1, b"x")
    assert (sender.counts[1].lost, sender.counts[1].errors) == (1, {"EBADF": 1})


def test_no_socket() -> None:
    with pytest.raises(ConfigError, match="at least one that is bound"):
        Sender([], {})
