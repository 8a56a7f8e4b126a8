"""Ranks that are late, dead, back or of another mind, in virtual time: who is in which row, and how long others wait.

Nothing is rotated, so that every row of a result is the mean of exactly those whose rows were in it.

Rules: clock-32.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from fault_rows import contributors, same_bits
from sim.team import Member, Result, SimTeam, sim_team
from support import Trouble, alike, gradients, hasty, patient, whole
from tailbound.codec.owners import place
from tailbound.codec.shape import shape_for
from tailbound.collective.alerts import LOOK_EVERY
from tailbound.collective.comeback import WELCOME, ask_all
from tailbound.errors import LayoutError, TransportError
from tailbound.transport.reliable import Reliable
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


def warm_up(job: SimTeam, ops: int = 3, numel: int = NUMEL) -> None:
    """Warm scales, and a layout that can be foreseen."""
    for op in range(ops):
        for _, outcome in job.allreduce(gradients("U", len(job), numel, seed=1000 + op)):
            assert outcome.delivered == outcome.expected


def check(results: list[Result], inputs: list[np.ndarray], without: int | None = None) -> None:
    """All rows are there, each the mean of all ranks or of all ``without`` one, and all ranks have the same bits."""
    left = frozenset(range(len(inputs))) - {without}
    for _, outcome in results:
        assert (outcome.missed, outcome.error) == (0, None)
    alike(results)
    assert set(contributors(results[0][0], inputs, {without} if without is not None else set(), WIDTH)) == {left}


def everybody(results: list[Result], inputs: list[np.ndarray]) -> None:
    """Nothing is missing anywhere, and no rank is late."""
    check(results, inputs)
    for _, outcome in results:
        assert (outcome.delivered, outcome.missing, outcome.late) == (outcome.expected, set(), False)


def suspects(job: SimTeam) -> list[list[int]]:
    return [member.stats()["suspects"] for member in job.communicators]


def owned(job: SimTeam, rank: int) -> np.ndarray:
    """Which rows of an op belong to ``rank`` (bool[ROWS])."""
    return np.asarray(place(shape_for(NUMEL, WIDTH), job[0].job.sequence.map, len(job)).owner == rank)


def test_a_rank_that_is_late_but_in_time_is_waited_for() -> None:
    """Rule: clock-7a."""
    with sim_team(3, settings(patient())) as job:
        warm_up(job)
        for op in range(4):
            inputs, results = job.averaged(NUMEL, op, late={2: 300 * MS})
            everybody(results, inputs)
            early = [outcome.nanoseconds for _, outcome in results[:2]]
            assert 299 * MS < min(early) <= max(early) < 300 * MS + SLACK
            assert results[2][1].nanoseconds < SLACK


def test_a_rank_later_than_the_deadline_is_left_out_and_gets_the_result() -> None:
    """The others end without it in time, with its own rows averaged by its transport; it gets the same bits at once.

    Rules: clock-2, clock-9, clock-13.
    """
    with sim_team(4, settings(hasty())) as job:
        warm_up(job)
        for op in range(2):
            inputs, results = job.averaged(NUMEL, op, late={3: 1000 * MS})
            check(results, inputs, without=3)  # its rows were published without the training thread
            for _, outcome in results[:3]:
                assert (outcome.late, outcome.missing) == (False, {3})
                assert 400 * MS <= outcome.nanoseconds < 1000 * MS
            assert results[3][1].late
            assert results[3][1].nanoseconds < SLACK
        counters = job[3].stats()["counters"]
        assert counters["late_launches"] == counters["ops_late"] == 2


def test_a_rank_that_is_always_late_is_not_waited_for_and_comes_back() -> None:
    """Rules: clock-8, clock-14."""
    with sim_team(4, settings(hasty())) as job:
        warm_up(job)
        for op in range(3):  # each costs a deadline
            results = job.allreduce(inputs_of(job, op), late={3: 1000 * MS})
            assert all(o.deadline_hits > 0 for _, o in results[:3])
        assert job[3].job.self_late
        assert suspects(job)[:3] == [[3]] * 3
        for op in range(5):  # no rank waits for it, nor its transport for its own rows
            inputs, results = job.averaged(NUMEL, op, late={3: 1000 * MS})
            check(results, inputs, without=3)
            for _, outcome in results[:3]:
                assert (outcome.missing, outcome.deadline_hits) == ({3}, 0)
                assert outcome.nanoseconds < SLACK
        for op in range(4):  # in time again
            inputs, results = job.averaged(NUMEL, op)
        everybody(results, inputs)
        assert not job[3].job.self_late
        assert suspects(job) == [[]] * 4


@pytest.mark.parametrize("first", [False, True])
def test_a_rank_dies_and_comes_back(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Three ops cost deadlines, then no rank waits for it any more; what is said names it, op and half.

    In the first op the scales are not agreed on yet: the others wait for its needs too, in bounded time.
    Rules: clock-9, clock-14.
    """
    ranks, dead, live = 3, 2, [0, 1]
    with sim_team(ranks, settings(hasty())) as job:
        if not first:
            warm_up(job)
        rows = owned(job, dead)
        job[dead].trouble(Trouble(seed=0, loss=1.0))  # nothing leaves it, as if it had been killed
        held: list[np.ndarray] = []
        with caplog.at_level(logging.WARNING, "tailbound"):
            for op in range(8):
                inputs = inputs_of(job, op)
                held.append(inputs[dead])
                results = job.allreduce(inputs, live)
                for out, outcome in results:
                    assert outcome.missing == {dead}
                    found = np.array(contributors(out, inputs, {dead}, WIDTH))
                    assert all(who is None for who in found[rows])
                    assert set(found[~rows]) == {frozenset(live)}
                    assert outcome.missed == rows.sum()
                    same_bits(out, results[0][0], WIDTH)
                    assert (outcome.deadline_hits > 0) == (op < 3), op
                    assert op < 3 or outcome.nanoseconds < SLACK
        assert suspects(job)[:-1] == [[dead]] * len(live)
        said = [record.getMessage() for record in caplog.records]
        for rank in live:
            assert any(text.startswith(f"rank {rank}: rank {dead} has sent no contribution") for text in said)
            assert any(text.startswith(f"rank {rank}: rank {dead} has published no result") for text in said)
        job[dead].trouble(None)
        for data in held:  # back: first it goes through what it missed
            inputs = inputs_of(job, 0)
            inputs[dead] = data
            assert job.allreduce(inputs, [dead])[0][1].error is None
        for op in range(4):
            inputs, results = job.averaged(NUMEL, 100 + op)
        everybody(results, inputs)
        assert suspects(job) == [[]] * ranks


