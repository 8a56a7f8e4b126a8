"""Single packets over a socket that answers as told, and how many leave by one call. Rows leave by the send queue."""

from __future__ import annotations

import errno

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.batch import MAX_BYTES, burst_packets
from tailbound.transport.sender import FULL, Sender

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


@pytest.mark.parametrize(
    ("script", "taken", "errors"),
    [
        ([0], 1, {}),
        *(([number], 0, {errno.errorcode[number]: 1}) for number in (errno.EPERM, errno.ENETUNREACH, errno.EBADF)),
        ([errno.ECONNREFUSED, 0], 1, {"ECONNREFUSED": 1}),  # that belongs to the datagram before
        ([errno.ECONNREFUSED] * 2, 0, {"ECONNREFUSED": 2}),
        ([errno.EAGAIN, errno.EPERM], 0, {"EPERM": 1}),  # what waits may be refused
    ],
)
def test_packets_leave_or_are_counted_as_lost(
    scripted: Scripted, script: list[int], taken: int, errors: dict[str, int]
) -> None:
    scripted.script = script
    sender = Sender([scripted, Scripted()], PEERS)
    sender.send(1, b"a" * 80)
    assert sender.flush()
    counts = sender.counts[1]
    assert scripted.taken == [(PEERS[1], b"a" * 80)] * taken
    assert (counts.packets, counts.bytes, counts.bursts, counts.lost) == (taken, 80 * taken, taken, 1 - taken)
    assert counts.errors == errors


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


def test_the_oldest_give_way_when_too_many_wait(scripted: Scripted) -> None:
    scripted.always = errno.EAGAIN
    sender = Sender([scripted], PEERS)
    sender.send(2, b"oldest")
    for _ in range(1024):
        sender.send(1, b"x")
    assert (len(sender.deferred), sender.counts[2].lost, sender.counts[1].lost) == (1024, 1, 0)


def test_no_socket_and_a_stride_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="at least one that is bound"):
        Sender([], {})
    for stride in (0, -1, MAX_BYTES + 1):
        with pytest.raises(ConfigError, match="give 1"):
            burst_packets(stride)


@pytest.mark.parametrize(("stride", "packets"), [(1472, 44), (80, 64), (8960, 7), (1023, 64), (1024, 63), (65507, 1)])
def test_packets_of_a_burst(stride: int, packets: int) -> None:
    assert burst_packets(stride) == packets
