"""Jobs with a switch when packets are lost, workers stop, come late or abstain, and when the switch itself is gone."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from fault_rows import contributors
from reference_switch import shuffled
from support import MS, PATIENCE, Team, Trouble, exact_mean, gradients, hasty, nmse, patient
from switched_team import switched_team
from tailbound.collective.communicator import Communicator
from tailbound.wire.schema import Verdict

NUMEL = 2 * 64 * 128


def warm_up(job: Team, ops: int = 3) -> None:
    seen = 0
    for op in range(20):
        if seen == ops:
            return
        results = job.allreduce(gradients("U", len(job), NUMEL, seed=1000 + op))
        seen = seen + 1 if whole(results) else 0
    pytest.fail("never whole")


def counter(job: Team, name: str) -> int:
    return sum(member.stats()["counters"].get(name, 0) for member in job.communicators)


def whole(results: list[Any]) -> bool:
    return all(o.delivered == o.expected for _, o in results)


def identical(results: list[Any]) -> bool:
    first = results[0][0].view(np.uint32)
    return all(np.array_equal(first, out.view(np.uint32)) for out, _ in results)


@pytest.mark.parametrize("form", ["mean", "sums"])
def test_what_is_lost_is_sent_again_and_nothing_is_missing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five percent both ways, and doubles: no deadline is near, so that gaps alone bring everything."""
    # a row's repeats are over soon, and a thread that does not run meanwhile would answer none of them
    monkeypatch.setattr("tailbound.transport.flush.PATIENCE", 100 * MS)
    ranks = 3
    trouble = shuffled(7, loss=0.05, twice=0.05)
    with switched_team(ranks, patient(quiet=20 * MS), form=form, trouble=trouble) as (job, switch):
        for op in range(8):
            inputs = gradients("U", ranks, NUMEL, seed=op)
            results = job.allreduce(inputs)
            assert all(o.missed == 0 and o.delivered == o.expected and not o.deadline_hits for _, o in results)
            assert identical(results)
            assert nmse(results[0][0], exact_mean(inputs)) <= 4e-3
        assert switch.rules is not None
        assert switch.rules.counts[Verdict.ANSWERED] > 0 < switch.rules.counts[Verdict.DUPLICATE]
        assert not switch.rules.counts[Verdict.FLUSHED]
        assert counter(job, "rows_flushed") == 0 < counter(job, "rows_sent_again")
        # a row again for each that lacked it, now and then twice; never a storm
        assert counter(job, "rows_sent_again") <= 0.5 * counter(job, "contributions_sent")


def test_a_switch_that_loses_half_of_all_is_asked_within_bounds() -> None:
    ranks = 3
    with switched_team(ranks, hasty(), trouble=shuffled(3, loss=0.5)) as (job, _):
        for op in range(4):
            results = job.allreduce(gradients("U", ranks, NUMEL, seed=op))
            assert all(np.isfinite(out).all() for out, _ in results)
        again = counter(job, "rows_sent_again") + counter(job, "rows_flushed")
        assert again <= 4 * ranks * 128 * 8


