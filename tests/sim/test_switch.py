"""Jobs with a switch in virtual time: packets lost, workers that vanish or come late, and a switch that is gone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fault_rows import contributors
from reference_switch import shuffled
from sim.team import SimTeam, sim_switched_team, total
from support import Trouble, alike, gradients, hasty, patient, whole
from tailbound.transport.backoff import Policy
from tailbound.wire import packets
from tailbound.wire.schema import Verdict
from tailbound_lab.simulate.fabric import MS

RANKS, WIDTH = 3, 128
NUMEL = 2 * 64 * WIDTH
#: Beyond deadlines, ns: packets under way, turns of the engine.
SLACK = 60 * MS


def settings(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Rows of which each is a mean by itself."""
    return given | {"width": WIDTH, "ring_mib": 1.0, "rotate": False} | more


def inputs_of(seed: int) -> list[np.ndarray]:
    return gradients("U", RANKS, NUMEL, seed=seed)


def width(job: SimTeam) -> int:
    """Codes of a row, which the switch takes."""
    switch = job[0].config.switch
    assert switch is not None
    return switch.width(WIDTH)


def of(out: np.ndarray, inputs: list[np.ndarray], job: SimTeam) -> set[frozenset[int] | None]:
    """Whose means the rows are."""
    return set(contributors(out, inputs, set(range(RANKS)), width(job)))


def everybody(job: SimTeam, seed: int) -> None:
    """An op that is whole, right, and alike everywhere."""
    inputs, results = job.averaged(NUMEL, seed)
    whole(results)
    assert of(results[0][0], inputs, job) == {frozenset(range(RANKS))}


def warm_up(job: SimTeam) -> None:
    for seed in range(3):
        everybody(job, 1000 + seed)


@pytest.mark.parametrize("form", ["mean", "sums"])
def test_what_is_lost_is_sent_again_and_nothing_is_missing(form: str) -> None:
    """Five percent both ways, and doubles: no deadline is near, so that gaps alone bring everything."""
    trouble = shuffled(7, loss=0.05, twice=0.05)
    with sim_switched_team(RANKS, settings(patient(quiet=20 * MS)), form=form, trouble=trouble) as (job, switch):
        for op in range(8):
            everybody(job, op)
        counts = switch.rules.counts
        assert counts[Verdict.ANSWERED] > 0 < counts[Verdict.DUPLICATE]
        assert not counts[Verdict.FLUSHED]
        assert total(job, "seal_deadline_hits") == 0
        assert total(job, "rows_flushed") == 0 < total(job, "rows_sent_again")
        # a row again for each that lacked it, now and then twice; never a storm
        assert total(job, "rows_sent_again") <= 0.5 * total(job, "contributions_sent")


