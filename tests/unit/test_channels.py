"""Which channel results leave over: facts in, choice, recipients and counters out; without any network of its own."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from functools import partial
from ipaddress import IPv4Network
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tailbound.collective.channels import Channels
from tailbound.collective.speaker import Speaker
from tailbound.errors import CapabilityError
from tailbound.kernel.fanout import Fanout
from tailbound.transport.membership import Membership
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender, Shared
from tailbound.transport.sockets import UdpSocket

ADDRESS = "127.0.0.1"


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
    made.channels = Channels(made, SimpleNamespace(name="xdp"))
    made.channels.usable = tuple(sender.share(Shared(name, bound, (ADDRESS, 9))) for name in ("fanout", "multicast"))
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
    vars(job).update(changed, config=SimpleNamespace(result=wanted))
    channels = Channels(job, SimpleNamespace(name="xdp", interface="lo", endpoint=(ADDRESS, 9)))
    job.sender.peers[3] = ADDRESS, last
    channels.open(alone=alone)
    assert channels.result == "peers"
    assert why in channels.reason
    assert job.counters["result_fallbacks"] == (wanted not in ("peers", "auto"))
    assert channels.aims() == (1, 2, 3)


def test_results_leave_once_for_all_who_are_there(job: Any) -> None:
    (number,) = job.channels.aims()
    assert job.sender.shared[number].name == "fanout"
    assert job.sender.shared[number].ranks == (1, 2, 3)
    job.membership.bye(2, 0)
    job.channels.aims()
    assert job.sender.shared[number].ranks == (1, 3)
    job.membership.bye(3, 0)  # nothing left to be sent to many
    assert job.channels.aims() == (1,)


@pytest.mark.parametrize(
    ("wanted", "rates", "together"),
    [
        ("auto", {2: 1e8}, False),
        ("auto", {1: 1.5e8, 2: 1e8, 3: 1.9e8}, True),
        ("fanout", {2: 1e8}, True),
        ("multicast", {2: 1e8}, False),
    ],
    ids=["one is slow", "all are", "it is asked for", "it stands in for multicast"],
)
def test_a_burst_for_all_does_not_wait_for_a_slow_receiver(
    job: Any, wanted: str, rates: dict[int, float], together: bool
) -> None:
    job.channels.wanted, pacer = wanted, job.queue.pacer
    for rank, rate in rates.items():
        pacer.hold_to(rank, rate)
    aims = job.channels.aims()
    assert len(aims) == (1 if together else 3)
    job.channels.count(len(aims))
    assert job.counters["results_apart"] == (not together)


def test_the_dead_get_results_as_long_as_there_is_room_for_them(job: Any) -> None:
    job.records.peer_states["newest"] = 100 << 10
    for op in range(3):
        job.membership.contribution.absent({2}, op)
        job.membership.result.absent({2}, op)
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
    job.sender.shared[job.channels.usable[0]].broken = True
    assert job.channels.aims() == (1, 2, 3)
    job.membership.bye(1, 0)
    (number,) = job.channels.aims()
    assert job.sender.shared[number].ranks == (2, 3)


def test_a_group_that_is_not_delivered_leaves_fan_out(job: Any) -> None:
    assert not job.channels.complained(2)  # not of multicast
    job.channels.wanted, job.channels.usable = "multicast", job.channels.usable[::-1]
    assert (job.channels.result, job.channels.reason) == ("multicast", "asked for")
    assert job.channels.complained(2)
    assert (job.channels.result, job.channels.reason) == ("fanout", "multicast does not reach 2, and is given up")
    assert job.counters["result_fallbacks"] == 1


def test_a_member_of_the_jobs_group_sends_to_others_alone(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job.cookie, job.store.control = 9, {}
    channels = Channels(job, SimpleNamespace(name="xdp", endpoint=(ADDRESS, 9)))
    with contextlib.ExitStack() as opened:
        made = channels._open_multicast(opened)
        assert made.target == ("239.192.0.9", 9)
        assert made.socket.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP) == 0
        monkeypatch.setattr("tailbound.collective.channels._GROUPS", IPv4Network("198.18.0.0/24"))  # no groups
        with pytest.raises(CapabilityError, match="cannot be joined"):
            channels._open_multicast(opened)


def test_failed_clones_are_told(job: Any) -> None:
    failed = {1: SimpleNamespace(packets_failed=0), 2: SimpleNamespace(packets_failed=4)}
    job.channels.fanout = Mock(counts=lambda: failed)
    assert job.channels.snapshot()["clones_failed"] == {"2": 4}
