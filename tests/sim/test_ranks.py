"""Ranks that are late, dead, back or of another mind, in virtual time: their rows, and how long others wait.

Nothing is rotated, so that every row of a result is the mean of exactly those whose rows were in it.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fault_rows import contributors
from sim.team import Member, Result, SimTeam, sim_team
from support import alike, gradients, hasty, launch, patient
from tailbound.collective.comeback import WELCOME, ask_all
from tailbound.errors import LayoutError, TransportError
from tailbound.transport.control import Header
from tailbound.wire.schema import OP_INDEX_BITS, Flag, PacketType
from tailbound_lab.simulate.fabric import MS

WIDTH, ROWS = 64, 256
NUMEL = ROWS * WIDTH
#: Beyond deadlines, ns: packets under way, turns of the engine.
SLACK = 60 * MS


def settings(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Rows of which each is a mean by itself, and whose owners are known beforehand."""
    return given | {"width": WIDTH, "ring_mib": 1.0, "rotate": False, "share_rows": False} | more


def inputs_of(job: SimTeam, seed: int) -> list[np.ndarray]:
    return gradients("U", len(job), NUMEL, seed=seed)


def check(results: list[Result], inputs: list[np.ndarray], without: int) -> None:
    """All rows are there, each the mean of all ``without`` one, with the same bits on all ranks."""
    assert not any(outcome.missed or outcome.error for _, outcome in results)
    alike(results)
    others = frozenset(range(len(inputs))) - {without}
    assert set(contributors(results[0][0], inputs, {without}, WIDTH)) == {others}


def test_a_rank_later_than_the_deadline_is_left_out_until_it_is_in_time() -> None:
    """Its transport averages its own rows for the others meanwhile, and it gets the same bits at once.

    Three ops last until the deadline; then no rank waits for it, nor its transport for its own rows.
    Rules: clock-2, clock-8, clock-9, clock-13, clock-14.
    """
    with sim_team(4, settings(hasty())) as job:
        job.warm_up(NUMEL)
        for op in range(8):
            inputs, results = job.averaged(NUMEL, op, late={3: 1000 * MS})
            check(results, inputs, without=3)
            for _, outcome in results[:3]:
                assert (outcome.late, outcome.missing, outcome.deadline_hits > 0) == (False, {3}, op < 3)
                assert 400 * MS <= outcome.nanoseconds < 1000 * MS if op < 3 else outcome.nanoseconds < SLACK
            assert results[3][1].late
            assert results[3][1].nanoseconds < SLACK
        assert job[3].job.self_late
        assert job.suspects[:3] == [[3]] * 3
        counters = job[3].stats()["counters"]
        assert counters["late_launches"] == counters["ops_late"] == 8
        for op in range(3):
            job.averaged(NUMEL, op)
        assert not any(outcome.late for _, outcome in job.right(NUMEL))
        assert not job[3].job.self_late
        assert job.suspects == [[]] * 4


def test_an_owner_that_was_stopped_knows_that_it_may_have_other_averages() -> None:
    """It has all rows when it wakes up, and misses nothing: the others are equal without its results by then.

    One that is only slow has published in time. Rule: clock-21.
    """
    with sim_team(3, settings(hasty())) as job:
        job.warm_up(NUMEL)
        inputs = inputs_of(job, 1)
        for _ in range(3):
            job.allreduce(inputs, ranks=[0, 1])
        slow = [job.allreduce(inputs, ranks=[2])[0][1] for _ in range(3)]
        assert [(outcome.missed, outcome.late, outcome.doubtful) for outcome in slow] == [(0, True, False)] * 3
        own = job.start(inputs, ranks=[2])
        job.at(1 * MS, lambda: job.world.stop(2, 5000 * MS))
        others = [job.allreduce(inputs, ranks=[0, 1], late={0: 2 * MS, 1: 2 * MS}) for _ in range(3)]
        assert all(outcome.missed for results in others for _, outcome in results)
        ((_, outcome),) = job.finish(own)
        assert (outcome.missed, outcome.late, outcome.doubtful) == (0, False, True)


