"""The real engine in virtual time (``sim.engine``): bounds, acknowledgements, equal bits, balanced books.

Rules: clock-7b, clock-12, clock-19, kernel-21. The same seed gives the same run: ``test_simulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.engine import Done, Plan, World
from tailbound.collective import contribute
from tailbound.collective.job import Job
from tailbound.collective.step import Do
from tailbound.kernel.core import core
from tailbound_lab.simulate.fabric import MS, Terms

Make = Callable[..., World]

#: Losses one by one and in bursts.
UNIFORM = Terms(loss=0.02)
BURSTS = Terms(loss=0.02, burst=5)
#: Sockets so small that results wait for room, at a tenth of the usual rate.
NARROW = Terms(loss=0.02, burst=5, room=8 << 10, rate=1e7)
#: A switch with queues of 24 KiB.
SHALLOW = Terms(queue=24 << 10)
#: Squared error of whole averages at 8 bits (codec-17 has twice as much as the most).
ERROR = 1.5e-3


@pytest.fixture
def job() -> Iterator[Make]:
    """Makes worlds, and closes them."""
    made: list[World] = []

    def make(*arguments: object, **settings: object) -> World:
        made.append(World(*arguments, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.close()


def waits(world: World) -> int:
    """How often a socket was full."""
    return sum(node.engine.job.flow.queue.waits for node in world.nodes)


class Errors(World):
    """Remembers the largest error of a result."""

    largest = 0.0

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        super().finished(rank, done, out)
        self.largest = max(self.largest, self.error_of(done, out))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_where_nothing_is_lost_every_row_arrives(ranks: int) -> None:
    with Errors(ranks, seed=ranks, steps=20) as world:
        world.run()
    assert world.counts["delivered"] == world.counts["expected"]
    assert world.counts["compared"] == ranks * 40
    assert not any(world.fabric.dropped.values())
    assert all(len(node.over) == 40 for node in world.nodes)
    assert world.largest < ERROR


@pytest.mark.parametrize(
    ("terms", "seed"),
    [
        pytest.param(terms, seed, marks=[] if seed == everyday else [pytest.mark.thorough], id=f"{name}-{seed}")
        for name, terms, everyday in (("uniform", UNIFORM, 0), ("bursts", BURSTS, 1), ("narrow", NARROW, 0))
        for seed in range(4)
    ],
)
def test_losses_are_repaired_within_the_bound(job: Make, terms: Terms, seed: int) -> None:
    world = job(4, seed, terms, steps=40).run()
    assert world.fabric.dropped["loss"] > 0
    assert (waits(world) > 0) == (terms is NARROW)
    assert world.counts["compared"] > 0.8 * 4 * 80
    assert world.share >= 0.985
    assert world.times()[-1] < 1000  # no rank waits for what will not come


def test_decisions_change_nothing_but_the_op(job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = job(4, seed=3, terms=BURSTS, steps=12).start()
    jobs = {node.engine.job.terms.pointer: node.engine.job for node in world.nodes}
    counted = {"tb_next_op": 0, "tb_listen": 0, "step": 0}

    def outside(job: Job) -> tuple[object, ...]:
        """Of what a rank's decisions must not change: books, marks, windows, seals, and what has been sent."""
        sent = [(one.packets, one.bytes) for one in job.sender.counts.values()]
        arrays = (job.store.control, job.store.slots, job.store.expect_results)
        return dict(job.counters), str(job.marks), job.flow.queue.empty, sent, [one.tobytes() for one in arrays]

    def watched(name: str, decide: Callable[..., object], job_of: Callable[..., Job]) -> Callable[..., object]:
        def decided(*arguments: object) -> object:
            before = outside(job_of(*arguments))
            found = decide(*arguments)
            assert outside(job_of(*arguments)) == before
            counted[name] += found not in (0, (Do.WAIT, 0))
            return found

        return decided

    for name in ("tb_next_op", "tb_listen"):
        decide = getattr(core().fast, name)
        monkeypatch.setattr(core().fast, name, watched(name, decide, lambda terms, now: jobs[terms]))
    monkeypatch.setattr(contribute, "step", watched("step", contribute.step, lambda op, known, now: known))
    world.finish()
    assert min(counted.values()) > 0


def test_shallow_queues_of_a_switch(job: Make) -> None:
    world = job(8, seed=1, terms=SHALLOW, plan=Plan((64 * 512,)), steps=20).run()
    assert world.fabric.dropped["queue"] > 0
    assert world.share >= 0.97


@pytest.mark.parametrize(
    ("length", "share_rows"),
    [
        pytest.param(ms, share, marks=[] if everyday else [pytest.mark.thorough], id=f"{ms}ms-{share}")
        for ms, share, everyday in ((30, False, True), (30, True, False), (1500, False, False), (1500, True, True))
    ],
)
def test_a_rank_that_stands_still(job: Make, length: int, share_rows: bool) -> None:
    steps = 60 if length > 350 else 40
    world = job(4, length, UNIFORM, steps=steps, share_rows=share_rows).start()
    # at about the thirtieth, on the slowest processors the tenth; before the eighth, ops have the whole stage
    world.stop(2, at=400 * MS, length=length * MS)
    world.finish()
    assert (world.nodes[2].engine.job.counters["stops_noticed"] > 0) == (length > 350)
    others = [done.took / MS for node in world.nodes if node.rank != 2 for done in node.over]
    assert max(others) < 400


def test_the_last_rank_that_lives_keeps_the_bound(job: Make) -> None:
    """Whose deadline is learned from two others' longest: it was stage_max / 10 longer than all may take."""
    world = job(3, seed=59, terms=Terms(rate=1e7, room=8 << 10), steps=4).start()
    world.kill(0, at=0)
    world.kill(1, at=0)
    world.finish()
    assert world.nodes[2].step == 4
