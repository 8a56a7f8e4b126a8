"""Exponents of tensors in whole all-reduces: agreed on from averages, the same on all ranks or refused (codec-18)."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support import PATIENCE, Team, exact_mean, gradients, nmse, patient, team
from tailbound.collective import balancing, jump
from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.op import Outcome
from tailbound.errors import TransportError

#: A large tensor, a small one, and one that nobody uses.
SIZES, NUMEL = (30_001, 7_000, 3_000), 40_001
STARTS = (0, 30_001, 37_001)
SMALL, UNUSED = slice(30_001, 37_001), slice(37_001, None)


def inputs_of(ranks: int, seed: int, sizes: Sequence[float] = (1.0, 1e-3, 0.0)) -> list[NDArray[np.float32]]:
    by_entry = np.repeat(np.array(sizes, np.float32), SIZES)
    return [x * by_entry for x in gradients("U", ranks, NUMEL, seed=seed)]


def step(
    job: Team, inputs: Sequence[NDArray[np.float32]], ranks: Sequence[int] | None = None
) -> list[tuple[NDArray[np.float32], Outcome]]:
    """One step of one bucket, its tensors named."""

    def one(communicator: Communicator) -> tuple[NDArray[np.float32], Outcome]:
        over: queue.Queue[Outcome] = queue.Queue()
        data = inputs[communicator.config.rank]
        out = np.full_like(data, np.nan)
        communicator.launch(
            0, data, out, last=True, done=over.put, handling=Handling(starts=STARTS, parts="two tensors")
        )
        return out, over.get(timeout=PATIENCE)

    return job.each(one, ranks)


def settled(job: Team, rank: int = 0) -> int:
    """Digest of the exponents of the next op."""
    return job[rank].job.sequence.map.balance


def until(job: Team, done: Callable[[], object], sizes: Sequence[float] = (1.0, 1e-3, 0.0), most: int = 100) -> Any:
    """Steps until ``done``; what the last one gave, and its inputs."""
    for seed in range(most):
        inputs = inputs_of(len(job), seed, sizes)
        results = step(job, inputs)
        for out, outcome in results:
            assert outcome.error is None
            np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
        if done():
            return results, inputs
    pytest.fail(f"not within {most} steps")


@pytest.mark.parametrize("bits", [8, (4, 8)])
def test_a_small_tensor_keeps_its_precision_once_exponents_are_agreed_on(bits: int) -> None:
    with team(3, patient(balance=True, bits=bits)) as job:
        results, inputs = until(job, lambda: True)
        before = nmse(results[0][0][SMALL], exact_mean(inputs)[SMALL])
        assert before > 10  # noise
        until(job, lambda: all(settled(job, rank) for rank in range(3)))
        assert len({settled(job, rank) for rank in range(3)}) == 1
        # What was noise is seen to be smaller from table to table. There are some five, and each takes as many steps as
        # pass while ranks agree: more on a busy machine.
        for seed in range(200):
            inputs = inputs_of(3, seed)
            results = step(job, inputs)
            value, exact = results[0][0], exact_mean(inputs)
            if seed >= 39 and nmse(value[SMALL], exact[SMALL]) < before / 1000:
                break
        assert nmse(value[SMALL], exact[SMALL]) < before / 1000
        assert nmse(value, exact) <= {8: 1.5e-3, (4, 8): 0.15}[bits]
        assert max(c.job.counters["exponents_settled"] for c in job.communicators) <= 8
        known, agreed = job[0].job, job[0]._engine.maps.agreement.agreed
        marks = known.tables.marks({each.content.balance for each in agreed}, (0, NUMEL, 0))
        assert {key[3] >> 24 for key in known.exponents} <= marks  # scales of older ones are gone


def test_a_tensor_that_becomes_a_thousand_times_larger_is_clipped_once_at_most() -> None:
    """What no shift holds is clipped and counted in one op; then scales fit, and exponents follow."""
    with team(3, patient(balance=True)) as job:
        until(job, lambda: settled(job))
        until(job, lambda: True)
        first = settled(job)
        results, inputs = until(job, lambda: True, (1.0, 1.0, 0.0))
        assert np.isfinite(results[0][0]).all()
        results, inputs = until(job, lambda: True, (1.0, 1.0, 0.0))
        assert not sum(outcome.clipped for _, outcome in results)
        assert nmse(results[0][0][SMALL], exact_mean(inputs)[SMALL]) < 1e-2
        for seed in range(30):
            inputs = inputs_of(3, seed, (1.0, 1.0, 0.0))
            results = step(job, inputs)
        assert settled(job) != first
        assert nmse(results[0][0], exact_mean(inputs)) < 1.5e-3  # until then what is beside it was noise


def test_who_jumps_gets_the_exponents_with_its_place() -> None:
    """Rule: clock-20."""
    with team(3, patient(balance=True)) as job:
        until(job, lambda: all(settled(job, rank) for rank in range(3)))
        until(job, lambda: True)
        assert all(c.drain(PATIENCE) for c in job.communicators)
        known, digest = job[2].job.tables, settled(job, 2)
        data = known.encoded(digest)
        job[2]._engine.call(lambda: known.keep(set())).result(PATIENCE)
        assert not known.knows(digest)
        assert jump.jump(job[2]._engine, job[2].reliable.pull) == 0  # it is where the others are
        assert known.encoded(digest) == data
        with pytest.raises(TransportError, match="not known here any more"):
            balancing.fetch(job[2].reliable.pull, 0, 12345)
        with pytest.raises(TransportError, match="other exponents"):
            balancing.fetch(lambda *_: b"", 0, digest)


def test_buckets_that_are_not_named_are_looked_at_in_blocks() -> None:
    third = [NUMEL * i // 3 for i in (1, 2, 3)]
    with team(2, patient(balance=True)) as job:
        for seed in range(60):
            inputs = gradients("U", 2, NUMEL, seed=seed)
            for x in inputs:
                x[third[1] :] *= np.float32(1e-3)
            results = job.allreduce(inputs)
            if settled(job):
                break
        assert settled(job)
        table = job[0].job.tables.table(settled(job))
        assert table is not None
        found = table.ops[0, NUMEL, 0]
        assert found.ends.tolist() == third
        assert found.exponents[2] < found.exponents[0] == found.exponents[1]
        assert all(outcome.error is None for _, outcome in results)
