"""Packets lost, in virtual time: what that costs, what is requested again, to the row, and for how long."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from sim.team import SimTeam, dropped, sim_team, total
from support import Trouble, exact_mean, nmse, patient
from tailbound.codec.threads import Threads
from tailbound.kernel.core import core
from tailbound.transport.control import Header
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound.wire.schema import Flag, PacketType, Verdict
from tailbound_lab.simulate.fabric import MS, S
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.steps import Team

# -- rows that are lost on their first way come on the second (clock-23) -----------------------------------------------


RANKS, WIDTH, ROWS = 3, 64, 8 * 64
NUMEL = ROWS * WIDTH
SETTINGS = patient(width=WIDTH, ring_mib=1.0, quiet=20 * MS)


@dataclass
class FirstTime(Trouble):
    """Trouble for packets on their first way only: those that are requested get through; last rows fare alike twice."""

    fates: dict[tuple[int, bytes], list[bytes]] = field(default_factory=dict)

    def meet(self, rank: int, packets: list[bytes]) -> list[bytes]:
        out = []
        for packet in packets:
            again = Header.from_buffer_copy(packet).flags & Flag.REPEAT
            if not again and (rank, packet) not in self.fates:
                self.fates[rank, packet] = super().meet(rank, [packet])
            out += [packet] if again else self.fates[rank, packet]
        return out


@pytest.mark.parametrize(("kind", "stage"), [(PacketType.CONTRIBUTION, 0), (PacketType.RESULT, 1)])
def test_lost_rows_come_back_and_count_as_lost(kind: PacketType, stage: int) -> None:
    with sim_team(RANKS, SETTINGS) as job:
        job.warm_up(NUMEL, WARM_UP_OPS)
        assert total(job, "repair_rows_asked") == 0
        troubles = job.trouble(lambda: FirstTime(seed=4, loss=0.05, types=frozenset({kind})))
        for op in range(12):
            job.right(NUMEL, op)
        lost = dropped(troubles, kind)
        assert lost > 12 * ROWS * 2 * 0.03
        assert total(job, "repair_rows_asked") == total(job, "rows_repaired") == total(job, "repair_rows_sent") == lost
        assert total(job, "repair_gone") == 0
        lines = (line for each in job.communicators for line in each.job.accounts.ledger.lines[stage])
        assert sum(line.repaired for line in lines) == lost


def test_results_are_decoded_before_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with sim_team(RANKS, SETTINGS) as job:
        job.warm_up(NUMEL, WARM_UP_OPS)
        by_turns: list[object] = []
        through = Threads.through
        monkeypatch.setattr(Threads, "through", lambda *given: (by_turns.append(given[1]), through(*given))[1])
        for op in range(4):
            job.right(NUMEL, op)
        assert by_turns.count(core().waits.tb_finish) == 0


def test_the_only_row_of_an_op_is_requested() -> None:
    """No packet had opened the op's record: nothing was requested, and all ranks skipped the op."""
    with sim_team(2, SETTINGS) as job:
        for op in range(WARM_UP_OPS + 8):
            lost = float(op >= WARM_UP_OPS and op % 2)
            job.trouble(lambda lost=lost: FirstTime(seed=4, loss=lost, types=frozenset({PacketType.CONTRIBUTION})))
            inputs, results = job.averaged(40, op, starts=(0,))
            for out, outcome in results:
                assert (outcome.delivered, outcome.skipped) == (outcome.expected, False)
                assert nmse(out, exact_mean(inputs)) < 1e-3
        assert total(job, "rows_repaired") > 0


def test_results_leave_with_their_headers_where_others_are_empty() -> None:
    """They left with those of the op before: each was refused, and had to be requested."""

    def lose(rank: int, packets: list[bytes]) -> list[bytes]:
        heads = [Header.from_buffer_copy(packet) for packet in packets]
        kept = [rank != 2 or head.type != PacketType.CONTRIBUTION or head.row % 2 for head in heads]
        return [packet for packet, keep in zip(packets, kept, strict=True) if keep]

    with sim_team(RANKS, HASTY) as job:
        job.warm_up(NUMEL, WARM_UP_OPS)
        for rank in (0, 1):
            job[rank].trouble(lose)
        job.averaged(NUMEL, 1, late={2: S})
        assert total(job, "rows_without_contributor") > 0
        verdicts = [member.job.store.ledger["verdict"][:, Verdict.CORRUPT].sum() for member in job.communicators]
        assert not any(verdicts)


def _is_last(packet: bytes, *kinds: PacketType) -> bool:
    head = Header.from_buffer_copy(packet)
    mark = head.contributed if head.type == PacketType.CONTRIBUTION else head.published
    return head.type in kinds and mark == head.op and not head.flags & Flag.REPEAT


