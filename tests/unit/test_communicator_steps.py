"""A step that is larger than the ring, over udp in one process (clock-20); ranks out of step: ``sim/test_ranks.py``."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from support import PATIENCE, gradients, patient, team
from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.errors import TransportError

NUMEL = 4 * 64 * 256
RANKS = 3


def test_a_step_larger_than_the_ring_goes_through_it_op_by_op() -> None:
    """Half of the ring is in flight at most, nothing is lost, and nobody in step is taken for lost (clock-20)."""
    buckets, steps = 12, 5
    with team(RANKS, patient(ring_mib=0.5)) as job:
        in_flight: list[int] = []

        def step(c: Communicator, number: int) -> list[Outcome]:
            if c.config.rank == 2:  # late: the others have named the step, and wait for it
                end = time.monotonic() + PATIENCE
                while number and not c.job.records.contributed(0, c.job.sequence.upcoming):
                    assert time.monotonic() < end
                    time.sleep(0.001)
            assert c.behind == 0
            assert not c.lost
            futures = [Future[Outcome]() for _ in range(buckets)]
            for index, future in enumerate(futures):
                data = gradients("U", RANKS, NUMEL, seed=100 * number + index)[c.config.rank]
                c.launch(index, data, data, last=index == buckets - 1, done=future.set_result)
            ops = c._engine._ops
            in_flight.append(c._engine.call(lambda: sum(o.place.layout.shape.rows for o in ops.values())).result(10))
            return [future.result(PATIENCE) for future in futures]

        for number in range(steps):
            for outcomes in job.each(lambda c, number=number: step(c, number)):  # type: ignore[misc]
                assert all(o.error is None and o.delivered == o.expected and not o.missed for o in outcomes)
        ring = job[0].job.store.result_rows
        assert sum(job[0].job.sequence.op_rows) > ring
        assert 0 < max(in_flight) <= ring // 2
        assert all(c.stats()["counters"].get("jumps", 0) == 0 for c in job.communicators)


def test_what_the_transport_thread_had_no_time_for_is_not_done_later() -> None:
    """Who asked was told that it is not: a welcome, a jump."""
    with team(1, patient()) as job:
        engine, begun, go_on, done = job[0]._engine, threading.Event(), threading.Event(), list[int]()
        engine.call(lambda: (begun.set(), go_on.wait(PATIENCE)))
        assert begun.wait(PATIENCE)
        with pytest.raises(TransportError, match=r"rank 0: the transport thread has not answered within 0.01 s: give"):
            engine.ask(lambda: done.append(1), 0.01)
        go_on.set()
        engine.ask(lambda: done.append(2), PATIENCE)
        assert done == [2]
        with pytest.raises(ZeroDivisionError):
            engine.ask(lambda: 1 // 0)
