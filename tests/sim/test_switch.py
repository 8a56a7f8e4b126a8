"""Jobs with a switch in virtual time: packets lost, workers that vanish or come late, and a switch that is gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from fault_rows import contributors
from reference_switch import shuffled
from sim.engine import switch_of
from sim.team import SimTeam, sim_team, total
from support import Trouble, alike, gradients, hasty, patient
from tailbound.transport.backoff import Policy
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import OP_STEPS, Verdict
from tailbound_lab.simulate.fabric import MS

RANKS, WIDTH = 3, 128
NUMEL = 2 * 64 * WIDTH
#: Beyond deadlines, ns: packets under way, turns of the engine.
SLACK = 60 * MS


def switched(given: dict[str, Any], form: str = "mean") -> AbstractContextManager[SimTeam]:
    """A job of whose rows each is a mean by itself."""
    more = {"width": WIDTH, "ring_mib": 1.0, "rotate": False, "switch": switch_of(RANKS, form)}
    return sim_team(RANKS, given | more)


def inputs_of(seed: int) -> list[np.ndarray]:
    return gradients("U", RANKS, NUMEL, seed=seed)


def of(out: np.ndarray, inputs: list[np.ndarray], job: SimTeam) -> set[frozenset[int] | None]:
    """Whose means the rows are."""
    return set(contributors(out, inputs, set(range(RANKS)), job[0]._row_width))


@pytest.mark.parametrize("form", ["mean", "sums"])
def test_lost_rows_are_sent_again_and_nothing_is_missing(form: str) -> None:
    """Five percent both ways, and doubles: no deadline is near, so that gaps alone bring everything."""
    with switched(patient(quiet=20 * MS), form) as job:
        job.switch.trouble = shuffled(7, loss=0.05, twice=0.05)
        for op in range(8):
            job.right(NUMEL, op)
        counts = job.switch.rules.counts
        assert counts[Verdict.ANSWERED] > 0 < counts[Verdict.DUPLICATE]
        assert not counts[Verdict.FLUSHED] + total(job, "seal_deadline_hits") + total(job, "rows_flushed")
        # a row again for each that lacked it, now and then twice; never a storm
        assert 0 < total(job, "rows_sent_again") <= 0.5 * total(job, "contributions_sent")


@pytest.mark.parametrize(("loss", "anew"), [(0.5, None), (0.0, 10_000), (0.0, MS)])
def test_rows_are_means_though_a_switch_loses_half_or_is_loaded_anew(loss: float, anew: int | None) -> None:
    """Rows that lose by it are means of fewer ranks with what comes again, and it is asked within bounds."""
    with switched(hasty()) as job:
        job.warm_up(NUMEL)
        job.switch.trouble = shuffled(3, loss=loss)
        for op in range(4):
            if anew is not None:
                job.at(anew, job.switch.restart)
            inputs, results = job.averaged(NUMEL, op)
            for out, outcome in results:
                assert outcome.missed or None not in of(out, inputs, job)
        again = total(job, "rows_sent_again") + total(job, "rows_flushed")
        assert again <= 4 * RANKS * (NUMEL // job[0]._row_width) * 8
        job.switch.trouble = shuffled(3)
        for op in range(3):
            job.averaged(NUMEL, op)
        job.right(NUMEL, 9)


def test_a_worker_that_vanishes_costs_flushes_for_three_ops_and_then_nothing() -> None:
    """Rows are released with what is in, alike everywhere; and once it is suspect no rank waits for it (clock-28)."""
    with switched(hasty()) as job:
        job.warm_up(NUMEL)
        job[2].trouble(Trouble(seed=0, loss=1.0))
        for op in range(6):
            inputs, results = job.averaged(NUMEL, op, [0, 1])
            alike(results)
            for out, outcome in results:
                assert (outcome.missing, outcome.missed, outcome.deadline_hits > 0) == ({2}, 0, op < 3)
                assert of(out, inputs, job) == {frozenset({0, 1})}
                assert op < 3 or outcome.nanoseconds < SLACK
        assert job.suspects[0] == [2]


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_worker_that_comes_late_has_the_others_means_at_once(loss: float) -> None:
    """It asks the switch for rows that were lost on the way."""
    lost, chance = [], shuffled(11, loss=loss)
    with switched(hasty()) as job:

        def trouble(rank: int, data: bytes, result: bool) -> int:
            copies: int = chance(rank, data, result) if rank == 2 and result else 1
            lost.extend([data] * (copies == 0))
            return copies

        job.warm_up(NUMEL)
        whole, job.switch.trouble = job.switch.trouble, trouble
        job.at(2500 * MS, lambda: setattr(job.switch, "trouble", whole))
        inputs, results = job.averaged(NUMEL, 5, late={2: 2700 * MS})
        out, outcome = results[2]
        assert (outcome.late, outcome.missed, outcome.nanoseconds < SLACK) == (True, 0, True)
        alike(results)
        assert of(out, inputs, job) == {frozenset({0, 1})}
        assert job.switch.rules.counts[Verdict.ANSWERED] >= len(lost)
        assert (len(lost) > 0) == (loss > 0)


def test_a_worker_that_was_stopped_finds_means_in_its_memory() -> None:
    """Also those of more steps than records of ops last: each took a deadline. Rule: clock-20."""
    with switched(hasty()) as job:
        job.warm_up(NUMEL)
        for ranks, silent in ([0, 1], ()), ([2], (2,)):
            for op in range(2 * OP_STEPS):
                _, results = job.averaged(NUMEL, op, ranks, silent=silent)
                assert not silent or (results[0][1].missed, results[0][1].nanoseconds < SLACK) == (0, True)


def test_a_gradient_that_is_not_finite_is_left_out_without_waiting_for_the_deadline() -> None:
    with switched(patient(quiet=5 * MS)) as job:
        job.warm_up(NUMEL)
        for op in range(3):
            inputs = inputs_of(op)
            inputs[1][17] = np.nan
            results = job.allreduce(inputs)
            inputs[1][17] = 0.0
            alike(results)
            assert [outcome.abstained for _, outcome in results] == [False, True, False]
            assert not any(outcome.missed or outcome.deadline_hits for _, outcome in results)
            assert of(results[0][0], inputs, job) == {frozenset({0, 2})}


def test_a_silent_switch_is_named_left_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailbound.collective.maps.RESTS", Policy(1500 * MS, 1500 * MS))
    with switched(hasty(deadline_1=300 * MS, deadline_2=150 * MS, stage_max=900 * MS)) as job:
        job.warm_up(NUMEL)
        assert job.placed_by((RANKS,))
        for down, owners, most, least_empty in ((True, (0, 1, 2), 12, 3), (False, (RANKS,), 200, 0)):
            job.switch.down, empty = down, 0
            for op in range(most):
                if job.placed_by(owners):
                    break
                inputs, results = job.averaged(NUMEL, op)
                empty += all(of(out, inputs, job) == {None} for out, _ in results)  # nothing was made up
                job.go(20 * MS)
            assert job.placed_by(owners)
            assert empty >= least_empty
            for op in range(2):
                job.averaged(NUMEL, op)
            job.right(NUMEL, 50)
        assert job[0].config.switch is not None
        assert job[0].config.switch.address in caplog.text
        assert not any(member.job.records.verdicts()[:, Verdict.CORRUPT].any() for member in job.communicators)


@pytest.mark.parametrize(
    ("form", "losers", "first"),
    [("mean", (2,), True), ("sums", (2,), False), ("sums", (1, 2), True), ("mean", (0, 1, 2), False)],
)
def test_lost_results_of_a_group_cost_only_the_loser_its_own_rows_of_one_op(
    form: str, losers: tuple[int, ...], first: bool
) -> None:
    """The next rows at its old scale kept out all others' that came behind them, until the deadline. Rule: codec-5.

    Where all have lost them, no rank knows a scale, and all agree on one: each group has a contributor.
    """

    def lose(rank: int, data: bytes, result: bool) -> int:
        # groups are interleaved, so that every other row is of the first, or of the first and third
        row = int(np.frombuffer(data, HEADER_DTYPE, 1)["row"][0])
        return not (result and rank in losers and row % 2 == 0)

    def grown(step: int) -> list[np.ndarray]:
        """Gradients that need another scale in every step."""
        return [np.float32(1.5**step) * each for each in inputs_of(step)]

    with switched(hasty(), form) as job:
        job.warm_up(NUMEL)
        all_pass: Callable[[int, bytes, bool], int] = job.switch.trouble
        job.switch.trouble = lose
        assert [outcome.missed > 0 for _, outcome in job.allreduce(grown(1))] == [r in losers for r in range(RANKS)]
        job.switch.trouble = all_pass
        others = set(range(RANKS)) - set(losers)
        for step in range(2, 5):
            inputs = grown(step)
            results = job.allreduce(inputs, late=dict.fromkeys(others if first else losers, 5 * MS))
            alike(results)
            whole = step > 2 or not others
            void = not whole and 2 * len(others) <= RANKS  # one of three contributes (clock-38)
            assert of(results[0][0], inputs, job) == {None if void else frozenset(range(RANKS) if whole else others)}
            for _, outcome in results:
                assert (outcome.minority, outcome.missed, outcome.deadline_hits, outcome.missing) == (void, 0, 0, set())
                assert outcome.nanoseconds < SLACK
        assert job.switch.rules.counts[Verdict.SCALE_MISMATCH] == 0
