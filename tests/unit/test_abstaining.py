"""Ranks whose gradients are not finite, at the level of arrays: in cold ops, and all at once (clock-25)."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from support import PATIENCE, exact_mean, gradients, nmse, patient, team
from tailbound.collective.communicator import Communicator
from tailbound.collective.job import Job
from tailbound.collective.op import Outcome
from tailbound.wire.schema import Flag, PacketType

RANKS = 3
SIZES = (9000, 7000, 4000)
#: Who is not finite, step by step; the ops of step 0 are cold.
ILL: list[set[int]] = [{1}, set(), {0, 1, 2}, {2}, {0, 1, 2}, set()]


def _step(communicator: Communicator, step: int) -> list[tuple[np.ndarray, Outcome]]:
    rank, running = communicator.config.rank, []
    for bucket, size in enumerate(SIZES):
        data = gradients("C", RANKS, size, 10 * step + bucket)[rank]
        if rank in ILL[step]:
            data[-1] = np.inf
        done: Future[Outcome] = Future()
        out = np.full_like(data, np.nan)
        communicator.launch(bucket, data, out, last=bucket == len(SIZES) - 1, done=done.set_result)
        running.append((out, done))
    return [(out, done.result(PATIENCE)) for out, done in running]


def _lose_first_words(job: Job, lost: list[tuple[int, int]]) -> None:
    """Loses, of this rank, the first word to every peer that it abstains from an op; notes op and peer in ``lost``."""
    tell = job.tell

    def lossy(rank: int, head: np.ndarray, body: bytes = b"") -> None:
        word = int(head["op"][0]), rank
        if head["type"] == PacketType.READY and int(head["flags"][0]) & Flag.ABSTAIN and word not in lost:
            lost.append(word)
        else:
            tell(rank, head, body)

    job.tell = lossy  # type: ignore[method-assign]


@pytest.mark.parametrize("lossy", [False, True], ids=["all words arrive", "first words are lost"])
def test_nothing_is_lost_and_nobody_is_blamed(lossy: bool) -> None:
    """The mean of those that are finite; where none is, zeros that are told from loss."""
    lost: list[list[tuple[int, int]]] = [[] for _ in range(RANKS)]
    overtaken: set[int] = set()
    with team(RANKS, patient(quiet=0), cookie=5) as job:
        if lossy:
            for communicator, words in zip(job.communicators, lost, strict=True):
                _lose_first_words(communicator.job, words)
        for step, ill in enumerate(ILL):
            by_rank = job.each(lambda c, step=step: _step(c, step))
            for rank, results in enumerate(by_rank):
                for bucket, (out, outcome) in enumerate(results):
                    assert outcome.abstained == (rank in ill)
                    if lossy and outcome.skipped:  # the others were through before it could ask
                        assert len(ill) == RANKS
                        assert outcome.void
                        overtaken.add(rank)
                        continue
                    assert outcome.delivered == outcome.expected
                    assert outcome.deadline_hits == outcome.missed == 0
                    assert outcome.missing == set()
                    assert outcome.void == (len(ill) == RANKS)
                    assert np.array_equal(out, by_rank[0][bucket][0])
                    inputs = gradients("C", RANKS, SIZES[bucket], 10 * step + bucket)
                    well = [x for r, x in enumerate(inputs) if r not in ill]
                    assert nmse(out, exact_mean(well)) < 1e-2 if well else not out.any()
        for communicator in job.communicators:
            stats = communicator.stats()
            assert stats["suspects"] == []
            # who never heard that the others abstained takes their rows for lost
            assert stats["safeguard"]["results"] == 0 or communicator.config.rank in overtaken
    words = sum(len(ill) for ill in ILL) * len(SIZES) * (RANKS - 1)
    assert sum(len(those) for those in lost) == (words if lossy else 0)
