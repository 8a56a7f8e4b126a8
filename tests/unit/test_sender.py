"""The sender over real sockets, and over one whose system calls fail as told."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from tailbound.errors import ConfigError
from tailbound.transport.sender import Sender

ADDRESS = "127.0.0.1"


class Scripted(socket.socket):
    """A UDP socket whose ``sendmsg`` fails with the errnos of ``script``, one a call; then it records and succeeds."""

    script: list[int]
    always: int = 0

    def sendmsg(self, buffers, ancillary=(), flags=0, address=None):
        self.calls.append((b"".join(buffers), ancillary, address))
        number = self.script.pop(0) if self.script else self.always
        if number:
            raise OSError(number, "scripted")
        return len(self.calls[-1][0])


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.script, sock.calls = [], []
        yield sock


def memory(count: int, stride: int = 128, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, stride), np.uint8)


def received(sock: socket.socket, count: int) -> list[bytes]:
    out = []
    for _ in range(count):
        assert select.select([sock], [], [], 5)[0], f"only {len(out)} of {count} datagrams"
        out.append(sock.recv(65536))
    assert not select.select([sock], [], [], 0)[0]
    return out


def test_packets_arrive_whole_and_in_order(bound: socket.socket, receivers: list[socket.socket]) -> None:
    sender = Sender([bound], {1: receivers[0].getsockname()})
    packets = memory(150)
    assert sender.send(1, packets) == 150
    assert received(receivers[0], 150) == [p.tobytes() for p in packets]
    counts = sender.counts[1]
    assert (counts.packets, counts.bytes, counts.bursts, counts.errors) == (150, packets.nbytes, 3, {})


def test_only_the_first_packets(bound: socket.socket, receivers: list[socket.socket]) -> None:
    sender = Sender([bound], {1: receivers[0].getsockname()})
    packets = memory(10)
    assert sender.send(1, packets, 3) == 3
    assert received(receivers[0], 3) == [p.tobytes() for p in packets[:3]]
    assert sender.send(1, packets, 0) == 0


def test_runs_to_several_peers_share_memory(bound: socket.socket, receivers: list[socket.socket]) -> None:
    sender = Sender([bound], {r: sock.getsockname() for r, sock in enumerate(receivers)})
    packets = memory(70)
    assert sender.send_runs([(2, packets), (0, packets), (1, packets[:5])]) == 145
    assert received(receivers[0], 70) == received(receivers[2], 70) == [p.tobytes() for p in packets]
    assert received(receivers[1], 5) == [p.tobytes() for p in packets[:5]]
    assert sender.packets == 145


def test_bursts_leave_over_a_socket_of_their_peer_and_single_packets_over_the_first(
    bound: socket.socket, receivers: list[socket.socket]
) -> None:
    others = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    try:
        for other in others:
            other.bind((ADDRESS, 0))
        sender = Sender([bound, *others], {r: sock.getsockname() for r, sock in enumerate(receivers)})
        for rank, receiver in enumerate(receivers):
            sender.send(rank, memory(65))
            sources = [receiver.recvfrom(65536)[1] for _ in range(65)]
            assert sources == [others[rank % 2].getsockname()] * 64 + [bound.getsockname()]
    finally:
        for other in others:
            other.close()


def test_bursts_take_turns(scripted: Scripted) -> None:
    asked = []
    sender = Sender([scripted], {1: ("a", 1), 2: ("b", 2)}, pace=lambda rank, size: asked.append((rank, size)) or -1.0)
    sender.send_runs([(2, memory(100)), (1, memory(65))])
    assert [address for _, _, address in scripted.calls] == [("b", 2), ("a", 1), ("b", 2), ("a", 1)]
    assert [len(data) // 128 for data, _, _ in scripted.calls] == [64, 64, 36, 1]
    assert asked == [(2, 64 * 128), (1, 64 * 128), (2, 36 * 128), (1, 128)]
    assert scripted.calls[0][1] == [(17, 103, (128).to_bytes(2, "little"))]
    assert scripted.calls[3][1] == []  # one packet needs no segmentation


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EOPNOTSUPP])
def test_without_gso_packets_go_one_by_one_from_then_on(scripted: Scripted, number: int) -> None:
    scripted.script = [number]
    sender = Sender([scripted], {1: ("a", 1), 2: ("b", 2)})
    packets = memory(3)
    assert sender.send(1, packets) == 3
    assert [(data, ancillary) for data, ancillary, _ in scripted.calls[1:]] == [(p.tobytes(), []) for p in packets]
    assert sender.send(1, packets) == 3
    assert len(scripted.calls) == 7
    assert sender.send(2, packets) == 3  # another path may well do GSO
    assert len(scripted.calls) == 8
    assert sender.counts[1].errors == {errno.errorcode[number]: 1}
    assert sender.counts[1].lost == 0


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EMSGSIZE, errno.EBADF])
def test_refused_bursts_are_counted_not_raised(scripted: Scripted, number: int) -> None:
    scripted.always = number
    sender = Sender([scripted], {1: ("a", 1)})
    assert sender.send(1, memory(70)) == 0
    assert sender.counts[1].errors == {errno.errorcode[number]: 2}
    assert (sender.counts[1].lost, sender.counts[1].packets) == (70, 0)


def test_a_refused_connection_belongs_to_the_datagram_before(scripted: Scripted) -> None:
    scripted.script = [errno.ECONNREFUSED]
    sender = Sender([scripted], {1: ("a", 1)})
    assert sender.send(1, memory(5)) == 5
    assert sender.counts[1].errors == {"ECONNREFUSED": 1}
    scripted.always = errno.ECONNREFUSED
    assert sender.send(1, memory(5)) == 0
    assert sender.counts[1].errors == {"ECONNREFUSED": 3}


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM])
def test_a_full_socket_is_waited_for(scripted: Scripted, number: int) -> None:
    scripted.script = [number, number]
    sender = Sender([scripted], {1: ("a", 1)}, patience=10)
    assert sender.send(1, memory(5)) == 5
    assert (sender.counts[1].waits, sender.counts[1].errors, sender.counts[1].lost) == (2, {}, 0)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOBUFS])
def test_but_not_for_ever(scripted: Scripted, number: int) -> None:
    scripted.always = number
    sender = Sender([scripted], {1: ("a", 1)}, patience=0.01)
    assert sender.send(1, memory(5)) == 0
    assert (sender.counts[1].lost, sender.counts[1].errors) == (5, {errno.errorcode[number]: 1})
    assert sender.counts[1].waits >= 1


def test_a_closed_socket_loses_packets_only(bound: socket.socket) -> None:
    sender = Sender([bound], {1: (ADDRESS, 9)})
    bound.close()
    assert sender.send(1, memory(5)) == 0
    assert sender.counts[1].errors == {"EBADF": 1}


def test_a_single_control_packet(bound: socket.socket, receivers: list[socket.socket]) -> None:
    sender = Sender([bound], {1: receivers[0].getsockname()})
    assert sender.send_burst(1, b"x" * 80, 1 << 16) == 1
    assert received(receivers[0], 1) == [b"x" * 80]


def test_no_socket() -> None:
    with pytest.raises(ConfigError, match="at least one bound socket"):
        Sender([], {})
