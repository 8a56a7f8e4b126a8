"""Whole all-reduces over udp in one process, in real time: memory, arrays and rings that are refused, failures.

Between the training thread, the transport thread and what closes both nothing is lost or mistaken.

Bits: ``test_communicator_device``. Sizes, cuts and labels in virtual time: ``sim/test_whole.py``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from support import MS, PATIENCE, MemoryStore, Team, assembled, gradients, hasty, launch, patient, team, whole
from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import shape_for
from tailbound.collective import contribute
from tailbound.collective.buffers import BufferPool, Buffers
from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.datapath import select
from tailbound.datapath.protocol import allocate, store_of
from tailbound.datapath.udp import EVENT_TAIL, UdpDatapath
from tailbound.errors import ConfigError, TransportError
from tailbound.transport.config import Config
from tailbound.transport.sequence import Layout, Sequence
from tailbound.wire.address import words_of
from tailbound.wire.schema import Verdict
from tailbound.wire.tag import NO_KEY

NUMEL = 8 * 64 * 256


@pytest.fixture
def pair() -> Iterator[Team]:
    with team(2, patient()) as job:
        yield job


def test_memory_of_ops_that_do_not_come_again_is_let_go_of() -> None:
    """DDP's first step is one bucket with everything; from the second on there are the smaller ones."""
    terms: Any = SimpleNamespace(given=0)
    pool = BufferPool(partial(Buffers, rank=0, ranks=2), terms, ring=256)
    sequence = Sequence(2, OwnerMap(0, (0, 1)))

    def held(numel: int) -> weakref.ref[object]:
        layout = Layout((0, numel, 0, 1), shape_for(numel, 64, 8), numel, True)
        place, _ = sequence.assign(layout)
        buffers = pool.acquire(layout.shape, place.placement)
        buffers.given.belong(place, NO_KEY)
        pool.keep(place, buffers, buffers.given)
        return weakref.ref(buffers)

    first = held(64 * 256)
    assert held(64 * 256)() is first()
    small = [held(64 * 64)() for _ in range(3)]
    assert first() is not None
    small += [held(64 * 64)() for _ in range(5)]
    assert first() is None
    assert small[0] is not None
    assert all(buffers is small[0] for buffers in small)


@pytest.mark.parametrize(
    ("data", "out", "message"),
    [
        (np.zeros(8, np.float64), None, "float64"),
        (np.zeros((2, 4), np.float32), None, "one-dimensional"),
        (np.zeros(16, np.float32)[::2], None, "contiguous"),
        (np.zeros(0, np.float32), None, "at least one"),
        (np.zeros(8, np.float32), np.zeros(9, np.float32), "as many for out"),
        (np.zeros(8, np.float32), np.zeros(8, np.float16), "float16"),
        (np.zeros(8, np.uint16), None, "uint16"),  # bfloat16 only where it is said to be
    ],
)
def test_arrays_that_cannot_be_averaged_are_refused(data: Any, out: Any, message: str) -> None:
    with team(1, patient()) as job, pytest.raises(ConfigError, match=message):
        job[0].allreduce(data, out)


def test_what_codes_leave_out_is_kept_of_float32_alone() -> None:
    how = Handling("float16", residual=np.zeros(8, np.float32))
    with team(1, patient()) as job, pytest.raises(ConfigError, match="data is float16"):
        launch(job[0], np.zeros(8, np.float16), np.zeros(8, np.float16), handling=how)


def test_closing_ends_the_op_in_flight_and_nothing_is_launched_afterwards() -> None:
    """Rank 0 closes while it waits for rank 1: its op ends with what it has, rank 1 hears that it is gone."""
    data = gradients("U", 2, NUMEL, seed=0)
    with team(2, hasty()) as job:
        job.allreduce(data)
        future = job[0].allreduce(data[0].copy())
        job[0].close()
        job[0].close()
        assert future.result(0).error is None
        with pytest.raises(TransportError, match="closed"):
            job[0].allreduce(data[0])
        assert job[1].allreduce(data[1].copy()).result(PATIENCE).error is None