# -- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "after"), [(2, 3), (3, 0)])
def test_ranks_with_another_bucket_are_named_by_all(ranks: int, after: int) -> None:
    """Rule: clock-18."""
    with sim_team(ranks, settings(hasty())) as job:
        warm_up(job, after, 1000)
        outcomes = [o for _, o in job.allreduce([np.ones(1000 + 500 * (r == 1), np.float32) for r in range(ranks)])]
        for rank in range(ranks):
            said = str(outcomes[rank].error)
            assert (f"rank {rank} and rank 1 disagree" if rank != 1 else "rank 1 and rank ") in said
            assert "same model" in said
        for member in job.communicators:
            with pytest.raises(LayoutError, match=f"rank {member.config.rank} .* disagree on op"):
                member.allreduce(np.ones(1000, np.float32))


def test_a_late_rank_that_foresaw_another_layout_publishes_nothing() -> None:
    """Its transport knows only the old layout; it must not average rows of the new one as if they were old."""
    old, new = NUMEL, NUMEL // 2
    with sim_team(3, settings(hasty())) as job:
        warm_up(job, 3, old)
        inputs, results = job.averaged(new, 1, late={2: 3000 * MS})
        for out, outcome in results[:2]:
            assert outcome.error is None
            assert outcome.missing == {2}
            found = contributors(out, inputs, {2}, WIDTH)
            assert set(found) == {None, frozenset({0, 1})}
        assert results[2][1].error is None
        assert job[2].stats()["counters"]["predictions_wrong"] == 1
        assert all("LAYOUT_MISMATCH" not in member.stats()["drops"] for member in job.communicators)
        inputs = gradients("U", 3, new, seed=2)
        for _ in range(3):
            results = job.allreduce(inputs)
        everybody(results, inputs)


# -- ranks out of step ----------------------------------------------------------------------------------------------


