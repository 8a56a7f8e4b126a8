"""Answers to repair requests packet by packet (clock-23), and what is fetched; whole jobs: ``sim/test_repair.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support import MS, PATIENCE, Team, gradients, patient, team
from tailbound.collective import fetch, fetched
from tailbound.collective.communicator import Communicator
from tailbound.collective.retransmit import answer
from tailbound.transport.reliable import Refusal
from tailbound.wire import packets
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.messages import read

NUMEL = 8 * 64 * 256
ROWS = 8 * 64
SETTINGS = patient(quiet=20 * MS)


def test_what_cannot_be_fetched_is_refused() -> None:
    with team(2, SETTINGS) as job:
        _, labels, tag = _quiet_job(job, 6)
        place = job[0]._engine.window.pool._kept[-1].place
        assert place.label == labels[-1]

        def ask(label: int, tag: int, rows: int, *places: int) -> bytes:
            bits = np.zeros(rows, np.uint8)
            bits[list(places)] = 1
            return fetched.ASK.pack(label, tag, rows) + np.packbits(bits).tobytes()

        own = place.placement.shares[0]
        for request, why in (
            (b"", "a request of 0 bytes"),
            (ask(labels[0], tag, own, 3), "not kept"),  # too long ago
            (ask(labels[-1], tag ^ 1, own, 3), "not kept"),
            (ask(labels[-1], tag, own + 9, own + 8), "not kept"),
            (ask(labels[-1], tag, own), "not kept"),
        ):
            with pytest.raises(Refusal, match=why):
                job[1].reliable.pull(0, fetch.REQUEST, request, PATIENCE)
        body = job[1].reliable.pull(0, fetch.REQUEST, ask(labels[-1], tag, own, 3, 5), PATIENCE)
        assert len(body) == 2 * job[0]._engine.window.pool._kept[-1].results.packets.shape[1]


# -- answers, packet by packet --------------------------------------------------------------------------------------


class Caught:
    """A ``transport.sockets.Socket`` of which nothing leaves: ``sent`` has the packets."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent

    def room(self) -> int:
        return 0

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        self._sent.append(packet)
        return 0

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        for message in read(messages, count):
            self._sent.extend(message.packets)
        return count, 0


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
        sockets = self.job.sender.sockets
        sent: list[bytes] = []
        original = sockets.copy()
        sockets[:] = [Caught(sent)] * len(sockets)
        try:
            for kind, op, layout, row, rows, body in bodies:
                head = packets.header(
                    type=kind, cookie=self.job.cookie, sender=self.rank, owner=self.job.rank, op=op, layout=layout,
                    row=row, rows=rows,
                )  # fmt: skip
                self.engine._inbox.take(packets.packet(head, body), self.engine._ops)
            answer(self.job, self.engine._window, self.job.now())
        finally:
            sockets[:] = original
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
    return Stranger(job[0], 1), labels, job[0]._engine._window.pool._kept[-1].place.layout.tag


def test_results_outlive_their_op_by_two_steps() -> None:
    with team(2, SETTINGS) as job:
        voice, labels, tag = _quiet_job(job, 6)
        own = ROWS // 2
        ask = (tag, 0, own, b"\xa0")
        assert voice.tell((PacketType.REPAIR, labels[-1], *ask)) == [(PacketType.RESULT, 0), (PacketType.RESULT, 2)]
        assert voice.tell((PacketType.REPAIR, labels[-2], *ask)) == [(PacketType.RESULT, 0), (PacketType.RESULT, 2)]
        assert voice.tell((PacketType.REPAIR, labels[-3], *ask)) == [(PacketType.GONE, 0)]
        assert voice.tell((PacketType.REPAIR, labels[-3], *ask)) == []  # once
        kept = sum(each.results.packets.nbytes for each in job[0]._engine._window.pool._kept)
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


def test_requests_that_ask_for_nothing_there_is_are_refused() -> None:
    with team(2, SETTINGS) as job:
        voice, labels, tag = _quiet_job(job, 2)
        bad = [
            (0, ROWS // 2, b""),
            (0, ROWS // 2, bytes(64)),
            (ROWS // 2, ROWS // 2, b"\x80"),
            (65535, 1, b"\x80"),
            (0, 8, b"\xff\x80"),
        ]
        for number, one in enumerate(bad, 1):
            assert voice.tell((PacketType.REPAIR, labels[-1], tag, *one)) == []
            assert job[0].stats()["counters"]["control_refused"] == number


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
