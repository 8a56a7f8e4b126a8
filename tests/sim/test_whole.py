"""Whole all-reduces in virtual time, nothing lost: sizes, rings, labels that wrap; answers, packet by packet; marks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from sim.team import SimTeam, sim_team
from support import Trouble, gradients, patient, whole
from tailbound.codec.shape import shape_for
from tailbound.collective.communicator import cut
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError
from tailbound.transport.sequence import Position
from tailbound.wire import packets
from tailbound.wire.schema import Flag, PacketType, op_label
from tailbound_lab.simulate.fabric import MS, Burst

RANKS = 3


def no_drops(job: SimTeam) -> bool:
    """A question after an op may cross its end, and is stale then; nothing else is ever refused."""
    return all(set(member.stats()["drops"]) <= {"STALE_RESULT"} for member in job.communicators)


def launched(job: SimTeam, buckets: Sequence[Sequence[np.ndarray]], *, last: Callable[[int], bool]) -> list[list[Any]]:
    """(average, future) by bucket and rank of ``buckets``, all launched at once."""
    made: list[list[Any]] = []
    for index, inputs in enumerate(buckets):
        made.append([(np.full_like(data, np.nan), Future[Outcome]()) for data in inputs])
        for member, data, (out, done) in zip(job.communicators, inputs, made[-1], strict=True):
            member.launch(index, data, out, last=last(index), done=done.set_result)
    return made


def test_buckets_of_every_size() -> None:
    width = 128
    sizes = [1, 2, 15, 16, 17, 255, 256, 257, width * 16 - 1, width * 16, width * 16 + 1]
    sizes += [width * 32 + 1, width * 64 - 1, width * 64, width * 64 + 1, width * 128 + 16, 100_003]
    with sim_team(RANKS, patient(width=width)) as job:
        for _, size in itertools.product(range(2), sizes):  # cold and warm
            inputs = gradients("U", RANKS, size, seed=size)
            # a lone entry is spread over 16 codes of one scale; larger ones reach the bound of the table
            whole(job.allreduce(inputs), inputs, 4e-3)
        assert no_drops(job)


def test_buckets_larger_than_the_ring_are_cut() -> None:
    """Rule: clock-18."""
    with sim_team(RANKS, patient(ring_mib=0.0625)) as job:  # 256 rows of 256 codes
        numel = 5 * job[0].job.store.result_rows * 256 + 1000
        for op in range(3):
            inputs, results = job.averaged(numel, op)
            whole(results, inputs, 1.5e-3)
            assert results[0][1].label & 1023 > 8  # the step had many ops


def test_cut_covers_a_bucket_and_never_exceeds_the_rows() -> None:
    for width, rows in itertools.product([64, 256, 1408], [16, 32, 64, 100, 128, 4096]):
        for numel in [1, 15, 64, width, width * rows - 1, width * rows, width * rows + 1, 7 * width * rows + 13]:
            pieces = cut(numel, width, rows)
            assert (pieces[0][0], pieces[-1][1]) == (0, numel)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
            assert max(shape_for(hi - lo, width).rows for lo, hi in pieces) <= rows
    with pytest.raises(ConfigError, match="larger ring"):
        cut(64 * 16 * 1025, 64, 16)


def test_zeros_stay_zeros_and_a_group_wakes_again() -> None:
    zeros, ones = [np.zeros(20_000, np.float32)] * RANKS, gradients("U", RANKS, 20_000, seed=1)
    with sim_team(RANKS, patient()) as job:
        for _ in range(3):
            whole(job.allreduce(zeros), zeros, 0)
        whole(job.allreduce(ones), ones, 1.5e-3)
        assert no_drops(job)


def test_steps_in_flight_beyond_the_records_of_ops() -> None:
    """More steps than there are op records for, of one size and of two, all launched before the first is over."""
    steps = [gradients("U", RANKS, 4000 + 3000 * (op % 2), seed=op) for op in range(12)]
    with sim_team(RANKS, patient()) as job:
        for _ in range(2):
            pending = launched(job, steps, last=lambda index: True)
            for inputs, made in zip(steps, pending, strict=True):
                whole(job.finish(dict(enumerate(made))), inputs, 4e-3)
                assert all(done.result(0).deadline_hits == 0 for _, done in made)
        assert no_drops(job)


def test_a_step_larger_than_the_ring_goes_through_it_op_by_op() -> None:
    """Half of the ring is in flight at most, nothing is lost, and no rank in step is taken for lost (clock-20)."""
    buckets = 12
    with sim_team(RANKS, patient(ring_mib=0.25)) as job:
        ring, most = job[0].job.store.result_rows, 0

        def over(made: list[list[Any]]) -> bool:
            nonlocal most
            for member in job.communicators:
                flying = sum(op.place.layout.shape.rows for op in member.node.engine.launched)
                most = max(most, flying)
            return all(done.done() for pairs in made for _, done in pairs)

        for step in range(4):
            given = [gradients("U", RANKS, 2 * 64 * 256, seed=100 * step + index) for index in range(buckets)]
            made = launched(job, given, last=lambda index: index == buckets - 1)
            job.until(lambda made=made: over(made), "the step ends")
            for inputs, pairs in zip(given, made, strict=True):
                whole([(out, done.result(0)) for out, done in pairs], inputs, 2e-3)
            assert [(member.behind, member.lost) for member in job.communicators] == [(0, False)] * RANKS
        assert sum(job[0].job.sequence.op_rows) > ring
        assert 0 < most <= ring // 2
        assert not any(member.stats()["counters"].get("jumps", 0) for member in job.communicators)


def test_labels_wrap() -> None:
    """Steps around 2**22, where the op label passes 2**32, and row sequences that pass it too (clock-18)."""
    wrap, numel = 1 << 22, 5000
    with sim_team(RANKS, patient(first_step=wrap - 5)) as job:
        near = Position(wrap - 4, 0xFFFFFFFF - 100, (0xFFFFFFFF - 30,) * RANKS, job[0].node.engine.position().agreed)
        for member in job.communicators:
            assert member.node.engine.jump(near) == 1
        labels = []
        for op in range(8):
            inputs, results = job.averaged(numel, op)
            whole(results, inputs, 4e-3)
            labels.append(results[0][1].label)
        assert labels == [op_label((wrap - 4 + op) % wrap, 0) for op in range(8)]
        assert no_drops(job)


def test_more_ops_than_a_step_can_number_are_refused() -> None:
    """Where the bucket is launched: the transport goes on, and the next bucket may end the step."""
    few, large = np.ones(64, np.float32), np.ones(2049 * 64, np.float32)
    with sim_team(1, patient(width=64, ring_mib=0.25)) as job:
        done: list[Outcome] = []
        for bucket in range(1023):
            job[0].launch(bucket, few, few.copy(), last=False, done=done.append)
        with pytest.raises(ConfigError, match="bucket 1023 begins at op 1023 of its step and needs 3, of 1024"):
            job[0].launch(1023, large, large.copy(), last=True, done=done.append)
        job[0].launch(1023, few, few.copy(), last=True, done=done.append)
        job.until(lambda: len(done) == 1024, "all ops end")
        assert not any(outcome.error for outcome in done)


# -- answers, packet by packet (clock-23, clock-35); what whole jobs make of them: ``test_repair``, ``test_fetch`` -----

WIDTH, ROWS = 64, 8 * 64
#: Rows that each of two ranks owns, and a request for two of them.
OWN, TWO = ROWS // 2, b"\xa0"


class Voice(Trouble):
    """Speaks for rank 1 to rank 0 of two, and hears what rank 0 would send it back."""

    def __init__(self, job: SimTeam, ops: int) -> None:
        super().__init__(seed=0)
        self.job, self.tag, self.sent = job, 0, list[tuple[PacketType, int]]()
        job[0].trouble(self)
        inputs = gradients("U", 2, ROWS * WIDTH, seed=1)
        self.labels = [job.allreduce(inputs)[0][1].label for _ in range(ops)]
        job.drain()

    def meet(self, rank: int, packets_: list[bytes]) -> list[bytes]:
        for data in packets_:
            parsed = packets.parse(data)
            assert parsed is not None, "an answer with a wrong check"
            kind = PacketType(int(parsed[0]["type"][0]))
            if kind in (PacketType.RESULT, PacketType.GONE):
                self.sent.append((kind, int(parsed[0]["row"][0])))
            if kind is PacketType.RESULT:
                self.tag = int(parsed[0]["layout"][0])
        return packets_

    def ask(self, *requests: tuple[int, int, int, int, bytes]) -> list[tuple[PacketType, int]]:
        """Requests (op, layout, row, rows, bits of rows) that come at once; what is answered."""
        self.sent.clear()
        data = []
        for op, layout, row, rows, bits in requests:
            head = packets.header(
                type=PacketType.REPAIR, cookie=self.job[0].job.cookie, sender=1, owner=0, op=op, layout=layout,
                row=row, rows=rows,
            )  # fmt: skip
            data.append(packets.packet(head, bits))
        self.job.world.fabric.send(Burst(1, 0, b"".join(data), len(data[0])))
        self.job.go(20 * MS)
        return list(self.sent)

    def refused(self) -> int:
        return int(self.job[0].stats()["counters"].get("control_refused", 0))


def test_results_outlive_their_op_by_two_steps() -> None:
    with sim_team(2, patient(width=WIDTH)) as job:
        voice = Voice(job, 6)
        ask, two = (voice.tag, 0, OWN, TWO), [(PacketType.RESULT, 0), (PacketType.RESULT, 2)]
        assert voice.ask((voice.labels[-1], *ask)) == two
        assert voice.ask((voice.labels[-2], *ask)) == two
        for _ in range(2):  # each request is answered: an answer may be lost
            assert voice.ask((voice.labels[-3], *ask)) == [(PacketType.GONE, 0)]
        assert job[0].stats()["counters"]["repair_rows_sent"] == 4


def test_what_cannot_be_met_is_answered_with_gone_or_refused() -> None:
    """A question for marks, another layout, too long a list, an op of long ago; and requests that are none."""
    with sim_team(2, patient(width=WIDTH)) as job:
        voice = Voice(job, 4)
        newest, tag = voice.labels[-1], voice.tag
        for request in (
            (voice.labels[0], tag, 0, 0, b""),
            (newest, tag ^ 1, 0, OWN, b"\x80"),
            (voice.labels[-2], tag, 4 * ROWS, 8 * ROWS, b"\x80"),
            ((voice.labels[0] - 70000) & 0xFFFFFFFF, tag, 0, OWN, b"\x80"),
        ):
            assert voice.ask(request) == [(PacketType.GONE, request[2])]
        assert voice.refused() == 0
        bad = [(0, OWN, b""), (0, OWN, bytes(64)), (OWN, OWN, b"\x80"), (65535, 1, b"\x80"), (0, 8, b"\xff\x80")]
        for number, one in enumerate(bad, 1):
            assert voice.ask((newest, tag, *one)) == []
            assert voice.refused() == number
        ahead = (newest + (5 << 10)) & 0xFFFFFFFF
        assert voice.ask((ahead, tag, 0, OWN, b"\x80")) == []  # not finished here
        assert voice.refused() == len(bad) + 1


# -- marks of what has been published reach the others though no row carries them (clock-7b) ---------------------------


SIZES = (64 * 256, 64 * 256)
#: ns of silence after which marks are asked for (clock-30): who was told does not ask.
SILENCE = 4 * MS


def _step(job: SimTeam, seed: int, *, ill: bool = False) -> list[list[Outcome]]:
    """One step of two buckets; outcomes by bucket and rank."""
    found: list[list[Future[Outcome]]] = [[] for _ in SIZES]
    for bucket, size in enumerate(SIZES):
        for rank, data in enumerate(gradients("U", len(job), size, seed=seed + bucket)):
            done, out = Future[Outcome](), np.empty(size, np.float32)
            given = np.full_like(data, np.nan) if ill else data.copy()
            job[rank].launch(bucket, given, out, last=bucket == len(SIZES) - 1, done=done.set_result)
            found[bucket].append(done)
    job.until(lambda: all(done.done() for of in found for done in of), "the step ends")
    job.go(20 * MS)
    return [[done.result(0) for done in of] for of in found]


def test_an_op_without_any_row_is_over_without_a_question() -> None:
    """Owners had published nothing, and said so by the next packet alone. Rules: clock-7b, clock-25."""
    with sim_team(3, patient(width=64, share_rows=False, quiet=MS)) as job:
        for seed in range(8):
            _step(job, seed)
        for of_bucket in _step(job, 8, ill=True):
            for outcome in of_bucket:
                assert outcome.void
                assert outcome.nanoseconds < SILENCE


def test_results_that_left_before_those_of_the_op_before_are_told_as_published() -> None:
    """Their last row could not say so, and the last one of the op before did not: a lost row was not asked for.

    Rules: clock-7b, clock-23.
    """
    with sim_team(3, patient(width=64, share_rows=False, quiet=MS)) as job:
        for seed in range(8):
            _step(job, seed)
        lost: list[int] = []

        def of_one(to: int, sent: list[bytes]) -> list[bytes]:
            """Rank 1's rows of the first bucket are lost on the way to rank 0, which seals the second one first."""
            return [each for each in sent if to != 0 or not _is(each, PacketType.CONTRIBUTION, 0)]

        def of_zero(to: int, sent: list[bytes]) -> list[bytes]:
            """And so is rank 0's first row of the second bucket, on the way to rank 2."""
            if to == 2 and not lost and _is(sent[0], PacketType.RESULT, 1):
                lost.append(to)
                return sent[1:]
            return sent

        def _is(data: bytes, kind: PacketType, bucket: int) -> bool:
            """Whether it is a row of a bucket, sent for the first time."""
            head = np.frombuffer(data[:64], packets.HEADER_DTYPE)[0]
            return bool(
                head["type"] == kind and int(head["op"]) & 1023 == bucket and not int(head["flags"]) & Flag.REPEAT
            )

        job[1].trouble(of_one)
        job[0].trouble(of_zero)
        first, second = _step(job, 8)
        assert lost
        assert not any(outcome.missed for outcome in first + second)
        assert second[0].nanoseconds < first[0].nanoseconds < second[2].nanoseconds
        assert second[2].nanoseconds < first[0].nanoseconds + SILENCE