def test_a_rank_without_rows_gets_the_mean_of_the_others() -> None:
    """It takes part without rows by choice: no rank waits for them, it is not suspected, nor counted as late."""
    with sim_team(3, settings(patient())) as job:
        warm_up(job)
        for op in range(4):
            inputs, results = job.averaged(NUMEL, op, silent={2})
            check(results, inputs, without=2)
            for _, outcome in results:
                assert (outcome.delivered, outcome.deadline_hits) == (outcome.expected, 0)
                assert (outcome.late, outcome.abstained) == (False, False)
        assert suspects(job) == [[]] * 3


@pytest.mark.parametrize(("value", "first"), [(np.nan, 0), (-np.inf, 3)])
def test_a_rank_with_a_gradient_that_is_not_finite_abstains(value: float, first: int) -> None:
    """In a cold op (the first) and in a warm one: the others' mean, the same bits everywhere, and no suspicion.

    Rules: clock-25, codec-4.
    """
    with sim_team(3, settings(patient())) as job:
        for op in range(first + 2):
            inputs = inputs_of(job, op)
            if op == first:
                inputs[1][12345] = value
            results = job.allreduce(inputs)
            inputs[1][12345] = 0.0
            check(results, inputs, without=1 if op == first else None)
            for rank, (_, outcome) in enumerate(results):
                assert outcome.abstained == (op == first and rank == 1)
                assert (outcome.delivered, outcome.deadline_hits) == (outcome.expected, 0)
        assert job[1].stats()["counters"]["abstained"] == 1
        assert suspects(job) == [[]] * 3


@pytest.mark.parametrize("ill", [{1}, {0, 1, 2}])
def test_who_has_lost_the_word_of_a_rank_that_abstains_hears_it_with_its_results(
    monkeypatch: pytest.MonkeyPatch, ill: set[int]
) -> None:
    """The first word to every peer is lost, in a cold op and in a warm one. Rule: clock-25."""
    lost: set[tuple[int, int, int]] = set()
    with sim_team(3, settings(patient(quiet=0))) as job:
        for member in job.communicators:

            def lossy(
                rank: int, head: np.ndarray, body: bytes = b"", here: Member = member, tell: Any = member.job.tell
            ) -> None:
                word = here.config.rank, rank, int(head["op"][0])
                if head["type"] == PacketType.READY and int(head["flags"][0]) & Flag.ABSTAIN and word not in lost:
                    lost.add(word)
                else:
                    tell(rank, head, body)

            monkeypatch.setattr(member.job, "tell", lossy)
        for op in range(5):
            inputs = inputs_of(job, op)
            for rank in ill if op in (0, 3) else ():
                inputs[rank][7] = np.inf
            for rank, (_, outcome) in enumerate(job.allreduce(inputs)):
                assert outcome.abstained == (rank in ill and op in (0, 3))
                assert (outcome.delivered, outcome.deadline_hits, outcome.missing) == (outcome.expected, 0, set())
        assert len(lost) == 2 * 2 * len(ill)
        assert suspects(job) == [[]] * 3


def test_the_others_wait_for_a_rank_that_holds() -> None:
    """Three times as long as both deadlines: no rank is left out, no rank is suspected (clock-16)."""
    with sim_team(3, settings(hasty(deadline_1=300 * MS, deadline_2=300 * MS))) as job:
        warm_up(job)
        inputs = inputs_of(job, 1)
        job[2].hold(True)
        job.until(lambda: all(m.job.membership.holding(job.now) for m in job.communicators[:2]), "it holds", 100 * MS)
        early = job.start(inputs, [0, 1])
        job.go(1800 * MS)
        assert not any(done.done() for _, done in early.values())
        job[2].hold(False)
        results = job.finish(early | job.start(inputs, [2]))
        everybody(results, inputs)
        assert all(outcome.nanoseconds > 1800 * MS for _, outcome in results[:2])
        assert suspects(job) == [[]] * 3


