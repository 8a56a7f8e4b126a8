"""Whole all-reduces in virtual time, nothing lost: sizes, rings, labels that wrap; answers, packet by packet; marks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import packed
from sim.team import SimTeam, sim_team
from support import Trouble, gradients, launch, patient, whole
from tailbound.codec.shape import shape_for
from tailbound.collective import contribute
from tailbound.collective.buffers import Buffers
from tailbound.collective.communicator import _chunks
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError
from tailbound.transport.sequence import Position
from tailbound.wire import packets
from tailbound.wire.schema import Flag, PacketType, op_label
from tailbound_lab.simulate.fabric import MS, Burst

RANKS = 3
#: By rank, the average of a bucket and what becomes of its op.
Launched = dict[int, tuple[np.ndarray, Future[Outcome]]]


def no_drops(job: SimTeam) -> bool:
    """A question after an op may cross its end, and is stale then; nothing else is ever refused."""
    return all(set(member.stats()["drops"]) <= {"STALE_RESULT"} for member in job.communicators)


def step(job: SimTeam, buckets: Sequence[Sequence[np.ndarray]], *, one: bool = True) -> list[Launched]:
    """All of ``buckets`` launched at once, by default as those of ``one`` step."""
    made: list[Launched] = []
    for index, inputs in enumerate(buckets):
        last, made = not one or index == len(buckets) - 1, [*made, {}]
        for rank, data in enumerate(inputs):
            out = np.full_like(data, np.nan)
            made[-1][rank] = out, launch(job[rank], data.copy(), out, index, last=last)
    return made


def test_buckets_of_every_size() -> None:
    width = 128
    sizes = [1, 2, 15, 16, 17, 255, 256, 257, width * 16 - 1, width * 16, width * 16 + 1]
    sizes += [width * 32 + 1, width * 64 - 1, width * 64, width * 64 + 1, width * 128 + 16, 100_003]
    with sim_team(RANKS, patient(width=width)) as job:
        for _, size in itertools.product(range(2), sizes):  # new and known
            inputs = gradients("U", RANKS, size, seed=size)
            # a lone entry is spread over 16 codes of one scale; larger ones reach the bound of the table
            whole(job.allreduce(inputs), inputs, 4e-3)
        assert no_drops(job)


@pytest.mark.parametrize("why", ["", "one brings none", "too many rows", "a suspect", "one is back"])
def test_an_owner_makes_and_queues_its_results_without_python_unless_something_is_to_be_said(why: str) -> None:
    inputs = gradients("U", RANKS, 5000, seed=1)
    with sim_team(RANKS, patient(width=128)) as job:
        engine = job.world.nodes[0].engine
        if why == "too many rows":
            engine.job.owner.most = 1
        if why == "a suspect":
            engine.job.terms.suspects = 1
        if why == "one is back":
            engine.job.terms.live_since = 1 << 62
        results = job.allreduce(inputs, silent=[2] if why == "one brings none" else ())
        assert bool(engine.alone) == (not why)
        whole(results, inputs if why != "one brings none" else (), 4e-3)


def test_cut_covers_a_bucket_and_never_exceeds_the_rows() -> None:
    """Rule: clock-18."""
    for width, rows in itertools.product([64, 256, 1408], [16, 32, 64, 100, 128, 4096]):
        for numel in [1, 15, 64, width, width * rows - 1, width * rows, width * rows + 1, 7 * width * rows + 13]:
            pieces = [(lo, hi) for lo, hi, _ in _chunks(numel, (), width, rows, rows)]
            assert (pieces[0][0], pieces[-1][1]) == (0, numel)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
            assert max(shape_for(hi - lo, width).rows for lo, hi in pieces) <= rows
    with pytest.raises(ConfigError, match="larger ring"):
        _chunks(64 * 16 * 1025, (), 64, 16, 16)


def test_a_step_larger_than_the_ring_goes_through_it_op_by_op() -> None:
    """Half of the ring is in flight at most, nothing is lost, and no rank in step is taken for lost (clock-20)."""
    with sim_team(RANKS, patient(ring_mib=0.25)) as job:
        ring, flying = job[0].job.store.result_rows, [0]

        def over(made: list[Launched]) -> bool:
            engines = [member.node.engine for member in job.communicators]
            flying.extend(sum(op.place.layout.shape.rows for op in engine.launched) for engine in engines)
            return all(done.done() for pairs in made for _, done in pairs.values())

        for seed in range(4):
            given = [gradients("U", RANKS, 2 * 64 * 256, seed=100 * seed + index) for index in range(12)]
            made = step(job, given)
            job.until(lambda made=made: over(made), "the step ends")
            for inputs, pairs in zip(given, made, strict=True):
                whole(job.finish(pairs), inputs, 2e-3)
            assert [(member.behind, member.lost) for member in job.communicators] == [(0, False)] * RANKS
        assert sum(job[0].job.sequence.op_rows) > ring
        assert 0 < max(flying) <= ring // 2
        assert not any(member.stats()["counters"].get("jumps", 0) for member in job.communicators)


def test_labels_wrap() -> None:
    """Steps around 2**22, where the op label passes 2**32, and row sequences that pass it too (clock-18)."""
    wrap = 1 << 22
    with sim_team(RANKS, patient(first_step=wrap - 5)) as job:
        near = Position(wrap - 4, 0xFFFFFFFF - 100, (0xFFFFFFFF - 30,) * RANKS, job[0].node.engine.position().agreed)
        for member in job.communicators:
            assert member.node.engine.jump(near) == 1
        labels = [job.right(5000, op)[0][1].label for op in range(8)]
        assert labels == [op_label((wrap - 4 + op) % wrap, 0) for op in range(8)]
        assert no_drops(job)


def test_more_ops_than_a_step_can_number_are_refused() -> None:
    """Where the bucket is launched: the transport goes on, and the next bucket may end the step."""
    few, large = np.ones(64, np.float32), np.ones(4097 * 64, np.float32)
    with sim_team(1, patient(width=64, ring_mib=0.25)) as job:
        made = [launch(job[0], few, few.copy(), bucket, last=False) for bucket in range(1023)]
        with pytest.raises(ConfigError, match="bucket 1023 begins at op 1023 of its step and needs 3, of 1024"):
            launch(job[0], large, large.copy(), 1023)
        made.append(launch(job[0], few, few.copy(), 1023))
        job.until(lambda: all(done.done() for done in made), "all ops end")
        assert not any(done.result(0).error for done in made)


# -- answers, packet by packet (clock-23, clock-35) --------------------------------------------------------------------

ROWS = 8 * 64
#: Rows that each of two ranks owns, and a request for two of them.
OWN, TWO = ROWS // 2, b"\xa0"
SENT, GONE, REFUSED = [PacketType.RESULT] * 2, [PacketType.GONE], list[PacketType]()


def test_requests_are_answered_with_rows_or_gone_or_refused() -> None:
    """Results outlive their op by two steps. Each request is answered: an answer may be lost."""
    with sim_team(2, patient(width=64)) as job:
        labels = [job.averaged(ROWS * 64, 1)[1][0][1].label for _ in range(6)]
        job.drain()
        oldest, *_, ended, before, newest = labels
        (tag, old), said = (int(job[0].job.records.of(op)["layout"]) for op in (newest, before)), list[int]()

        def hear(to: int, sent: list[bytes]) -> list[bytes]:
            said.extend(data[1] for data in sent if data[1] in (PacketType.RESULT, PacketType.GONE))
            return sent

        def answer(op: int, row: int, rows: int, bits: bytes, layout: int) -> list[int]:
            """What rank 0 says to a request of rank 1."""
            said.clear()
            head = packed.header(
                type=PacketType.REPAIR, cookie=job[0].job.cookie, sender=1, owner=0, op=op & 0xFFFFFFFF, row=row,
                layout=layout, rows=rows,
            )  # fmt: skip
            data = packed.packet(head, bits)
            job.world.fabric.send(Burst(1, 0, data, len(data)))
            job.go(20 * MS)
            return said.copy()

        job[0].trouble(hear)
        for answered, *request in (
            (SENT, newest, 0, OWN, TWO, tag),
            (SENT, before, 0, OWN, TWO, old),
            (GONE, ended, 0, OWN, TWO, tag),
            (GONE, ended, 0, OWN, TWO, tag),
            (GONE, oldest, 0, 0, b"", tag),  # a question for marks
            (GONE, newest, 0, OWN, b"\x80", tag ^ 1),  # another layout
            (GONE, before, 4 * ROWS, 8 * ROWS, b"\x80", old),  # too long a list
            (GONE, oldest - 70000, 0, OWN, b"\x80", tag),
            (REFUSED, newest, 0, OWN, b"", tag),
            (REFUSED, newest, 0, OWN, bytes(64), tag),
            (REFUSED, newest, OWN, OWN, b"\x80", tag),
            (REFUSED, newest, 65535, 1, b"\x80", tag),
            (REFUSED, newest, 0, 8, b"\xff\x80", tag),
            (REFUSED, newest + (5 << 10), 0, OWN, b"\x80", tag),  # not finished here
        ):
            assert answer(*request) == answered, request
        assert job[0].job.voice.control_refused == 6


# -- marks of what has been published reach the others though no row carries them (clock-7b) ---------------------------


#: ns of silence after which marks are asked for (clock-30): who was told does not ask.
SILENCE = 4 * MS


def two_buckets(job: SimTeam, seed: int, *, ill: bool = False) -> list[list[Outcome]]:
    """One step of two buckets; outcomes by bucket and rank."""
    given = [gradients("U", RANKS, 64 * 256, seed=seed + bucket) for bucket in range(2)]
    made = step(job, [[np.full_like(data, np.nan) if ill else data for data in inputs] for inputs in given])
    found = [[outcome for _, outcome in job.finish(pairs)] for pairs in made]
    job.go(20 * MS)
    return found


def test_an_op_without_any_row_is_over_without_a_question() -> None:
    """Owners had published nothing, and said so by the next packet alone. Rules: clock-7b, clock-25."""
    with sim_team(RANKS, patient(width=64, share_rows=False, quiet=MS)) as job:
        for seed in range(8):
            two_buckets(job, seed)
        for outcome in itertools.chain(*two_buckets(job, 8, ill=True)):
            assert outcome.void
            assert outcome.nanoseconds < SILENCE


def test_results_that_left_before_those_of_the_op_before_are_told_as_published() -> None:
    """Their last row could not say so, and the last one of the op before did not: a lost row was not asked for.

    Rank 1's rows of the first bucket are lost on the way to rank 0, which seals the second one first. So is rank 0's
    first row of the second bucket, on the way to rank 2. Rules: clock-7b, clock-23.
    """
    with sim_team(RANKS, patient(width=64, share_rows=False, quiet=MS)) as job:
        for seed in range(8):
            two_buckets(job, seed)
        lost: list[Any] = []

        def _is(data: bytes, kind: PacketType, bucket: int) -> bool:
            """Whether it is a row of a bucket, sent for the first time."""
            head = np.frombuffer(data[:64], packets.HEADER_DTYPE)[0]
            return bool(head["type"] == kind and head["op"] & 1023 == bucket and not head["flags"] & Flag.REPEAT)

        def of_zero(to: int, sent: list[bytes]) -> list[bytes]:
            if to != 2 or lost or not _is(sent[0], PacketType.RESULT, 1):
                return sent
            lost.append(sent[0])
            return sent[1:]

        job[0].trouble(of_zero)
        job[1].trouble(lambda to, sent: [each for each in sent if to or not _is(each, PacketType.CONTRIBUTION, 0)])
        first, second = two_buckets(job, 8)
        assert lost
        assert not any(outcome.missed for outcome in first + second)
        assert second[0].nanoseconds < first[0].nanoseconds < second[2].nanoseconds
        assert second[2].nanoseconds < first[0].nanoseconds + SILENCE


def test_an_op_whose_results_are_still_leaving_lends_its_other_memory_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank had packets of two steps where its own results left more slowly than the others' came. Rule: clock-23.

    Rank 0 has done with its results of an op only in the middle of the next one; lost ones are sent again all the same.
    """
    monkeypatch.setattr(contribute, "Buffers", made := Mock(wraps=Buffers))
    with sim_team(RANKS, patient(width=64, share_rows=False, quiet=MS)) as job:
        job[0].job.queue.pacer.link.most = 1e6
        job[0].trouble(Trouble(7, loss=0.05, types=frozenset({PacketType.RESULT})))
        for seed in range(8):
            job.right(64 * 64, seed, late={0: 3 * MS, 1: 3 * MS, 2: 3 * MS})
        assert job[0].stats()["counters"]["repair_rows_sent"]
        assert sorted(call.args[2] for call in made.call_args_list) == [0, 1, 2]