def test_ctrl_c_while_an_op_is_placed_is_not_swallowed(pair: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op may be half placed then, so the transport ends."""
    monkeypatch.setattr(pair.engine(0).window, "admit", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pair[0].allreduce(np.zeros(NUMEL, np.float32))
    pair.engine(0)._thread.join(PATIENCE)
    with pytest.raises(TransportError, match="failed"):
        pair[0].allreduce(np.zeros(NUMEL, np.float32))


def test_a_datapath_that_is_not_there_is_named() -> None:
    config = Config(rank=0, ranks=1)
    with pytest.raises(ConfigError, match="choose one of auto, xdp, udp"):
        Communicator(MemoryStore(), config, datapath="rdma")
    with pytest.raises(ConfigError, match="no interface 'nosuch0'"):
        Communicator(MemoryStore(), config, interface="nosuch0")
    with pytest.raises(ConfigError, match="needs an interface"):
        Communicator(MemoryStore(), config, datapath="xdp")


def test_a_large_bucket_is_many_ops() -> None:
    """However large the ring is: either half of an op ends within ``stage_max``, also at 100 Mbit/s."""
    with team(1, patient(width=1408, ring_mib=64.0)) as job:
        assert [job[0].ops(numel) for numel in (8192 * 1408, 124_439_808)] == [1, 11]
        assert job[0].rings((64 * 1408, *[100] * 60))[0] == 64 + 60, "small tensors have rows of their own"


@pytest.mark.parametrize(
    ("smaller", "ops"), [((4096, 256), 32), ((64, 4096), 64)], ids=["a result ring", "a sums ring"]
)
def test_the_smallest_ring_of_all_ranks_bounds_what_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, smaller: tuple[int, int], ops: int
) -> None:
    """Programs attached for good may have other rings: a rank must not run ahead of what another's ring takes."""
    monkeypatch.setattr(select, "ring_rows", lambda mib, *_: smaller if mib < 1 else (4096, 4096))
    configs = [Config(rank=rank, ranks=2, **patient(ring_mib=mib)) for rank, mib in enumerate((1.0, 0.5))]
    store = MemoryStore()
    with assembled([lambda c=c: Communicator(store, c, datapath="udp") for c in configs]) as job:
        assert [member.ops(4096 * 256) for member in job.communicators] == [ops, ops]
        whole(job.allreduce(gradients("U", 2, 256 * 64 * 5, seed=3)))
    assert ("rank 0: its result ring has 4096 rows, another rank's 256" in caplog.text) == (ops == 32)


def test_a_loop_in_python_hands_the_interpreter_over_soon() -> None:
    sys.setswitchinterval(0.005)
    with team(1, patient()):
        assert sys.getswitchinterval() <= 0.0005


def test_the_ledger_of_an_earlier_job_is_not_ours(pair: Team) -> None:
    """Pinned maps outlive a job, and nobody but the program may write them."""
    job = pair[0].job
    job.store.ledger["verdict"][1, Verdict.LAYOUT_MISMATCH] += np.uint64(5)
    assert job.records.verdicts()[1][Verdict.LAYOUT_MISMATCH] == 5
    job.activate([words_of("127.0.0.1")] * 2, words_of("127.0.0.1"))
    assert not job.records.verdicts().any()


def test_without_any_event_every_op_ends_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads an event, and none wakes anybody: maps are read again in every turn (kernel-22)."""
    silent = os.eventfd(0, os.EFD_NONBLOCK)
    fds = UdpDatapath.fds
    monkeypatch.setattr(UdpDatapath, "fds", lambda path: (silent, fds(path)[1]))
    try:
        with team(3, patient()) as job:
            for op in range(4):
                results = job.allreduce(gradients("U", 3, NUMEL, seed=op))
                assert all(o.delivered == o.expected and o.deadline_hits == 0 for _, o in results)
            assert [int(each.job.datapath._tables.state[EVENT_TAIL]) for each in job.communicators] == [0] * 3
    finally:
        os.close(silent)


def test_what_fails_beside_an_op_costs_no_future() -> None:
    """A callback, and what is counted and learned."""

    def broken(_: Any) -> None:
        raise RuntimeError("not my day")

    with team(1, patient()) as job:
        accounts, data = job[0].job.accounts, np.ones(100, np.float32)
        accounts.delivered = broken
        job[0].launch(0, data, data, last=True, done=broken)
        assert job[0].allreduce(data).result(PATIENCE).error is None
        counts = job[0].job.events.counts
        assert (counts["callback_failed"], counts["learning_failed"]) == (1, 2)


def test_what_the_transport_thread_had_no_time_for_is_not_done_later() -> None:
    """Who asked was told that it is not: a welcome, a jump."""
    with team(1, patient()) as job:
        engine, begun, go_on, done = job.engine(0), threading.Event(), threading.Event(), list[int]()
        engine.call(lambda: (begun.set(), go_on.wait(PATIENCE)))
        assert begun.wait(PATIENCE)
        with pytest.raises(TransportError, match=r"rank 0: the transport thread has not answered within 0.01 s: give"):
            engine.ask(lambda: done.append(1), 0.01)
        go_on.set()
        engine.ask(lambda: done.append(2), PATIENCE)
        assert done == [2]
        with pytest.raises(ZeroDivisionError):
            engine.ask(lambda: 1 // 0)


# -- hand-overs between threads --------------------------------------------------------------------------------------


def test_what_is_being_launched_is_in_flight(pair: Team) -> None:
    """The thread ended a turn while an op was handed over, and said that nothing was in flight."""

    class Slow(threading.Event):
        def clear(self) -> None:
            super().clear()
            for _ in range(2):  # the second begins after the first has ended
                done = threading.Event()
                engine._commands.append((Future(), done.set))  # in the middle of a turn, which ends after it
                os.eventfd_write(engine._wake, 1)
                assert done.wait(PATIENCE)

    engine, data = pair.engine(0), gradients("U", 2, NUMEL // 8, seed=1)
    engine._idle = Slow()
    engine._idle.set()
    waits = pair[0].allreduce(data[0])
    assert not pair[0].drain(0)
    pair[1].allreduce(data[1]).result(PATIENCE)
    waits.result(PATIENCE)
    assert pair[0].drain(PATIENCE)


@pytest.mark.parametrize(("each", "stops"), [(100, 0), (400, 3)], ids=["long turns", "stops"])
def test_a_turn_that_is_long_is_no_stop(monkeypatch: pytest.MonkeyPatch, each: int, stops: int) -> None:
    """Rule: clock-14. It codes many large ops; who stands still for so long in a single one has been stopped."""
    with team(1, patient()) as job:
        engine, skew = job[0]._engine, 0
        counters, now, look = engine.job.counters, engine.job.now, contribute.step

        def slow(op: Op, *arguments: Any, **more: Any) -> Any:
            nonlocal skew
            skew += each * MS * (op.label not in seen)
            seen.add(op.label)
            return look(op, *arguments, **more)

        seen = set[int]()
        monkeypatch.setattr(engine.job, "now", lambda: now() + skew)
        monkeypatch.setattr(contribute, "step", slow)
        stands, go_on = threading.Event(), threading.Event()
        begun = time.monotonic()
        waits = engine.call(lambda: (stands.set(), go_on.wait(PATIENCE)))
        assert stands.wait(PATIENCE)
        before = counters["stops_noticed"]
        data = gradients("U", 1, NUMEL // 8, seed=1)[0]
        end = 2 if stops else 5
        how = {"prepare": lambda: None}  # else the library codes them alone
        futures = [launch(job[0], data, np.empty_like(data), at, last=at == end, **how) for at in range(end + 1)]
        go_on.set()
        waits.result(PATIENCE)
        for future in futures:
            future.result(PATIENCE)
        engine.call(lambda: None).result(PATIENCE)
        if time.monotonic() - begun < 0.2:  # else this machine stood still itself
            assert counters["stops_noticed"] - before == stops


def test_the_live_set_is_dated_when_the_kernel_has_it() -> None:
    """Rows of an op that opens while it is written are counted by either set."""
    seen = list[tuple[int, int]]()
    speaker = Speaker(Config(0, 3, width=64), store_of(allocate(64, 64, 64)), None, 7)
    control, peers = speaker.store.control, speaker.store.peers
    speaker.now = lambda: seen.append((int(control["live_peers"][0]), int(peers[1]["live"]))) or len(seen)
    speaker.publish_live()
    speaker.membership.contribution.accuse(1, 0)
    speaker.publish_live()
    assert seen == [(2, 1), (1, 0)]
    assert speaker.terms.live_since == 2
