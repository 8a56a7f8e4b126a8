"""Foreign traffic: what is sent when, and that it takes its share of a worker's cable."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable

import pytest

from support import PATIENCE
from tailbound.errors import ConfigError
from tailbound.settings.kinds import parse_rate
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.counters import InterfaceCounters
from tailbound_lab.lab.spec import Background, parse_background
from tailbound_lab.lab.topology import Link
from tailbound_lab.lab.traffic import Sender, schedule

Make = Callable[..., Cluster]
BACKGROUND = Background(800_000_000, 50.0, 450.0)


def test_a_background_is_read_and_written() -> None:
    assert parse_background("800mbit:50:450") == BACKGROUND
    assert parse_background(str(BACKGROUND)) == BACKGROUND


@pytest.mark.parametrize(
    "text",
    ["", "1gbit", "1gbit:10", "fast:10:10", "1gbit:x:10", "1gbit:0:10", "1gbit:10:0", "100gbit:1:1", "1gbit:1:1:1"],
)
def test_a_background_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"back|rate"):
        parse_background(text)


def test_schedules_follow_seed_and_rank_and_have_the_means_asked_for() -> None:
    def bursts(seed: int, rank: int, count: int = 2000) -> list[tuple[float, float]]:
        return list(itertools.islice(schedule(BACKGROUND, seed, rank), count))

    one = bursts(1, 0)
    assert one == bursts(1, 0)
    assert one[:3] != bursts(2, 0, 3)
    assert one[:3] != bursts(1, 1, 3)
    lengths = [length for _, length in one]
    assert 0.04 <= min(lengths) < max(lengths) <= 0.06
    assert sum(lengths) / one[-1][0] == pytest.approx(0.1, rel=0.1)
    assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(one))


def _sent(sender: Sender, times: list[float]) -> list[tuple[float, int]]:
    return [(now, rank) for now in times for rank in sender.take(now)]


@pytest.mark.parametrize("size", [548, 1400])
def test_bursts_have_their_rate_and_nothing_is_sent_between_them(size: int) -> None:
    sender, seconds, step = Sender(BACKGROUND, 3, 2, size), 20.0, 1e-4
    sent = _sent(sender, [i * step for i in range(int(seconds / step))])
    for rank in range(2):
        inside = list(itertools.takewhile(lambda b: b[0] < seconds, schedule(BACKGROUND, 3, rank)))
        at = [now for now, r in sent if r == rank]
        assert all(any(a <= now <= a + length + step for a, length in inside) for now in at)
        bits = len(at) * sender.packets * 8 * (size + 42)
        assert bits == pytest.approx(sum(length for _, length in inside) * BACKGROUND.rate, rel=0.05)


@pytest.mark.needs("root", "netns")
def test_bursts_take_the_place_of_others_in_a_cable(
    tailbound_lab: Make, datagram_socket: Callable[..., socket.socket]
) -> None:
    """The queue before worker 1 overflows on both links; nobody answers the background, and others pass after it."""
    busy = Background(200_000_000, 5000.0, 1.0)
    lab = tailbound_lab(workers=2, rate=parse_rate("50mbit"), background=busy, seed=5)

    def counters() -> dict[tuple[str, str], InterfaceCounters]:
        return {(c.namespace.rpartition("-")[2], c.interface): c for c in lab.drops()}

    end = time.monotonic() + PATIENCE
    while not all(counters()["c1", link.worker_port].qdisc for link in Link):
        assert time.monotonic() < end
    lab.set_background(None)
    for link in Link:
        receiver, sender = datagram_socket(lab, 1, link), datagram_socket(lab, 0, link)
        sender.sendto(b"x", receiver.getsockname())
        assert receiver.recv(2000) == b"x"
        of_background = counters()["b", link.interface]
        assert of_background.rx_packets == 0
        assert of_background.tx_bytes > 1_000_000
