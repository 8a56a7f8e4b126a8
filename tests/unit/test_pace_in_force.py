"""What a rank takes its pace to be: its link, or less where less has been seen to leave."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from queue_world import ADDRESS, STRIDE, Line
from tailbound.collective.flow_control import FlowControl
from tailbound.transport.sender import Sender
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import PacketType

C, MS = PacketType.CONTRIBUTION, 1_000_000


def traffic(bound: UdpSocket, link: float, *ranks: int) -> FlowControl:
    states = np.zeros(4, DTYPES["tb_peer_state"])
    datapath: Any = SimpleNamespace(name="udp", gap=0, store=SimpleNamespace(peer_states=states))
    sender = Sender([bound], dict.fromkeys(ranks or (1, 2), (ADDRESS, 9)))
    job: Any = SimpleNamespace(sender=sender, cookie=1, rank=0, now=time.monotonic_ns, keys=None, switch=None)
    return FlowControl(job, datapath, link)


def test_the_links_speed_if_it_is_known(bound: UdpSocket) -> None:
    assert traffic(bound, 1.25e9).pace == 1.25e9
    assert traffic(bound, 0.0).pace == 1.25e8
    assert traffic(bound, 2.5e8).snapshot()["pace"] == 250_000_000


def test_what_was_measured_if_that_is_less(bound: UdpSocket) -> None:
    for link, drained, pace in [(1.25e9, 1e8, 1e8), (1e8, 1e9, 1e8), (0.0, 3e9, 3e9)]:
        found = traffic(bound, link)
        found.queue.drained = drained
        assert found.pace == pace


def live(flow: FlowControl, *ranks: int) -> FlowControl:
    flow._job.membership = SimpleNamespace(live=list(ranks))  # type: ignore[assignment]
    return flow


def test_a_driver_that_says_10_mbit_s_is_not_believed(bound: UdpSocket) -> None:
    """Every burst was one packet then."""
    assert traffic(bound, 1.25e6).queue.pacer.largest(1472) == 44
    assert traffic(bound, 1.25e7).queue.pacer.largest(1472) == 4
    states = np.zeros(4, DTYPES["tb_peer_state"])
    datapath: Any = SimpleNamespace(name="udp", gap=0, store=SimpleNamespace(peer_states=states))
    assert FlowControl(traffic(bound, 0.0)._job, datapath, 1.25e6, given=True).queue.pacer.largest(1472) == 1


def test_a_grant_is_a_share_among_live_ranks_and_ends_with_the_number_of_all(bound: UdpSocket) -> None:
    flow = live(traffic(bound, 1.25e8), 1, 2)
    flow._states["incast"][[1, 2]] = 1, 2
    flow.poll(1)
    assert (flow.queue.pacer.rate(1), flow.queue.pacer.limited) == (1.25e8 / 2, {1})
    live(flow, 1)
    flow.poll(10 * MS)
    assert flow.queue.pacer.limited == set()


def test_a_grant_ends_with_the_rank_that_gave_it(bound: UdpSocket) -> None:
    """A rank that was killed while it took one sender at a time held up the others' results for the rest of the job."""
    flow = live(traffic(bound, 1.25e8), 1, 2)
    flow._states["incast"][[1, 2]] = 2, 1
    flow.poll(1)
    assert flow.queue.pacer.granted
    live(flow, 1)
    flow.poll(10 * MS)
    assert not flow.queue.pacer.granted


def test_what_an_op_says_of_a_queue(bound: UdpSocket) -> None:
    flow, seen = live(traffic(bound, 1.25e8), 1, 2), []
    flow.incast.update = lambda *counts: seen.append(counts)  # type: ignore[method-assign]
    flow._job.records = SimpleNamespace(all_contributed=lambda ranks, _: ranks)  # type: ignore[assignment]
    flow._job.advertise = lambda **_: None  # type: ignore[method-assign]
    flow._job.repairs = SimpleNamespace(warming=lambda _: False)  # type: ignore[attr-defined]
    placement = SimpleNamespace(shares=[10, 20, 30])
    op: Any = SimpleNamespace(cold=True, place=SimpleNamespace(placement=placement), abstainers=(), label=1, key=())
    op.first = SimpleNamespace(asked={})
    flow.count_sealed(op, [0, 10, 10])
    op.cold = False
    flow.count_sealed(op, [0, 10, 9])
    op.first.asked = {1: range(4)}
    flow.count_sealed(op, [0, 10, 10])  # all are in, four of them by repair
    flow.count_sealed(op, [0, 0, 10])  # nothing of rank 1 came: no queue loses all of a sender's rows
    assert seen == [(20, 1), (20, 4), (20, 0)]


def full_then_not(line: Line, clock: list[int], rows: int, took: int) -> None:
    """A run over a socket that is full at once and takes all ``took`` ns later."""
    line.kernel.script = [errno.EAGAIN]
    line.submit(7, C, (1, rows))
    clock[0] += took
    line.queue.pump(1)
    assert line.queue.empty


def test_what_leaves_while_sockets_are_full_is_measured(bound: UdpSocket) -> None:
    clock = [5]
    line = Line([bound], clock=lambda: clock[0])
    line.submit(7, C, (1, 6400))
    assert line.queue.drained == 0  # nothing had to wait
    full_then_not(line, clock, 64, MS)
    assert line.queue.drained == 0  # too little to say
    rows = 1_000_000 // STRIDE
    full_then_not(line, clock, rows, 8 * MS)
    assert line.queue.drained == pytest.approx(1.25e8, rel=0.01)
    for _ in range(40):
        full_then_not(line, clock, rows, 16 * MS)
    assert line.queue.drained == pytest.approx(6.25e7, rel=0.01)


def test_a_link_that_is_never_free_is_measured_too(bound: UdpSocket) -> None:
    clock = [5]
    line = Line([bound], clock=lambda: clock[0])
    line.submit(7, C, (1, 64 * 400))
    while not line.queue.empty:
        line.kernel.script = [-4, errno.EAGAIN]
        clock[0] += MS
        line.queue.pump(1)
    assert line.queue.drained == pytest.approx(4 * 64 * STRIDE * 1e3, rel=0.2)
