"""Changes at given times: in order, undone at the end, and their errors raised."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault, Way
from tailbound_lab.lab.timeline import Timeline
from tailbound_lab.lab.topology import Link

PATIENCE = 20.0
Make = Callable[..., Cluster]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    yield process
    process.kill()
    process.communicate()


def _state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_changes_come_in_order_of_time_and_not_before_it() -> None:
    order: list[str] = []
    timeline = Timeline()
    timeline.call(0.05, lambda: order.append("second")).call(0.0, lambda: order.append("first"))
    timeline.call(0.05, lambda: order.append("third"))
    with timeline:
        assert timeline.wait(PATIENCE)
    assert order == ["first", "second", "third"]
    assert timeline.done[1] >= 0.05
    with pytest.raises(ValueError, match="before the timeline begins"):
        timeline.call(1.0, lambda: None)
    with pytest.raises(ValueError, match="no lab"):
        Timeline().cut(0.0, 1)


def test_what_is_to_be_undone_is_undone_when_it_ends_early() -> None:
    order: list[str] = []
    began = threading.Event()
    timeline = Timeline().call(0.0, began.set)
    timeline.call(1000.0, lambda: order.append("never")).call(2000.0, lambda: order.append("back"), always=True)
    with timeline:
        assert began.wait(PATIENCE)
    assert order == ["back"]


def test_an_error_is_raised_at_the_end_and_stops_nothing() -> None:
    order: list[str] = []
    timeline = Timeline().call(0.0, lambda: 1 // 0).call(0.001, lambda: order.append("next"))
    with pytest.raises(ZeroDivisionError), timeline:
        assert timeline.wait(PATIENCE)
    assert order == ["next"]


def test_a_process_stands_still_and_goes_on(sleeper: subprocess.Popen[bytes]) -> None:
    with Timeline().stop(0.0, sleeper, seconds=1000.0):
        _until(lambda: _state(sleeper) == "T")
    _until(lambda: _state(sleeper) != "T")
    with Timeline().stop(0.0, sleeper, seconds=0.01) as timeline:
        assert timeline.wait(PATIENCE)
        assert timeline.done[1] >= 0.01
        _until(lambda: _state(sleeper) != "T")


def test_a_process_is_killed_once(sleeper: subprocess.Popen[bytes]) -> None:
    with Timeline().kill(0.0, sleeper).kill(0.01, sleeper) as timeline:
        assert timeline.wait(PATIENCE)
        assert sleeper.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")
def test_links_change_and_come_back(tailbound_lab: Make, datagram_socket: Callable[..., socket.socket]) -> None:
    lab = tailbound_lab(workers=2, cables=True)
    receiver, sender = datagram_socket(lab, 1), datagram_socket(lab, 0)
    middle = [threading.Event() for _ in range(3)]
    go = [threading.Event() for _ in range(3)]

    def pause(number: int) -> Callable[[], None]:
        return lambda: (middle[number].set(), go[number].wait(PATIENCE))[0]

    def through() -> bool:
        receiver.settimeout(0.2)
        sender.sendto(b"x", receiver.getsockname())
        try:
            return receiver.recv(10) == b"x"
        except TimeoutError:
            return False

    timeline = Timeline(lab).cut(0.0, 1, seconds=0.002).call(0.001, pause(0))
    timeline.faults(0.003, Fault(loss=0.999999), 0, seconds=0.002, link=Link.DATA, way=Way.FROM_WORKER)
    timeline.call(0.004, pause(1)).rate(0.006, 1, 1_000_000, seconds=0.002).call(0.007, pause(2))
    with timeline:
        for number in range(3):
            assert middle[number].wait(PATIENCE)
            assert through() == (number == 2)
            go[number].set()
        assert timeline.wait(PATIENCE)
    assert through()


@pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")
def test_loss_in_one_direction(tailbound_lab: Make, datagram_socket: Callable[..., socket.socket]) -> None:
    """The whole of the loss at one end, and none for what goes the other way."""
    lab = tailbound_lab(workers=2, cables=True)
    lab.set_faults(Fault(loss=0.5), 1, Link.DATA, Way.FROM_WORKER)
    here, there = datagram_socket(lab, 0), datagram_socket(lab, 1)
    for each in (here, there):
        each.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
    for _ in range(400):
        here.sendto(b"to", there.getsockname())
        there.sendto(b"from", here.getsockname())
    lab.set_faults(Fault(), 1, Link.DATA)
    for a, b in ((here, there), (there, here)):
        a.sendto(b"end", b.getsockname())
    came: list[list[bytes]] = [[], []]
    for i, each in enumerate((here, there)):
        while (data := each.recv(10)) != b"end":
            came[i].append(data)
    assert len(came[1]) == 400
    assert 140 < len(came[0]) < 260
    assert lab.fault_counts(1, Link.DATA).lost == 400 - len(came[0])
    assert lab.fault_counts(0).lost == 0


@pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")
def test_packets_pass_each_other(tailbound_lab: Make, datagram_socket: Callable[..., socket.socket]) -> None:
    """Out of order, once each, none lost: they leave past the queue that the others wait in."""
    lab = tailbound_lab(workers=2, cables=True)
    lab.set_rate(1, 20_000_000)  # the sender has none: its own would let nothing wait in the cables
    lab.set_faults(Fault(reorder=0.2), 1, Link.DATA)
    receiver, sender = datagram_socket(lab, 1), datagram_socket(lab, 0)
    receiver.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
    for number in range(200):
        sender.sendto(number.to_bytes(2) + bytes(1000), receiver.getsockname())
    came = [int.from_bytes(receiver.recv(2000)[:2]) for _ in range(200)]
    assert sorted(came) == list(range(200))
    assert came != sorted(came)
    assert lab.fault_counts(1, Link.DATA).reordered > 10
