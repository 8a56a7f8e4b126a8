"""Which channel results leave over: facts in, choice, recipients and counters out; without any network of its own."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tailbound.collective.channels import Channels
from tailbound.collective.speaker import Speaker
from tailbound.errors import CapabilityError
from tailbound.kernel.fanout import Fanout
from tailbound.transport.config import MS
from tailbound.transport.membership import Membership
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender, Shared
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.schema import MAX_RANKS

ADDRESS = "127.0.0.1"
ROWS = np.zeros((5, 128), np.uint8)


@pytest.fixture
def job(bound: UdpSocket) -> Any:
    """Rank 0 of four, with both channels, as far as ``Channels`` looks at it."""
    sender = Sender([bound], dict.fromkeys((1, 2, 3), (ADDRESS, 9)))
    queue = SendQueue(sender)
    membership = Membership(4, 0)
    made = SimpleNamespace(
        rank=0, ranks=4, peers=[1, 2, 3], membership=membership, sender=sender, queue=queue, switch=None,
        config=SimpleNamespace(result="auto"), counters=Counter(),
        sequence=SimpleNamespace(upcoming=100 << 10, op_rows=(100,)), store=SimpleNamespace(result_rows=1000),
        records=SimpleNamespace(peer_states=np.zeros(4, [("newest", np.uint32)])),
        events=Mock(),
    )  # fmt: skip
    made.beyond = partial(Speaker.beyond, made)
    made.channels = Channels(made, queue, SimpleNamespace(name="xdp"))
    for name in ("fanout", "multicast"):
        sender.share(Shared(name, (bound,), (ADDRESS, 9)))
    made.channels.follow()
    return made


@pytest.mark.parametrize(
    ("wanted", "changed", "alone", "last", "why"),
    [
        ("fanout", {}, True, 9, "takes no program"),
        ("fanout", {}, True, 10, "ports 9, 10"),
        ("fanout", {}, False, 9, "udp"),
        ("auto", {"switch": 1}, True, 9, "switch"),
        ("multicast", {"ranks": 2}, True, 9, "no two peers"),
        ("peers", {}, True, 9, "asked for"),
    ],
)
def test_without_a_channel_that_helps_every_peer_gets_its_own(
    job: Any, monkeypatch: pytest.MonkeyPatch, wanted: str, changed: dict[str, int], alone: bool, last: int, why: str
) -> None:
    def refuse(*_: object, **__: object) -> Fanout:
        raise CapabilityError("tc egress takes no program")

    monkeypatch.setattr(Fanout, "attach", refuse)
    monkeypatch.setattr(Fanout, "open", refuse)
    job.sender.shared.clear()
    vars(job).update(changed, config=SimpleNamespace(result=wanted, source_ports=1))
    channels = Channels(job, job.queue, SimpleNamespace(name="xdp", interface="lo", endpoint=(ADDRESS, 9)))
    channels.open(ADDRESS, {1: (ADDRESS, 9), 2: (ADDRESS, 9), 3: (ADDRESS, last)}, alone=alone)
    assert channels.choice.result == "peers"
    assert why in channels.choice.reason
    assert job.counters["result_fallbacks"] == (wanted not in ("peers", "auto"))
    assert [rank for rank, _ in channels.runs(ROWS)] == [1, 2, 3]


def test_results_leave_once_for_all_who_are_there(job: Any) -> None:
    ((number, rows),) = job.channels.runs(ROWS)
    assert job.sender.shared[number].name == "fanout"
    assert rows is ROWS
    assert job.sender.shared[number].ranks == (1, 2, 3)
    job.membership.bye(2, 0)
    job.channels.runs(ROWS)
    assert job.sender.shared[number].ranks == (1, 3)
    assert job.counters["results_at_once"] == 2
    job.membership.bye(3, 0)  # nothing left to be sent to many
    assert [rank for rank, _ in job.channels.runs(ROWS)] == [1]


@pytest.mark.parametrize(
    ("wanted", "granted", "rates", "together"),
    [
        ("fanout", 2 / 3, {}, False),
        ("auto", 1, {2: 1e8}, False),
        ("auto", 1, {1: 1.5e8, 2: 1e8, 3: 1.9e8}, True),
        ("fanout", 1, {2: 1e8}, True),
        ("multicast", 1, {2: 1e8}, False),
    ],
    ids=["one takes few at once", "one is slow", "all are", "it is asked for", "it stands in for multicast"],
)
def test_a_burst_for_all_does_not_wait_for_a_slow_receiver(
    job: Any, wanted: str, granted: float, rates: dict[int, float], together: bool
) -> None:
    job.channels.wanted, pacer = wanted, job.queue.pacer
    if granted < 1:
        pacer.grant(2, granted)
    for rank, rate in rates.items():
        pacer.paths[rank].rate, pacer.paths[rank].free = rate, False
        pacer.limited.add(rank)
    assert len(job.channels.runs(ROWS)) == (1 if together else 3)
    assert job.counters["results_apart"] == (not together)


def test_the_dead_get_results_as_long_as_there_is_room_for_them(job: Any) -> None:
    job.records.peer_states["newest"] = 100 << 10
    for op in range(3):
        job.membership.absent(job.membership.contribution, {2}, op, in_step=True, step=op)
        job.membership.absent(job.membership.result, {2}, op, in_step=True, step=op)
    assert job.membership.dead(100) == {2}
    job.channels.follow()
    assert job.channels.live == (1, 2, 3)
    job.sequence.upcoming = 110 << 10  # eleven steps of 100 rows, in a ring of 1000
    job.channels.follow()
    assert job.channels.live == (1, 3)
    job.membership.heard(2, 110)
    job.channels.follow()
    assert job.channels.live == (1, 2, 3)


def test_a_refused_channel_is_left_until_the_live_set_changes(job: Any) -> None:
    clones = job.channels.channel("fanout")
    clones.broken = True
    clones.counts.errors["EPERM"] = 1
    assert len(job.channels.runs(ROWS)) == 3  # at once
    job.channels.poll(1000 * MS)
    assert tuple(job.channels.choice) == ("peers", "bursts are refused (EPERM)")
    assert job.counters["result_fallbacks"] == 1
    job.membership.bye(1, 0)
    job.channels.poll(2000 * MS)
    assert job.channels.choice.result == "fanout"


def test_a_group_that_cannot_be_joined_or_is_not_delivered_leaves_fan_out(job: Any) -> None:
    assert not job.channels.complained(2)  # not of multicast
    job.channels.wanted = "multicast"
    job.channels.poll(1000 * MS)
    assert job.channels.choice.result == "multicast"
    assert job.channels.complained(2)
    assert tuple(job.channels.choice) == ("fanout", "multicast does not reach 2, and is given up")
    job.channels._why_not["multicast"] = "no multicast: no route"
    job.channels.channel("fanout").broken = True
    job.channels.poll(2000 * MS)
    assert job.channels.choice.reason == "no multicast: no route; bursts are refused ()"
    assert job.counters["result_fallbacks"] == 2


def test_failed_clones_are_taken_off_once(job: Any) -> None:
    number = job.channels.number()
    assert number >= MAX_RANKS
    job.sender.took(number, 10, 1280, 1)
    failed = {2: SimpleNamespace(packets_failed=4)}
    job.channels.fanout = Mock(counts=lambda: failed, lead=None)
    job.channels.poll(1000 * MS)
    job.channels.poll(2000 * MS)
    counts = job.sender.counts[2]
    assert (counts.packets, counts.bytes, counts.lost) == (6, 768, 4)
    assert job.channels.snapshot()["clones_failed"] == {"2": 4}
