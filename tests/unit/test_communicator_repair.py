"""Repair in whole all-reduces over udp in one process: what is lost on its first way comes on the second (clock-23)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from support import MS, PATIENCE, Team, Trouble, exact_mean, gradients, nmse, patient, team
from tailbound.collective.communicator import Communicator
from tailbound.collective.mend import answer
from tailbound.collective.repair import WARM_UP_OPS, asked_most
from tailbound.wire import packets
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import Flag, PacketType

NUMEL = 8 * 64 * 256
ROWS = 8 * 64
_FLAGS_AT = HEADER_DTYPE.fields["flags"][1]
SETTINGS = patient(quiet=20 * MS)


class FirstTime(Trouble):
    """Trouble for packets on their first way only: what is sent again gets through."""

    def _pass(self, rank: int, packets: list[bytes]) -> list[bytes]:
        out = []
        for packet in packets:
            out += [packet] if _again(packet) else super()._pass(rank, [packet])
        return out


def _again(packet: bytes) -> bool:
    return bool(int.from_bytes(packet[_FLAGS_AT : _FLAGS_AT + 2], "big") & Flag.REPEAT)


def lossy(job: Team, loss: float, *types: PacketType, kind: type[Trouble] = FirstTime) -> list[Trouble]:
    return [kind(seed=4, loss=loss, types=frozenset(types)).attach(member) for member in job.communicators]


def past_warm_up(job: Team) -> int:
    """Takes the job past its warm-up; rows that were asked for until then."""
    for op in range(WARM_UP_OPS):
        job.allreduce(gradients("U", len(job), NUMEL, seed=500 + op))
    return total(job, "repair_rows_asked")


def total(job: Team, counter: str) -> int:
    return sum(int(member.stats()["counters"].get(counter, 0)) for member in job.communicators)


def twice(job: Team) -> int:
    """Rows that came both on their first way, late, and on the second."""
    drops = [member.stats()["drops"] for member in job.communicators]
    return sum(n for d in drops for reason, n in d.items() if reason.startswith("DUPLICATE"))


def late(job: Team) -> int:
    """Rows that came after their op was over: nobody had lost them, a thread stood still."""
    drops = [member.stats()["drops"] for member in job.communicators]
    return sum(d.get(reason, 0) for d in drops for reason in ("LATE", "STALE_OP", "STALE_RESULT"))


def dropped(troubles: list[Trouble], kind: PacketType) -> int:
    return sum(count for t in troubles for (_, what), count in t.dropped.items() if what == kind)


def test_lost_results_come_back_and_replicas_stay_equal() -> None:
    """5 % of all results lost: nothing is missing in the end, and all ranks hold the same bits."""
    ranks = 3
    with team(ranks, SETTINGS) as job:
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
        # where a thread stood still for longer than q, rows are asked for that are only late, and come twice
        assert lost <= total(job, "repair_rows_asked") <= lost + twice(job)
        assert lost - twice(job) <= total(job, "rows_repaired") <= total(job, "repair_rows_asked")
        assert total(job, "repair_rows_sent") >= lost
        assert total(job, "repair_gone") == 0
        came = sum(member.job.repairs.came[1] for member in job.communicators)
        assert lost - twice(job) <= int(came.sum()) <= lost + twice(job)


def test_lost_contributions_come_back_in_warm_up() -> None:
    """Cold op and warm-up: contributions too are asked for, so that the mean is over all ranks."""
    ranks = 3
    with team(ranks, SETTINGS) as job:
        troubles = lossy(job, 0.05, PacketType.CONTRIBUTION)
        for op in range(4):
            for _, outcome in job.allreduce(gradients("U", ranks, NUMEL, seed=op)):
                assert outcome.delivered == outcome.expected
        lost = dropped(troubles, PacketType.CONTRIBUTION)
        assert lost > 0
        assert lost - twice(job) <= total(job, "rows_repaired") <= lost + twice(job)
        for member in job.communicators:
            for count in member.stats()["contributions_by_sender"].values():
                assert count["summed"] == count["expected"]


def test_after_the_warm_up_contributions_are_repaired_too() -> None:
    """5 % of all contributions lost: every one is asked for, and nothing is missing in the end."""
    ranks = 2
    with team(ranks, SETTINGS) as job:
        asked = past_warm_up(job)
        troubles = lossy(job, 0.05, PacketType.CONTRIBUTION)
        results = job.allreduce(gradients("U", ranks, NUMEL, seed=1))
        lost = dropped(troubles, PacketType.CONTRIBUTION)
        assert lost > 0
        assert all(o.expected == o.delivered for _, o in results)
        assert lost <= total(job, "repair_rows_asked") - asked <= lost + twice(job)


def test_what_repair_has_brought_was_lost_for_the_incast_control() -> None:
    """Repair hides no loss from who decides how many may send at a time."""
    ranks = 3
    with team(ranks, SETTINGS) as job:
        past_warm_up(job)
        seen: list[tuple[int, int]] = []
        for member in job.communicators:
            incast = member.job.traffic.incast
            incast.observe = lambda expected, lost: seen.append((expected, lost))  # type: ignore[method-assign]
        troubles = lossy(job, 0.05, PacketType.CONTRIBUTION)
        job.allreduce(gradients("U", ranks, NUMEL, seed=1))
        assert sum(lost for _, lost in seen) == dropped(troubles, PacketType.CONTRIBUTION) > 0


def test_after_the_warm_up_a_quarter_is_asked_for() -> None:
    """70 % of the results lost: as much as allowed is asked for, once, and the op ends without the rest."""
    ranks = 2
    with team(ranks, SETTINGS) as job:
        asked = past_warm_up(job)
        troubles = lossy(job, 0.7, PacketType.RESULT)
        results = job.allreduce(gradients("U", ranks, NUMEL, seed=1))
        lost = dropped(troubles, PacketType.RESULT)
        most = ranks * asked_most(ROWS, cold=False)
        assert lost > most
        assert total(job, "repair_rows_asked") - asked == most
        missing = sum(o.expected - o.delivered for _, o in results)
        assert lost - most <= missing <= lost - most + twice(job) + late(job)
        assert all(o.deadline_hits == 0 for _, o in results)


def test_when_everything_is_lost_questions_are_few() -> None:
    """No result and no answer gets through: per op, owner and asker one bitmap and one repeat (a storm of none)."""
    ranks, ops = 4, 5
    with team(ranks, SETTINGS) as job:
        rows, before = past_warm_up(job), total(job, "repair_asked")
        lossy(job, 1.0, PacketType.RESULT, kind=Trouble)
        for op in range(ops):
            results = job.allreduce(gradients("U", ranks, NUMEL, seed=op))
            assert all(o.delivered < o.expected and o.error is None for _, o in results)
        assert 0 < total(job, "repair_asked") - before <= 2 * ops * ranks * (ranks - 1)
        assert total(job, "repair_rows_asked") - rows <= ops * ranks * asked_most(ROWS, cold=False)
        assert total(job, "rows_repaired") == 0


# -- answers, packet by packet --------------------------------------------------------------------------------------


class Stranger:
    """Speaks for ``rank`` to one communicator: feeds its inbox and notes what it would send back."""

    def __init__(self, to: Communicator, rank: int) -> None:
        self.job, self.rank = to.job, rank
        self.engine: Any = to._engine
        self.sent: list[bytes] = []

    def tell(self, *bodies: tuple[PacketType, int, int, int, int, bytes]) -> list[tuple[PacketType, int]]:
        """Control packets (type, op, layout, row, rows, body) within one turn; (type, row) of what is answered."""
        return self.engine.call(lambda: self._exchange(bodies)).result(PATIENCE)

    def _exchange(self, bodies: Any) -> list[tuple[PacketType, int]]:
        sender, original = self.job.sender, self.job.sender.send_burst
        sent: list[bytes] = []

        def catch(_rank: int, view: memoryview | bytes, stride: int) -> int:
            sent.extend(bytes(view[at : at + stride]) for at in range(0, len(view), stride))
            return -(-len(view) // stride)

        sender.send_burst = catch
        try:
            for kind, op, layout, row, rows, body in bodies:
                head = packets.header(
                    type=kind, cookie=self.job.cookie, sender=self.rank, owner=self.job.rank, op=op, layout=layout,
                    row=row, rows=rows,
                )  # fmt: skip
                self.engine._inbox.take(packets.packet(head, body), self.engine._ops)
            answer(self.job, self.engine._ops, self.job.now())
        finally:
            sender.send_burst = original
        out = []
        for data in sent:
            parsed = packets.parse(data)
            assert parsed is not None, "an answer with a wrong check"
            out.append((PacketType(int(parsed[0]["type"][0])), int(parsed[0]["row"][0])))
        return out


def _quiet_job(job: Team, ops: int) -> tuple[Stranger, list[int], int]:
    """(a voice of rank 1 to rank 0, labels of the ops, layout tag) after a few whole ops."""
    labels = [job.allreduce(gradients("U", len(job), NUMEL, seed=op))[0][1].label for op in range(ops)]
    assert all(job.each(lambda c: c.drain(PATIENCE)))
    return Stranger(job[0], 1), labels, job[0].job.pool._kept[-1].place.layout.tag


def test_results_outlive_their_op_by_two_steps() -> None:
    with team(2, SETTINGS) as job:
        voice, labels, tag = _quiet_job(job, 6)
        own = ROWS // 2
        ask = (tag, 0, own, b"\xa0")
        assert voice.tell((PacketType.REPAIR, labels[-1], *ask)) == [(PacketType.RESULT, 0), (PacketType.RESULT, 2)]
        assert voice.tell((PacketType.REPAIR, labels[-2], *ask)) == [(PacketType.RESULT, 0), (PacketType.RESULT, 2)]
        assert voice.tell((PacketType.REPAIR, labels[-3], *ask)) == [(PacketType.GONE, 0)]
        assert voice.tell((PacketType.REPAIR, labels[-3], *ask)) == []  # once
        kept = job[0].job.pool.kept_bytes
        assert kept == 2 * own * (64 + 256)
        assert job[0].stats()["counters"]["repair_rows_sent"] == 4


def test_a_question_for_marks_is_not_a_request_for_rows() -> None:
    with team(2, SETTINGS) as job:
        voice, labels, tag = _quiet_job(job, 4)
        assert voice.tell((PacketType.REPAIR, labels[0], tag, 0, 0, b"")) == [(PacketType.GONE, 0)]
        assert voice.tell((PacketType.REPAIR, labels[0], tag, 0, 0, b"")) == [(PacketType.GONE, 0)]
        assert len(job[0].job.repairs.requests) == 0


def test_the_newest_op_is_answered_first() -> None:
    with team(2, SETTINGS) as job:
        voice, labels, tag = _quiet_job(job, 4)
        answered = voice.tell(
            (PacketType.REPAIR, labels[-2], tag, 16, ROWS // 2, b"\x80"),
            (PacketType.REPAIR, labels[-1], tag, 40, ROWS // 2, b"\xc0"),
        )
        assert answered == [(PacketType.RESULT, 40), (PacketType.RESULT, 41), (PacketType.RESULT, 16)]


@pytest.mark.parametrize(
    "bad",
    [
        (0, ROWS // 2, b""),
        (0, ROWS // 2, bytes(64)),
        (ROWS // 2, ROWS // 2, b"\x80"),
        (65535, 1, b"\x80"),
        (0, 8, b"\xff\x80"),
    ],
)
def test_requests_that_ask_for_nothing_there_is_are_refused(bad: tuple[int, int, bytes]) -> None:
    with team(2, SETTINGS) as job:
        voice, labels, tag = _quiet_job(job, 2)
        assert voice.tell((PacketType.REPAIR, labels[-1], tag, *bad)) == []
        assert job[0].stats()["counters"]["control_refused"] == 1


def test_requests_that_cannot_be_met_are_answered_with_gone() -> None:
    """Another layout, a longer list than there is, an op of long ago."""
    with team(2, SETTINGS) as job:
        voice, labels, tag = _quiet_job(job, 3)
        assert voice.tell((PacketType.REPAIR, labels[-1], tag ^ 1, 0, ROWS // 2, b"\x80")) == [(PacketType.GONE, 0)]
        assert voice.tell((PacketType.REPAIR, labels[-2], tag, 4 * ROWS, 8 * ROWS, b"\x80")) == [(PacketType.GONE, 0)]
        old = (labels[0] - 70000) & 0xFFFFFFFF
        assert voice.tell((PacketType.REPAIR, old, tag, 0, ROWS // 2, b"\x80")) == [(PacketType.GONE, 0)]
        ahead = (labels[-1] + (5 << 10)) & 0xFFFFFFFF
        assert voice.tell((PacketType.REPAIR, ahead, tag, 0, ROWS // 2, b"\x80")) == []  # not finished here
        assert job[0].stats()["counters"]["control_refused"] == 1


def test_a_rank_that_closes_still_answers() -> None:
    """The last op: one rank has all it needs and says goodbye, the other still gets what it misses (clock-15)."""
    with team(2, SETTINGS) as job:
        FirstTime(seed=4, loss=0.2, types=frozenset({PacketType.RESULT})).attach(job[0])

        def one(communicator: Communicator) -> Any:
            data = gradients("U", 2, NUMEL, seed=1)[communicator.config.rank]
            outcome = communicator.allreduce(data, np.empty_like(data)).result(PATIENCE)
            communicator.close()
            return outcome

        for outcome in job.each(one):
            assert outcome.delivered == outcome.expected
        assert job[1].job.counters["rows_repaired"] > 0


def test_a_late_launch_repairs_once_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """clock-13: the op's time was up when it was launched; what is missing is asked for once, then it ends."""
    # the thread that answers may not run for a while
    monkeypatch.setattr("tailbound.collective.repair.PATIENCE", 1000 * MS)
    monkeypatch.setattr("tailbound.collective.repair.PATIENCE_MOST", 1000 * MS)
    ranks, last, second = 3, 2, 1000 * MS
    settings = patient(deadline_1=second, deadline_2=second, quiet=5 * MS, stage_max=second, start_max=second)
    with team(ranks, settings) as job:
        past_warm_up(job)
        only = {"types": frozenset({PacketType.RESULT}), "to": frozenset({last})}
        trouble = FirstTime(seed=4, loss=0.03, **only).attach(job[0])
        inputs = gradients("U", ranks, NUMEL, seed=1)
        time_up = time.monotonic() + job[last].config.bound / 1e9  # by any clock the op is over
        results = job.allreduce(inputs, [0, 1])  # two of three start the clock, and end without the third
        while time.monotonic() < time_up:
            time.sleep(0.1)
        repaired = job[last].job.counters["rows_repaired"]
        out = np.empty_like(inputs[last])
        outcome = job[last].allreduce(inputs[last], out).result(PATIENCE)
        assert outcome.late
        assert job[last].job.counters["rows_repaired"] - repaired == sum(trouble.dropped.values()) > 0
        np.testing.assert_array_equal(out, results[0][0])
