"""Repair in virtual time: what is lost on its first way comes on the second, counted to the row (clock-23)."""

from __future__ import annotations

import numpy as np

from sim.repeats import FirstTime, dropped, total
from sim.team import SimTeam, sim_team
from support import Trouble, exact_mean, gradients, nmse, patient
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound.transport.pace import PaceConfig, Path
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.fabric import MS

WIDTH, ROWS = 64, 8 * 64
NUMEL = ROWS * WIDTH
SETTINGS = patient(width=WIDTH, ring_mib=1.0, quiet=20 * MS)


def lossy(job: SimTeam, loss: float, *types: PacketType, kind: type[Trouble] = FirstTime) -> list[Trouble]:
    return job.trouble(lambda: kind(seed=4, loss=loss, types=frozenset(types)))


def past_warm_up(job: SimTeam) -> None:
    """Takes the job past its warm-up; nothing is lost, and nothing asked for."""
    for op in range(WARM_UP_OPS):
        job.allreduce(gradients("U", len(job), NUMEL, seed=500 + op))
    assert total(job, "repair_rows_asked") == 0


def test_lost_results_come_back_and_replicas_stay_equal() -> None:
    """5 % of all results lost: nothing is missing in the end, and all ranks hold the same bits."""
    ranks = 3
    with sim_team(ranks, SETTINGS) as job:
        troubles = lossy(job, 0.05, PacketType.RESULT)
        for op in range(12):
            inputs = gradients("U", ranks, NUMEL, seed=op)
            results = job.allreduce(inputs)
            for out, outcome in results:
                assert (outcome.delivered, outcome.failed_groups) == (outcome.expected, 0)
                np.testing.assert_array_equal(out, results[0][0])
            assert nmse(results[0][0], exact_mean(inputs)) <= 1.6e-2
        lost = dropped(troubles, PacketType.RESULT)
        assert lost > 12 * ROWS * 2 * 0.03
        assert total(job, "repair_rows_asked") == total(job, "rows_repaired") == lost
        assert total(job, "repair_rows_sent") == lost
        assert total(job, "repair_gone") == 0
        assert sum(int(member.job.repairs.came[1].sum()) for member in job.communicators) == lost


def test_lost_contributions_come_back_and_count_as_lost() -> None:
    """5 % of all contributions lost: every one is asked for, and nothing is missing in the end.

    Repair hides no loss from who decides how many may send at a time.
    """
    ranks = 3
    with sim_team(ranks, SETTINGS) as job:
        past_warm_up(job)
        seen: list[tuple[int, int]] = []
        for member in job.communicators:
            incast = member.job.flow.incast
            incast.update = lambda expected, lost, *_: seen.append((expected, lost))  # type: ignore[method-assign]
        troubles = lossy(job, 0.05, PacketType.CONTRIBUTION)
        for _, outcome in job.allreduce(gradients("U", ranks, NUMEL, seed=1)):
            assert outcome.delivered == outcome.expected
        lost = dropped(troubles, PacketType.CONTRIBUTION)
        assert total(job, "repair_rows_asked") == lost > 0
        assert sum(lost for _, lost in seen) == lost


def test_when_everything_is_lost_questions_are_few() -> None:
    """No result and no answer gets through: the pauses between bitmaps double (no storm)."""
    ranks, ops = 4, 5
    with sim_team(ranks, SETTINGS | {"deadline_2": 100 * MS, "stage_max": 100 * MS, "deadline_1": 100 * MS}) as job:
        past_warm_up(job)
        before = total(job, "repair_asked")
        lossy(job, 1.0, PacketType.RESULT, kind=Trouble)
        for op in range(ops):
            results = job.allreduce(gradients("U", ranks, NUMEL, seed=op))
            assert all(o.delivered < o.expected and o.error is None for _, o in results)
        assert 0 < total(job, "repair_asked") - before <= 8 * ops * ranks * (ranks - 1)
        assert total(job, "rows_repaired") == 0


def test_who_is_sent_to_fast_is_answered_while_others_still_wait_for_their_rows() -> None:
    """Rank 2 has its rows 100 ms after rank 1, which lacks some of both halves. Rule: clock-23."""
    ranks = 3
    with sim_team(ranks, SETTINGS | {"quiet": 1 * MS}) as job:
        past_warm_up(job)
        pacer = job[0].job.flow.queue.pacer
        slow = pacer.paths[2] = Path(PaceConfig(addend=0, step=0, floor=1e5), 2.5e9)
        slow.free, slow.rate = False, 1.7e5
        pacer._note(2)
        trouble = FirstTime(seed=4, loss=0.05, to=frozenset({1}))
        job[0].trouble(trouble)
        for out, outcome in (results := job.allreduce(gradients("U", ranks, NUMEL, seed=1))):
            assert outcome.delivered == outcome.expected
            np.testing.assert_array_equal(out, results[0][0])
        assert all(dropped([trouble], kind) for kind in (PacketType.CONTRIBUTION, PacketType.RESULT))
        assert job[0].job.counters["control_refused"] == 0
        # both kinds are asked for while rank 2 lacks rows of that kind, and are not asked for a second time
        assert job[1].job.counters["repair_asked"] == 2
        assert results[2][1].nanoseconds > 200 * MS


def test_a_late_launch_asks_for_what_is_missing_before_it_ends() -> None:
    """The op's time was up when it was launched. Rules: clock-13, clock-35."""
    ranks, last, second = 3, 2, 1000 * MS
    given = {"deadline_1": second, "deadline_2": second, "quiet": 5 * MS, "stage_max": second, "start_max": second}
    with sim_team(ranks, SETTINGS | given | {"insist": 200 * MS}) as job:
        past_warm_up(job)
        only = {"types": frozenset({PacketType.RESULT}), "to": frozenset({last})}
        trouble = FirstTime(seed=4, loss=0.03, **only)
        job[0].trouble(trouble)
        inputs = gradients("U", ranks, NUMEL, seed=1)
        results = job.allreduce(inputs, late={last: job[last].config.bound + second})  # by any clock the op is over
        out, outcome = results[last]
        assert outcome.late
        assert outcome.nanoseconds < second
        assert job[last].job.counters["rows_repaired"] == sum(trouble.dropped.values()) > 0
        np.testing.assert_array_equal(out, results[0][0])


def test_the_only_row_of_an_op_is_requested() -> None:
    """No packet had opened the op's record: nothing was requested, and all ranks skipped the op."""
    with sim_team(2, SETTINGS) as job:
        for op in range(WARM_UP_OPS):
            job.allreduce(gradients("U", 2, 40, seed=op), starts=(0,))
        for op in range(8):
            lossy(job, float(op % 2), PacketType.CONTRIBUTION)
            inputs = gradients("U", 2, 40, seed=op)
            for out, outcome in job.allreduce(inputs, starts=(0,)):
                assert (outcome.delivered, outcome.skipped) == (outcome.expected, False)
                assert nmse(out, exact_mean(inputs)) < 1e-3
        assert total(job, "rows_repaired") > 0
