"""Ranks out of step over udp in one process: without rows by choice, holding, lost, jumping (clock-16, clock-20)."""

from __future__ import annotations

import time
from concurrent.futures import Future

import numpy as np
import pytest
from numpy.typing import NDArray

from support import MS, PATIENCE, Team, exact_mean, gradients, hasty, nmse, patient, team
from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.wire.schema import OP_INDEX_BITS

NUMEL = 4 * 64 * 256
RANKS = 3


def whole(job: Team, ops: int = 3) -> None:
    """Runs ops until ``ops`` of them were whole: scales are warm, the layout is stable."""
    seen = 0
    for op in range(20):
        results = job.allreduce(gradients("U", RANKS, NUMEL, seed=900 + op))
        seen += all(o.delivered == o.expected for _, o in results)
        if seen == ops:
            return
    pytest.fail("never whole")


def test_a_rank_without_rows_gets_the_mean_of_the_others() -> None:
    with team(RANKS, patient()) as job:
        whole(job)
        for op in range(4):
            inputs = gradients("U", RANKS, NUMEL, seed=op)
            outs = [np.zeros(NUMEL, np.float32) for _ in range(RANKS)]

            def one(
                c: Communicator, inputs: list[NDArray[np.float32]] = inputs, outs: list[NDArray[np.float32]] = outs
            ) -> Outcome:
                rank, future = c.config.rank, Future[Outcome]()
                c.launch(0, inputs[rank], outs[rank], last=True, done=future.set_result, contribute=rank != 2)
                return future.result(PATIENCE)

            results = job.each(one)
            assert all(o.error is None and o.delivered == o.expected and o.deadline_hits == 0 for o in results)
            assert not any(o.late or o.abstained for o in results)
            assert nmse(outs[0], exact_mean(inputs[:2])) < 2e-3
            for out in outs[1:]:
                np.testing.assert_array_equal(out, outs[0])
        assert all(c.stats()["suspects"] == [] for c in job.communicators)


def test_the_others_wait_for_a_rank_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as long as both deadlines: nobody is left out, nobody is suspected (clock-16)."""
    # a thread that does not run for a while is not taken for the end of its hold
    monkeypatch.setattr("tailbound.transport.membership.HOLD_SILENCE", 5_000 * MS)
    with team(RANKS, hasty(deadline_1=300 * MS, deadline_2=300 * MS)) as job:
        for attempt in range(3):  # once they go on, a loaded machine may miss the deadlines like those of any op
            whole(job)
            inputs = gradients("U", RANKS, NUMEL, seed=attempt)
            job[2].hold(True)
            end = time.monotonic() + PATIENCE
            while not all(c.job.membership.holding(c.job.now()) for c in job.communicators[:2]):
                assert time.monotonic() < end
                time.sleep(0.001)
            outs = [np.zeros(NUMEL, np.float32) for _ in range(RANKS)]
            early = [job[r].allreduce(inputs[r], outs[r]) for r in (0, 1)]
            until = time.monotonic() + 1.8
            while time.monotonic() < until:
                assert not any(future.done() for future in early)
                job[2].hold(True)
            job[2].hold(False)
            outcomes = [job[2].allreduce(inputs[2], outs[2]).result(PATIENCE), *(f.result(PATIENCE) for f in early)]
            if all(o.delivered == o.expected for o in outcomes):
                break
        else:
            pytest.fail(f"left out: {outcomes}")
        assert all(o.missing == set() for o in outcomes)
        assert [c.stats()["suspects"] for c in job.communicators] == [[]] * RANKS
        for out in outs:
            assert nmse(out, exact_mean(inputs)) < 2e-3


def test_a_lost_rank_gets_zeros_at_once_and_jumps() -> None:
    """Rule: clock-20."""
    with team(RANKS, hasty(ring_mib=0.5)) as job:
        whole(job)
        first = step = 0
        while not job[2].lost or step < 24:  # the ring holds eight steps
            results = job.allreduce(gradients("U", RANKS, NUMEL, seed=step), [0, 1])
            assert all(o.error is None for _, o in results)
            step += 1
            assert step < 34
        behind = job[2].behind
        assert step - 1 <= behind <= step
        out = np.ones(NUMEL, np.float32)
        last = None
        kept = {int(label) >> OP_INDEX_BITS for label in job[2].job.store.presence["op"] if label}
        assert len(kept) >= 7  # whatever op records reach
        while first < step and (last is None or not last.skipped):  # what the ring held comes first
            begun = time.monotonic()
            last = job[2].allreduce(gradients("U", RANKS, NUMEL, seed=first)[2], out).result(PATIENCE)
            assert time.monotonic() - begun < 5
            first += 1
        assert last is not None
        assert last.skipped
        assert last.late
        assert not out.any()
        assert job[2].jump() == step - first
        control = job[2].job.store.control
        assert int(control["released"][0]) == (job[2].job.sequence.upcoming - 1) & 0xFFFFFFFF  # records from here on
        assert job[2].behind == 0
        assert not job[2].lost
        for _ in range(12):
            inputs = gradients("U", RANKS, NUMEL, seed=50 + _)
            results = job.allreduce(inputs)
            if all(o.delivered == o.expected for _, o in results):
                break
        else:
            pytest.fail("never whole again")
        for value, _ in results:
            assert nmse(value, exact_mean(inputs)) < 2e-3
            np.testing.assert_array_equal(value, results[0][0])


def test_a_step_larger_than_the_ring_goes_through_it_op_by_op() -> None:
    """Half of the ring is in flight at most, nothing is lost, and nobody in step is taken for lost (clock-20)."""
    buckets, steps = 12, 5
    with team(RANKS, patient(ring_mib=0.5)) as job:
        in_flight: list[int] = []

        def step(c: Communicator, number: int) -> list[Outcome]:
            if c.config.rank == 2:  # late: the others have named the step, and wait for it
                end = time.monotonic() + PATIENCE
                while number and not c.job.contributed(0, c.job.sequence.upcoming):
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
