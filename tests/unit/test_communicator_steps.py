"""A step that is larger than the ring, over udp in one process (clock-20); ranks out of step: ``sim/test_ranks.py``."""

from __future__ import annotations

import time
from concurrent.futures import Future

from support import PATIENCE, gradients, patient, team
from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome

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
