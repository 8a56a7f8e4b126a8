"""Marks of what has been published reach the others though no row carries them, in virtual time (clock-7b)."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from sim.team import SimTeam, sim_team
from support import gradients, patient
from tailbound.collective.op import Outcome
from tailbound.wire import packets
from tailbound.wire.schema import Flag, PacketType
from tailbound_lab.simulate.fabric import MS

SIZES = (64 * 256, 64 * 256)
#: ns of silence after which marks are asked for (clock-30): who was told does not ask.
SILENCE = 4 * MS


def _step(job: SimTeam, seed: int, *, ill: bool = False) -> list[list[Outcome]]:
    """One step of two buckets; outcomes by bucket and rank."""
    found: list[list[Future[Outcome]]] = [[] for _ in SIZES]
    for bucket, size in enumerate(SIZES):
        for rank, data in enumerate(gradients("U", len(job), size, seed=seed + bucket)):
            done, out = Future[Outcome](), np.empty(size, np.float32)
            given = np.full_like(data, np.nan) if ill else data.copy()
            job[rank].launch(bucket, given, out, last=bucket == len(SIZES) - 1, done=done.set_result)
            found[bucket].append(done)
    job.until(lambda: all(done.done() for of in found for done in of), "the step ends")
    job.go(20 * MS)
    return [[done.result(0) for done in of] for of in found]


def test_an_op_without_any_row_is_over_without_a_question() -> None:
    """Owners had published nothing, and said so by the next packet alone. Rules: clock-7b, clock-25."""
    with sim_team(3, patient(width=64, share_rows=False, quiet=MS)) as job:
        for seed in range(8):
            _step(job, seed)
        for of_bucket in _step(job, 8, ill=True):
            for outcome in of_bucket:
                assert outcome.void
                assert outcome.nanoseconds < SILENCE


def test_results_that_left_before_those_of_the_op_before_are_told_as_published() -> None:
    """Their last row could not say so, and the last one of the op before did not: a lost row was not asked for.

    Rules: clock-7b, clock-23.
    """
    with sim_team(3, patient(width=64, share_rows=False, quiet=MS)) as job:
        for seed in range(8):
            _step(job, seed)
        lost: list[int] = []

        def of_one(to: int, sent: list[bytes]) -> list[bytes]:
            """Rank 1's rows of the first bucket are lost on the way to rank 0, which seals the second one first."""
            return [each for each in sent if to != 0 or not _is(each, PacketType.CONTRIBUTION, 0)]

        def of_zero(to: int, sent: list[bytes]) -> list[bytes]:
            """And so is rank 0's first row of the second bucket, on the way to rank 2."""
            if to == 2 and not lost and _is(sent[0], PacketType.RESULT, 1):
                lost.append(to)
                return sent[1:]
            return sent

        def _is(data: bytes, kind: PacketType, bucket: int) -> bool:
            """Whether it is a row of a bucket, sent for the first time."""
            head = np.frombuffer(data[:64], packets.HEADER_DTYPE)[0]
            return bool(
                head["type"] == kind and int(head["op"]) & 1023 == bucket and not int(head["flags"]) & Flag.REPEAT
            )

        job[1].job.datapath.socket.trouble = of_one  # type: ignore[attr-defined]
        job[0].job.datapath.socket.trouble = of_zero  # type: ignore[attr-defined]
        first, second = _step(job, 8)
        assert lost
        assert not any(outcome.missed for outcome in first + second)
        assert second[0].nanoseconds < first[0].nanoseconds < second[2].nanoseconds
        assert second[2].nanoseconds < first[0].nanoseconds + SILENCE