def test_a_bucket_of_fewer_rows_than_ranks_does_not_clear_one_that_is_cut_off() -> None:
    """Between such buckets no rank became suspect, and every op waited for its results until the deadline."""
    with sim_team(4, settings(hasty())) as job:
        job.warm_up(NUMEL)
        job.world.change(3, cut=True)
        for op in range(4):
            for numel, starts in ((NUMEL, ()), (WIDTH, (0,))):
                _, results = job.averaged(numel, op, ranks=range(3), starts=starts)
        assert [set(member.job.membership.result.suspects) for member in job.communicators[:3]] == [{3}] * 3
        assert results[0][1].missed == 0


# -- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "after"), [(2, 3), (3, 0)])
def test_ranks_with_another_bucket_are_named_by_all(ranks: int, after: int) -> None:
    """Rule: clock-18."""
    with sim_team(ranks, settings(hasty())) as job:
        job.warm_up(1000, after)
        results = job.allreduce([np.ones(1000 + 500 * (r == 1), np.float32) for r in range(ranks)])
        for rank, (_, outcome) in enumerate(results):
            said = str(outcome.error)
            assert (f"rank {rank} and rank 1 disagree" if rank != 1 else "rank 1 and rank ") in said
            assert "same model" in said
            with pytest.raises(LayoutError, match=f"rank {rank} .* disagree on op"):
                job[rank].allreduce(np.ones(1000, np.float32))


