"""Lost results are asked for past the deadline, in virtual time, and no rank waits long for them (clock-35)."""

from __future__ import annotations

from functools import partial

import pytest

from sim.repeats import dropped, total
from sim.team import SimTeam, sim_team
from support import Trouble, gradients
from tailbound.collective.announce import farewell
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.fabric import MS, S

WIDTH, ROWS = 64, 8 * 64
NUMEL = ROWS * WIDTH
RANKS, OPS = 3, 25
INSIST = 200 * MS
#: Deadlines that leave requests no time.
HASTY = {
    "width": WIDTH, "ring_mib": 1.0, "deadline_1": 3 * MS, "deadline_2": 3 * MS, "stage_max": 20 * MS,
    "start_max": 200 * MS,
}  # fmt: skip
_LOSING = partial(Trouble, seed=4, types=frozenset({PacketType.RESULT}))


def unlike(job: SimTeam, ops: int = OPS) -> tuple[int, int]:
    """Ops after which ranks hold other bits, and result rows that were missing in all."""
    other = missed = 0
    for op in range(ops):
        results = job.allreduce(gradients("U", len(job), NUMEL, seed=op))
        other += any((out != results[0][0]).any() for out, _ in results)
        missed += sum(outcome.missed for _, outcome in results)
    return other, missed


def test_replicas_stay_equal_although_results_and_all_words_about_them_are_lost() -> None:
    """A seventh of the results, also of those that are sent again, of requests and of answers."""
    kinds = frozenset({PacketType.RESULT, PacketType.REPAIR, PacketType.GONE})
    for insist in (0, INSIST):
        with sim_team(RANKS, HASTY | {"insist": insist}) as job:
            troubles = job.trouble(lambda: Trouble(seed=1, loss=0.15, types=kinds))
            other, missed = unlike(job)
            assert all(dropped(troubles, kind) for kind in kinds - {PacketType.GONE})
            assert (other > 0, missed > 0) == (insist == 0, insist == 0)


def test_it_is_waited_for_as_long_as_asked_and_no_longer() -> None:
    """One owner's answers are lost; the other's rows are taken."""
    with sim_team(RANKS, HASTY | {"insist": INSIST}) as job:
        unlike(job, 2)
        job[1].trouble(_LOSING(loss=0.3, to=frozenset({0})))
        job[2].trouble(_LOSING(loss=1.0, to=frozenset({0})))
        _, outcome = job.allreduce(gradients("U", RANKS, NUMEL, seed=9))[0]
        assert INSIST <= outcome.nanoseconds < INSIST + 30 * MS
        assert outcome.missed == ROWS // RANKS
        assert total(job, "rows_repaired") > 0


@pytest.mark.parametrize("lost", [0.0, 0.5])
@pytest.mark.parametrize("silent", [(), (2,), (0, 1, 2)])
def test_rows_that_nobody_has_cost_no_time(silent: tuple[int, ...], lost: float) -> None:
    """GONE answers every request for them, so that it may be lost. Rules: clock-23, clock-25."""
    with sim_team(RANKS, HASTY | {"insist": 10 * S}) as job:
        unlike(job, 2)
        words = frozenset({PacketType.GONE, PacketType.READY})
        job.trouble(lambda: Trouble(seed=4, loss=lost, types=words))
        for op in range(4):
            results = job.allreduce(gradients("U", RANKS, NUMEL, seed=op), silent=silent)
            assert max(outcome.nanoseconds for _, outcome in results) < 1 * S
            assert all(outcome.missed == 0 for _, outcome in results)


def test_who_has_gone_or_publishes_nothing_is_not_waited_for() -> None:
    """Rules: clock-14, clock-15."""
    for goodbye in (True, False):
        with sim_team(4, HASTY | {"insist": 10 * S}) as job:
            unlike(job, 2)
            if goodbye:
                farewell(job[3].job, job[3].job.marks.contributed)
            else:
                job[3].trouble(Trouble(seed=0, loss=1.0))
            for op in range(5):
                results = job.allreduce(gradients("U", 4, NUMEL, seed=op), ranks=[0, 1, 2])
                assert max(outcome.nanoseconds for _, outcome in results) < INSIST