def test_last_rows_leave_twice_once_rows_were_lost() -> None:
    """Then no rank has to ask for them. Rules: clock-23."""

    def losing(seen: set[tuple[int, bytes]]) -> Callable[[int, list[bytes]], list[bytes]]:
        def lose(rank: int, packets: list[bytes]) -> list[bytes]:
            """Last rows on their first way."""
            kinds = PacketType.CONTRIBUTION, PacketType.RESULT
            kept = [packet for packet in packets if not _is_last(packet, *kinds) or (rank, packet) in seen]
            seen.update((rank, packet) for packet in packets)
            return kept

        return lose

    with sim_team(RANKS, SETTINGS) as job:
        job.warm_up(NUMEL, WARM_UP_OPS)
        for member in job.communicators:
            member.trouble(losing(set()))
        asked = []
        for op in range(4):
            job.right(NUMEL, op)
            asked.append(total(job, "repair_rows_asked"))
        assert 0 < asked[0] == asked[-1]


def test_questions_outlast_a_burst_of_losses_by_copies() -> None:
    """All for a mark, then repeated ones for rows. Rules: clock-23, clock-30."""
    asked: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}

    def lose(_: int, packets: list[bytes]) -> list[bytes]:
        head = Header.from_buffer_copy(packets[0])
        if head.type == PacketType.REPAIR:
            asked[head.rows > 0][job.now] += 1
        return [] if head.type == PacketType.REPAIR and (head.rows or len(asked[False]) < 5) else packets

    with sim_team(2, SETTINGS) as job:
        job.warm_up(NUMEL, WARM_UP_OPS)
        job[0].trouble(lambda _, packets: [p for p in packets if not _is_last(p, PacketType.RESULT)])
        job[1].trouble(lose)
        job.averaged(NUMEL, 1)
    assert [list(asked[rows].values())[:4] for rows in (False, True)] == [[8, 8, 8, 8], [1, 2, 4, 4]]


# -- lost results are requested past the deadline, and no rank waits long for them (clock-35) --------------------------


INSIST = 200 * MS
#: Deadlines that leave requests no time.
HASTY: dict[str, Any] = {
    "width": WIDTH, "ring_mib": 1.0, "deadline_1": 3 * MS, "deadline_2": 3 * MS, "stage_max": 20 * MS,
    "start_max": 200 * MS,
}  # fmt: skip
_LOSING = partial(Trouble, seed=4, types=frozenset({PacketType.RESULT}))


def unlike(job: SimTeam, ops: int) -> tuple[int, int]:
    """Ops after which ranks hold other bits, and result rows that were missing in all."""
    other = missed = 0
    for op in range(ops):
        results = job.averaged(NUMEL, op)[1]
        other += any((out != results[0][0]).any() for out, _ in results)
        missed += sum(outcome.missed for _, outcome in results)
    return other, missed


@pytest.mark.parametrize("insist", [0, INSIST])
def test_replicas_stay_equal_although_results_and_all_words_about_them_are_lost(insist: int) -> None:
    """A third of the results, also of those that are sent again, of requests and of answers."""
    kinds = frozenset({PacketType.RESULT, PacketType.REPAIR, PacketType.GONE})
    with sim_team(RANKS, HASTY | {"insist": insist}) as job:
        troubles = job.trouble(lambda: Trouble(seed=1, loss=0.3, types=kinds))
        other, missed = unlike(job, 25)
        assert all(dropped(troubles, kind) for kind in kinds - {PacketType.GONE})
        assert (other > 0, missed > 0) == (insist == 0, insist == 0)


def test_results_are_waited_for_as_long_as_asked_and_no_longer() -> None:
    """One owner's answers are lost; the other's rows are taken."""
    with sim_team(RANKS, HASTY | {"insist": INSIST}) as job:
        unlike(job, 2)
        job[1].trouble(_LOSING(loss=0.3, to=frozenset({0})))
        job[2].trouble(_LOSING(loss=1.0, to=frozenset({0})))
        _, outcome = job.averaged(NUMEL, 9)[1][0]
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
            inputs, results = job.averaged(NUMEL, op, silent=silent)
            given = [data for rank, data in enumerate(inputs) if rank not in silent]
            for out, outcome in results:
                assert outcome.nanoseconds < 1 * S
                assert (outcome.missed, outcome.late, outcome.abstained) == (0, False, False)
                assert nmse(out, exact_mean(given) if given else np.zeros(NUMEL)) < 1e-2
        assert not any(job.suspects)


# -- on a link of 1 Gbit/s lost rows are requested while their flows run (clock-23) ------------------------------------


#: An op of 4 MiB takes 14 ms; with requests after the mark alone losses made that 26 ms.
ENTRIES, HOSTS = 1 << 20, 4


def test_one_percent_of_losses_costs_little_time() -> None:
    """By seed 1.42 to 1.54 times the time."""
    switching = Switching(rate=10**9, buffer=3 << 20)
    with contextlib.closing(Team(arrange("flat", HOSTS, ENTRIES), switching, 1)) as team:
        calm = [team.step() for _ in range(WARM_UP_OPS)]
        team.network.switching = replace(switching, loss=0.01)
        lossy = [team.step() for _ in range(12)]
    usual, now = (np.median([took for step in steps[-8:] for took in step.took]) / MS for steps in (calm, lossy))
    assert sum(step.dropped["loss"] for step in lossy) > 100
    assert sum(step.delivered for step in lossy) == sum(step.expected for step in lossy)
    assert now <= 1.6 * usual, f"{now:.1f} ms with losses, {usual:.1f} without"
