"""Results that were lost come over the reliable path, in virtual time, and no rank waits long for them (clock-35)."""

from __future__ import annotations

import numpy as np

from sim.repeats import dropped, total
from sim.team import FETCHING, SimTeam, sim_team
from support import Trouble, gradients
from tailbound.transport.safeguard import Limits
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.fabric import MS

WIDTH, ROWS = 64, 8 * 64
NUMEL = ROWS * WIDTH
RANKS, OPS = 3, 25
#: Without repair what is lost stays lost, for datagrams.
HASTY = {
    "width": WIDTH, "ring_mib": 1.0, "deadline_1": 3 * MS, "deadline_2": 3 * MS, "stage_max": 20 * MS,
    "start_max": 200 * MS, "repair": False,
}  # fmt: skip
FETCH = 200 * MS


def unlike(job: SimTeam, ops: int = OPS) -> tuple[int, int]:
    """Ops after which ranks hold other bits, and result rows that were missing in all."""
    other = missed = 0
    for op in range(ops):
        results = job.allreduce(gradients("U", len(job), NUMEL, seed=op))
        other += any((out != results[0][0]).any() for out, _ in results)
        missed += sum(outcome.missed for _, outcome in results)
    return other, missed


def test_replicas_stay_equal_although_results_are_lost() -> None:
    """A tenth of the results is lost. Rule: clock-35."""
    with sim_team(RANKS, HASTY) as job:
        job.trouble(lambda: Trouble(seed=4, loss=0.1, types=frozenset({PacketType.RESULT})))
        without, missed = unlike(job)
        assert without > 0
        assert missed > 0
        assert total(job, "rows_fetched") == 0
    with sim_team(RANKS, HASTY | {"fetch": FETCH}) as job:
        troubles = job.trouble(lambda: Trouble(seed=4, loss=0.1, types=frozenset({PacketType.RESULT})))
        assert unlike(job) == (0, 0)
        assert dropped(troubles, PacketType.RESULT) > 0
        assert total(job, "rows_fetched") == total(job, "rows_fetch_asked") == total(job, "rows_given") > 0


def test_an_op_that_its_owner_skips_is_skipped_by_who_fetched_its_rows() -> None:
    """Rank 0 hears of it in these rows alone: it applied what the others did not. Rules: clock-15, clock-35."""
    patient = {"fetch": FETCH, "deadline_2": 100 * MS, "stage_max": 200 * MS, "safeguard": Limits(skip=0.3)}
    with sim_team(RANKS, HASTY | patient) as job:
        unlike(job, 2)
        job[2].trouble(Trouble(seed=4, loss=0.9, types=frozenset({PacketType.CONTRIBUTION}), to=frozenset({1})))
        job[1].trouble(Trouble(seed=5, loss=1.0, types=frozenset({PacketType.RESULT}), to=frozenset({0})))
        results = job.allreduce(gradients("U", RANKS, NUMEL, seed=9))
        assert job[0].job.counters["rows_fetched"] > 0
        assert [outcome.skipped for _, outcome in results] == [True] * RANKS
        assert not any(out.any() for out, _ in results)


def test_it_is_waited_for_as_long_as_asked_and_no_longer() -> None:
    """One owner is asked and does not answer; the other's rows are taken. Rule: clock-35."""
    with sim_team(RANKS, HASTY | {"fetch": FETCH}) as job:
        unlike(job, 2)
        job[1].trouble(Trouble(seed=4, loss=0.3, types=frozenset({PacketType.RESULT}), to=frozenset({0})))
        job[2].trouble(Trouble(seed=5, loss=0.3, types=frozenset({PacketType.RESULT}), to=frozenset({0})))
        asker, silent = job[0].job.fetch, 2
        job[0].job.fetch = lambda op, owner, *more: asker(op, owner, *more) if owner != silent else None  # type: ignore[misc]
        out, outcome = job.allreduce(gradients("U", RANKS, NUMEL, seed=9))[0]
        assert FETCH <= outcome.nanoseconds < FETCH + 30 * MS
        counters = job[0].job.counters
        assert outcome.missed == counters["rows_fetch_asked"] - counters["rows_fetched"] > 0
        assert counters["rows_fetched"] > 0
        assert np.isfinite(out).all()


def test_an_answer_costs_what_it_takes() -> None:
    """Rule: clock-35."""
    with sim_team(RANKS, HASTY | {"fetch": FETCH}) as job:
        unlike(job, 2)
        job[1].trouble(Trouble(seed=4, loss=0.3, types=frozenset({PacketType.RESULT}), to=frozenset({0})))
        _, outcome = job.allreduce(gradients("U", RANKS, NUMEL, seed=9))[0]
        assert job[0].job.counters["rows_fetched"] > 0
        assert outcome.nanoseconds < FETCHING + 60 * MS


def test_who_has_not_published_and_who_is_suspected_is_not_asked() -> None:
    """Rule: clock-35."""
    with sim_team(4, HASTY | {"fetch": FETCH}) as job:
        unlike(job, 2)
        job[3].trouble(Trouble(seed=0, loss=1.0))
        for op in range(5):
            results = job.allreduce(gradients("U", 4, NUMEL, seed=op), ranks=[0, 1, 2])
            assert max(outcome.nanoseconds for _, outcome in results) < FETCH
        assert total(job, "rows_fetch_asked") == 0