def test_a_lost_rank_gets_zeros_at_once_and_jumps() -> None:
    """Rule: clock-20."""
    with sim_team(3, settings(hasty(), ring_mib=1 / 8)) as job:
        warm_up(job)
        ring = job[0].job.store.result_rows
        first = step = 0
        while step < 3 * ring // ROWS:
            for _, outcome in job.allreduce(inputs_of(job, step), [0, 1]):
                assert outcome.error is None
            step += 1
        assert job[2].lost
        assert step - 1 <= job[2].behind <= step
        last = None
        kept = {int(label) >> OP_INDEX_BITS for label in job[2].job.store.presence["op"] if label}
        assert len(kept) >= ring // ROWS - 1  # whatever op records reach
        while first < step and (last is None or not last.skipped):  # what the ring held comes first
            ((out, last),) = job.allreduce(inputs_of(job, first), [2])
            assert last.late
            assert last.nanoseconds < SLACK
            first += 1
        assert last is not None
        assert last.skipped
        assert not out.any()
        assert job[2].jump() == step - first
        control = job[2].job.store.control
        assert int(control["released"][0]) == (job[2].job.sequence.upcoming - 1) & 0xFFFFFFFF  # records from here on
        assert (job[2].behind, job[2].lost) == (0, False)
        for op in range(6):
            inputs, results = job.averaged(NUMEL, 50 + op)
        everybody(results, inputs)


def test_an_error_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Watchers look for a peer of which nothing ever comes, and at the program (``unit/test_unheard``)."""

    class Watcher:
        def check(self, now: int) -> TransportError:
            return TransportError("told; look")

    with sim_team(2, settings(hasty())) as job:
        job[0]._engine._watching = (Watcher(),)
        job.go(5 * LOOK_EVERY)
        assert [record.getMessage() for record in caplog.records] == ["told; look"]
        with pytest.raises(TransportError, match="told"):
            job.allreduce(inputs_of(job, 1))


# -- a rank that is back, and a peer that has not heard of it: no rank is left out for good (clock-32) -----------------


RANKS, BACK, DEAF = 4, 3, 1


class _Path:
    """The reliable path of rank ``BACK``: ``DEAF`` hears nothing until it is told to listen."""

    def __init__(self, job: SimTeam) -> None:
        self._job, self._deaf, self.listen = job, True, threading.Event()
        self.answered: queue.Queue[int] = queue.Queue()
        self.closing: list[Callable[[], None]] = []

    def keep(self, rank: int, timeout: float) -> None:
        return None

    def pull(self, rank: int, name: str, request: bytes, timeout: float, most: int) -> bytes:
        if rank == DEAF and self._deaf:
            self._deaf = False
            raise TransportError("no answer in time: start it")
        if rank == DEAF:
            self.listen.wait(30)
        assert name == WELCOME
        engine = self._job[rank]._engine
        stamp = engine.ask(lambda: engine.welcome(BACK, self._job[BACK].step))
        self.answered.put(rank)
        return stamp.to_bytes(8, "big")

    def before_close(self, action: Callable[[], None]) -> None:
        self.closing.append(action)

    def runs(self, body: Callable[[], None], name: str) -> None:
        threading.Thread(target=body, name=name, daemon=True).start()


def test_a_peer_that_misses_the_welcome_is_asked_again_and_its_rows_bring_it_in() -> None:
    """It has heard a goodbye of the process before: until it is told, it waits for no row of the new one."""
    with sim_team(RANKS, hasty(width=64, ring_mib=1.0)) as job:
        for op in range(3):
            job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
        for rank in range(BACK):
            job[rank].job.membership.bye(BACK, 0)
            job[rank].job.publish_live()
        path = _Path(job)
        members = job[BACK].job.membership
        assert ask_all(job[BACK]._engine, cast(Reliable, path), job[BACK].step) == {0, 2}
        assert (members.suspects, members.gone) == ({DEAF}, set())
        assert {path.answered.get(timeout=30) for _ in range(2)} == {0, 2}
        inputs = gradients("U", RANKS, NUMEL, seed=10)
        (_, without), *_ = job.allreduce(inputs, [BACK, 0, 2, DEAF])
        assert without.error is None
        path.listen.set()
        assert path.answered.get(timeout=30) == DEAF
        assert job[DEAF].job.membership.gone == set()
        for op in range(4):
            results = job.allreduce(gradients("U", RANKS, NUMEL, seed=20 + op))
        assert members.suspects == set()
        whole(results)
        path.closing.pop()()


def test_who_hears_the_welcome_waits_for_the_rank_that_is_back() -> None:
    with sim_team(RANKS, hasty(width=64, ring_mib=1.0)) as job:
        for op in range(3):
            job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
        job[0]._engine.died(BACK)
        job[0]._engine.welcome(BACK, job[BACK].step)
        results = job.allreduce(gradients("U", RANKS, NUMEL, seed=9), late={BACK: 20 * MS})
        assert all(outcome.missing == set() for _, outcome in results)