def test_a_worker_that_vanishes_costs_flushes_for_three_ops_and_then_nothing() -> None:
    """Rows are released with what is in; everybody left has the same; and once it is suspect nobody waits for it.

    Rule: clock-28.
    """
    ranks = 3
    with switched_team(ranks, hasty()) as (job, _):
        warm_up(job)
        Trouble(seed=0, loss=1.0).attach(job[2])
        flushed = 0
        for op in range(20):
            inputs = gradients("U", ranks, NUMEL, seed=op)
            begun = time.monotonic()
            results = job.allreduce(inputs, [0, 1])
            assert time.monotonic() - begun < job[0].config.bound / 1e9 + 2
            assert all(2 in o.missing for _, o in results)
            if any(o.missing != {2} or o.missed for _, o in results):
                continue  # a loaded machine held up another one, too
            assert identical(results)
            assert nmse(results[0][0], exact_mean(inputs[:2])) <= 4e-3
            if not any(o.deadline_hits for _, o in results):
                break
            flushed += 1
        else:
            pytest.fail("still waited for")
        assert flushed
        assert job[0].stats()["suspects"] == [2]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings for late launches: no thread is held up for as long as others, the switch too, are waited for."""
    monkeypatch.setattr("tailbound.collective.switched.PATIENCE", 500 * MS)
    return hasty(deadline_1=1200 * MS, deadline_2=2400 * MS, stage_max=2500 * MS)


def test_a_worker_that_comes_late_has_the_others_means_at_once(slow: dict[str, Any]) -> None:
    ranks = 3
    with switched_team(ranks, slow) as (job, _):
        warm_up(job)
        inputs = gradients("U", ranks, NUMEL, seed=5)
        early = job.allreduce(inputs, [0, 1])
        out = np.empty(NUMEL, np.float32)
        outcome = job[2].allreduce(inputs[2], out).result(PATIENCE)
        assert outcome.late
        assert outcome.missed == 0
        assert np.array_equal(out, early[0][0])
        assert nmse(out, exact_mean(inputs[:2])) <= 4e-3


def test_a_late_worker_asks_for_what_was_lost_on_its_way(slow: dict[str, Any]) -> None:
    ranks = 3
    lose = [False]
    chance = shuffled(11, loss=0.3)

    def trouble(rank: int, data: bytes, result: bool) -> int:
        return chance(rank, data, result) if lose[0] and rank == 2 and result else 1

    with switched_team(ranks, slow, trouble=trouble) as (job, switch):
        warm_up(job)
        lose[0] = True
        inputs = gradients("U", ranks, NUMEL, seed=5)
        early = job.allreduce(inputs, [0, 1])
        lose[0] = False
        out = np.empty(NUMEL, np.float32)
        outcome = job[2].allreduce(inputs[2], out).result(PATIENCE)
        assert outcome.late
        assert outcome.missed == 0
        assert np.array_equal(out, early[0][0])
        assert switch.rules is not None
        assert switch.rules.counts[Verdict.ANSWERED] > 0


def test_a_gradient_that_is_not_finite_is_left_out_without_waiting_for_the_deadline() -> None:
    ranks = 3
    with switched_team(ranks, patient(quiet=5 * MS)) as (job, _):
        warm_up(job)
        for op in range(3):
            inputs = gradients("U", ranks, NUMEL, seed=op)
            inputs[1][17] = np.nan
            results = job.allreduce(inputs)
            assert identical(results)
            assert results[1][1].abstained
            assert all(o.missed == 0 and not o.deadline_hits for _, o in results)
            assert nmse(results[0][0], exact_mean([inputs[0], inputs[2]])) <= 4e-3


def test_a_switch_that_is_loaded_anew_goes_on() -> None:
    """What it had summed is gone; rows that lose by it are released with what comes again, and nothing is wrong."""
    ranks = 3
    # the second deadline is only there for a switch that does not run for a while
    with switched_team(ranks, hasty(deadline_2=2400 * MS, stage_max=2500 * MS, rotate=False)) as (job, switch):
        warm_up(job)
        for op in range(6):
            inputs = gradients("U", ranks, NUMEL, seed=op)

            def run(member: Communicator, inputs: Any = inputs, op: int = op) -> Any:
                out = np.empty(NUMEL, np.float32)
                future = member.allreduce(inputs[member.config.rank], out)
                if member.config.rank == 0 and op % 2:
                    switch.restart()
                return out, future.result(PATIENCE)

            results = job.each(run)
            for out, outcome in results:
                # rows that went on without somebody are means of fewer, never of anything else; what did not come in
                # time, on a busy machine, is zero
                found = contributors(out, inputs, set(range(ranks)), job[0]._row_width)
                assert outcome.missed or None not in found


def test_a_silent_switch_is_named_left_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailbound.transport.fallback.REST", 1500 * MS)
    ranks = 3
    with switched_team(ranks, hasty(deadline_1=300 * MS, deadline_2=150 * MS, stage_max=900 * MS)) as (job, switch):
        warm_up(job)
        end, ops = time.monotonic() + PATIENCE, itertools.count()

        def owners() -> set[tuple[int, ...]]:
            """By whose map the next op is placed, over all ranks; no op is placed by an older one."""
            return {tuple(member.job.map.owners) for member in job.communicators}

        def run() -> tuple[list[Any], float]:
            inputs = gradients("U", ranks, NUMEL, seed=next(ops))
            begun = time.monotonic()
            results = job.allreduce(inputs)
            assert time.monotonic() - begun < job[0].config.bound / 1e9 + 2
            return results, nmse(results[0][0], exact_mean(inputs))

        def right_under(wanted: tuple[int, ...]) -> None:
            """Of ten ops placed by this map one is whole; a loaded machine may spoil the others."""
            tried = 0
            while tried < 10 and time.monotonic() < end:
                before = owners()
                results, error = run()
                if before == owners() == {wanted}:
                    tried += 1
                    if whole(results):
                        assert identical(results)
                        assert error <= 4e-3
                        return
            pytest.fail(f"nothing is whole under {wanted}")

        assert owners() == {(3,)}
        switch.down = True
        silent = 0
        while owners() != {(0, 1, 2)}:
            assert time.monotonic() < end
            results, _ = run()
            if owners() == {(3,)}:
                silent += 1
                assert not any(out.any() for out, _ in results)  # nothing came, and nothing was made up
        assert silent >= 3
        assert switch.address.partition(":")[0] in caplog.text
        right_under((0, 1, 2))
        switch.down = False
        while owners() != {(3,)}:
            assert time.monotonic() < end
            run()
        right_under((3,))