def test_a_switch_that_loses_half_of_all_is_asked_within_bounds() -> None:
    with sim_switched_team(RANKS, settings(hasty()), trouble=shuffled(3, loss=0.5)) as (job, _):
        for op in range(4):
            inputs = inputs_of(op)
            for out, outcome in job.allreduce(inputs):
                assert outcome.missed or None not in of(out, inputs, job)
        again = total(job, "rows_sent_again") + total(job, "rows_flushed")
        assert again <= 4 * RANKS * (NUMEL // width(job)) * 8


def test_a_worker_that_vanishes_costs_flushes_for_three_ops_and_then_nothing() -> None:
    """Rows are released with what is in; everybody left has the same; and once it is suspect no rank waits for it.

    Rule: clock-28.
    """
    with sim_switched_team(RANKS, settings(hasty())) as (job, _):
        warm_up(job)
        job[2].trouble(Trouble(seed=0, loss=1.0))
        for op in range(6):
            inputs, results = job.averaged(NUMEL, op, [0, 1])
            alike(results)
            for out, outcome in results:
                assert outcome.missing == {2}
                assert outcome.missed == 0
                assert of(out, inputs, job) == {frozenset({0, 1})}
                assert (outcome.deadline_hits > 0) == (op < 3)
                assert op < 3 or outcome.nanoseconds < SLACK
        assert job[0].stats()["suspects"] == [2]


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_worker_that_comes_late_has_the_others_means_at_once(loss: float) -> None:
    """It asks the switch for rows that were lost on the way."""
    lose, lost = [False], []
    chance = shuffled(11, loss=loss)

    def trouble(rank: int, data: bytes, result: bool) -> int:
        copies: int = chance(rank, data, result) if lose[0] and rank == 2 and result else 1
        lost.extend([data] * (copies == 0))
        return copies

    with sim_switched_team(RANKS, settings(hasty()), trouble=trouble) as (job, switch):
        warm_up(job)
        lose[0] = True
        inputs = inputs_of(5)
        job.at(2500 * MS, lambda: lose.__setitem__(0, False))
        results = job.allreduce(inputs, late={2: 2700 * MS})
        assert results[2][1].late
        assert results[2][1].missed == 0
        assert results[2][1].nanoseconds < SLACK
        alike(results)
        assert of(results[2][0], inputs, job) == {frozenset({0, 1})}
        assert switch.rules.counts[Verdict.ANSWERED] >= len(lost)
        assert (len(lost) > 0) == (loss > 0)


def test_a_gradient_that_is_not_finite_is_left_out_without_waiting_for_the_deadline() -> None:
    with sim_switched_team(RANKS, settings(patient(quiet=5 * MS))) as (job, _):
        warm_up(job)
        for op in range(3):
            inputs = inputs_of(op)
            inputs[1][17] = np.nan
            results = job.allreduce(inputs)
            inputs[1][17] = 0.0
            alike(results)
            assert results[1][1].abstained
            assert all(o.missed == 0 and not o.deadline_hits for _, o in results)
            assert of(results[0][0], inputs, job) == {frozenset({0, 2})}


@pytest.mark.parametrize("when", [1, 100])
def test_a_switch_that_is_loaded_anew_goes_on(when: int) -> None:
    """What it had summed is gone; rows that lose by it are released with what comes again, and nothing is wrong."""
    with sim_switched_team(RANKS, settings(hasty())) as (job, switch):
        warm_up(job)
        for op in range(3):
            inputs = inputs_of(op)
            job.at(when * 10_000, switch.restart)
            for out, outcome in job.allreduce(inputs):
                # rows that went on without a rank are means of fewer, never of anything else
                assert outcome.missed or None not in of(out, inputs, job)
        for op in range(3):
            job.allreduce(inputs_of(op))
        everybody(job, 9)


def test_a_silent_switch_is_named_left_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailbound.transport.switch.RESTS", Policy(1500 * MS))
    short = hasty(deadline_1=300 * MS, deadline_2=150 * MS, stage_max=900 * MS)
    with sim_switched_team(RANKS, settings(short)) as (job, switch):
        warm_up(job)
        seeds = itertools.count()

        def owners() -> set[tuple[int, ...]]:
            """By whose map the next op is placed, over all ranks; no op is placed by an older one."""
            return {tuple(member.job.sequence.map.owners) for member in job.communicators}

        def until(wanted: tuple[int, ...], most: int) -> int:
            """All-reduces until everybody places by this map; how many had nothing at all in them."""
            empty = 0
            for _ in range(most):
                if owners() == {wanted}:
                    return empty
                inputs = inputs_of(next(seeds))
                found = [of(out, inputs, job) for out, _ in job.allreduce(inputs)]
                empty += found == [{None}] * RANKS  # nothing came, and nothing was made up
                job.go(20 * MS)
            pytest.fail(f"not placed by {wanted}: {owners()}")

        assert owners() == {(3,)}
        switch.down = True
        assert until((0, 1, 2), 12) >= 3
        assert switch.rules.counts[Verdict.STORED] > 0
        assert job[0].config.switch.address in caplog.text  # type: ignore[union-attr]
        for _ in range(2):
            job.allreduce(inputs_of(next(seeds)))
        everybody(job, 50)
        switch.down = False
        until((3,), 200)
        for _ in range(2):
            job.allreduce(inputs_of(next(seeds)))
        everybody(job, 51)
        for member in job.communicators:
            counts = member.job.records.verdicts().sum(axis=0)
            assert counts[Verdict.CORRUPT] == 0


def _row_of(data: bytes) -> int:
    found = packets.parse(data)
    assert found is not None
    return int(found[0]["row"][0])


def grown(step: int) -> list[np.ndarray]:
    """Gradients that need another scale in every step."""
    return [np.float32(1.5**step) * each for each in inputs_of(step)]


@pytest.mark.parametrize(
    ("form", "losers", "first"),
    [("mean", (2,), True), ("sums", (2,), False), ("sums", (1, 2), True), ("mean", (0, 1, 2), False)],
)
def test_who_has_lost_the_results_of_a_group_costs_only_its_own_rows_of_one_op(
    form: str, losers: tuple[int, ...], first: bool
) -> None:
    """The next rows at its old scale kept out all others' that came behind them, until the deadline. Rule: codec-5.

    Where all have lost them, no rank knows a scale, and all agree on one: each group has a contributor.
    """
    lose = [False]

    def trouble(rank: int, data: bytes, result: bool) -> int:
        # groups are interleaved, so that every other row is of the first, or of the first and third
        return not (lose[0] and result and rank in losers and _row_of(data) % 2 == 0)

    with sim_switched_team(RANKS, settings(hasty()), form=form, trouble=trouble) as (job, switch):
        warm_up(job)
        lose[0] = True
        for rank, (_, outcome) in enumerate(job.allreduce(grown(1))):
            assert (outcome.missed > 0) == (rank in losers)
        lose[0] = False
        others = set(range(RANKS)) - set(losers)
        for step in range(2, 5):
            inputs = grown(step)
            late = others if first else losers
            results = job.allreduce(inputs, late=dict.fromkeys(late, 5 * MS))
            alike(results)
            whole = step > 2 or not others
            void = not whole and 2 * len(others) <= RANKS  # one of three contributes (clock-38)
            assert of(results[0][0], inputs, job) == {None if void else frozenset(range(RANKS) if whole else others)}
            for _, outcome in results:
                assert outcome.minority == void
                assert (outcome.missed, outcome.deadline_hits, outcome.missing) == (0, 0, set())
                assert outcome.nanoseconds < SLACK
        assert switch.rules.counts[Verdict.SCALE_MISMATCH] == 0