@pytest.mark.parametrize("shorter", [False, True])
def test_a_late_rank_that_foresaw_another_layout_publishes_nothing(*, shorter: bool) -> None:
    """Its transport knows only the old layout; it must not average rows of the new one as if they were old.

    Nor where the step ended with another op, though this one is the same: it would publish again once it launches.
    """
    with sim_team(3, settings(hasty())) as job:
        for _ in range(3):
            for member in job.communicators if shorter else ():
                launch(member, np.ones(NUMEL // 2, np.float32), np.empty(NUMEL // 2, np.float32), last=False)
            job.right(NUMEL // (1 + shorter))
        inputs, results = job.averaged(NUMEL // 2, 1, late={2: 3000 * MS})
        assert not any(outcome.error for _, outcome in results)
        for out, outcome in results[:2]:
            assert outcome.missing == {2}
            assert set(contributors(out, inputs, {2}, WIDTH)) == {None, frozenset({0, 1})}
        assert job[2].stats()["counters"]["predictions_wrong"] == 1
        assert all("LAYOUT_MISMATCH" not in member.stats()["drops"] for member in job.communicators)
        for op in range(2):
            job.averaged(NUMEL // 2, op)
        job.right(NUMEL // 2)


# -- ranks out of step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "ill"), [(np.nan, {1}), (-np.inf, {1}), (np.inf, {0, 1, 2})])
def test_a_rank_with_a_gradient_that_is_not_finite_abstains(
    monkeypatch: pytest.MonkeyPatch, value: float, ill: set[int]
) -> None:
    """The first word of it to every peer is lost, and its results say it. Rules: clock-25, codec-4."""
    lost: set[tuple[int, int, int]] = set()
    with sim_team(3, settings(patient(quiet=0))) as job:
        for member in job.communicators:

            def lossy(
                rank: int, head: Header, body: bytes = b"", here: Member = member, tell: Any = member.job.tell
            ) -> None:
                word = here.config.rank, rank, head.op
                if head.type == PacketType.READY and head.flags & Flag.ABSTAIN and word not in lost:
                    lost.add(word)
                else:
                    tell(rank, head, body)

            monkeypatch.setattr(member.job, "tell", lossy)
        for op in range(5):
            inputs, abstain = inputs_of(job, op), ill if op in (0, 3) else set()
            for rank in abstain:
                inputs[rank][12345] = value
            results = job.allreduce(inputs)
            for rank, (_, outcome) in enumerate(results):
                assert outcome.abstained == (rank in abstain)
                assert (outcome.delivered, outcome.deadline_hits, outcome.missing) == (outcome.expected, 0, set())
            if abstain == {1}:
                inputs[1][12345] = 0.0
                check(results, inputs, without=1)
        assert len(lost) == 2 * 2 * len(ill)
        assert job[1].stats()["counters"]["abstained"] == 2
        assert job.suspects == [[]] * 3


def test_the_others_wait_for_a_rank_that_holds() -> None:
    """Three times as long as both deadlines: no rank is left out or suspected, and no rank takes it for computing."""
    with sim_team(3, settings(hasty(deadline_1=300 * MS, deadline_2=300 * MS))) as job:
        job.warm_up(NUMEL, 1)
        job[2].hold(True)
        job.until(lambda: all(m.job.membership.holding(job.now) for m in job.communicators[:2]), "it holds", 100 * MS)
        job.at(1800 * MS, lambda: job[2].hold(False))
        results = job.right(NUMEL, late={2: 1800 * MS})
        assert all(outcome.nanoseconds > 1800 * MS for _, outcome in results[:2])
        assert job.suspects == [[]] * 3  # clock-16
        assert {member.job.deadlines.start_max for member in job.communicators} == {job[0].config.start_max}


def test_a_lost_rank_gets_zeros_at_once_and_jumps() -> None:
    """Rule: clock-20."""
    with sim_team(3, settings(hasty(), ring_mib=1 / 8)) as job:
        job.warm_up(NUMEL)
        ring = job[0].job.store.result_rows
        steps, first = 3 * ring // ROWS, 0
        for step in range(steps):
            assert not any(outcome.error for _, outcome in job.averaged(NUMEL, step, [0, 1])[1])
        assert job[2].lost
        assert steps - 1 <= job[2].behind <= steps
        with pytest.raises(TransportError, match="steps behind: ask another"):
            job[2]._engine.position()
        kept = {int(label) >> OP_INDEX_BITS for label in job[2].job.store.presence["op"] if label}
        assert len(kept) >= ring // ROWS - 1  # whatever op records reach
        for first in range(1, steps):  # the contents of the ring come first
            ((out, last),) = job.averaged(NUMEL, first, [2])[1]
            assert last.late
            assert last.nanoseconds < SLACK
            if last.skipped:
                break
        assert last.skipped
        assert not out.any()
        assert job[2].jump() == steps - first
        control = job[2].job.store.control
        assert int(control["released"][0]) == (job[2].job.sequence.upcoming - 1) & 0xFFFFFFFF  # records from here on
        assert (job[2].behind, job[2].lost) == (0, False)
        for op in range(5):
            job.averaged(NUMEL, op)
        job.right(NUMEL)


# -- a rank that is back, and a peer that has not heard of it: no rank is left out for ever (clock-32) -----------------


RANKS, BACK, DEAF = 4, 3, 1


@pytest.mark.parametrize("dead", [(), (DEAF,)])
def test_a_peer_that_misses_the_welcome_is_asked_again_and_its_rows_bring_it_in(dead: tuple[int, ...]) -> None:
    """It has heard a goodbye of the process before: until it is told, it waits for no row of the new one (clock-32)."""
    with sim_team(RANKS, hasty(width=64, ring_mib=1.0)) as job:
        job.warm_up(NUMEL)
        for rank in range(BACK):
            job[rank].job.membership.bye(BACK, 0)
            job[rank].job.publish_live()
        answered: queue.Queue[int] = queue.Queue()
        listens, closing, tries = threading.Event(), list[Callable[[], None]](), Counter[int]()

        def pull(rank: int, name: str, *_: object) -> bytes:
            tries[rank] += 1
            if rank == DEAF and tries[rank] == 1:
                raise TransportError("no answer in time: start it")
            assert name == WELCOME
            assert rank != DEAF or listens.wait(30)
            engine = job[rank]._engine
            stamps = engine.ask(lambda: engine.welcome(BACK, job[BACK].step))
            answered.put(rank)
            return b"".join(stamp.to_bytes(8, "big") for stamp in stamps)

        path: Any = SimpleNamespace(
            keep=lambda *_: None, pull=pull, before_close=closing.append,
            runs=lambda body, name: threading.Thread(target=body, daemon=True).start(),
        )  # fmt: skip
        members = job[BACK].job.membership
        assert ask_all(job[BACK]._engine, path, job[BACK].step, dead) == {0, 2}
        assert tries[DEAF] == 1 - len(dead), "who is dead, as the donor says, is not waited for"
        assert (members.suspects, members.gone) == ({DEAF}, set())
        assert {answered.get(timeout=30) for _ in range(2)} == {0, 2}
        (_, without), *_ = job.averaged(NUMEL, 10, [BACK, 0, 2, DEAF])[1]
        assert without.error is None
        listens.set()
        assert answered.get(timeout=30) == DEAF
        assert job[DEAF].job.membership.gone == set()
        for op in range(3):
            job.averaged(NUMEL, op)
        job.right(NUMEL)
        assert members.suspects == set()
        closing.pop()()
