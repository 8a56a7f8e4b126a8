"""Whole all-reduces over udp in one process, nothing lost: accuracy, equal bits, shapes, scales, labels."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support import (
    PATIENCE,
    MemoryStore,
    Reference,
    Team,
    assembled,
    await_that,
    exact_mean,
    gradients,
    nmse,
    patient,
    team,
)
from tailbound.collective.communicator import Communicator, cut
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TransportError
from tailbound.transport.config import Config
from tailbound.wire.address import words_of
from tailbound.wire.schema import Verdict, op_label

#: A question after an op may cross its end, and is stale then; nothing else is ever refused.
STRAY = {"STALE_RESULT"}


def identical(results: list[Any]) -> bool:
    """Whether all ranks have the same bits."""
    first = results[0][0].view(np.uint32)
    return all(np.array_equal(first, out.view(np.uint32)) for out, _ in results)


def whole(results: list[Any]) -> bool:
    """Whether nothing was missing anywhere."""
    return all(o.delivered == o.expected and o.error is None and not o.missing for _, o in results)


def test_the_bits_are_those_of_the_reference() -> None:
    ranks = 3
    cookie, width, numel = 0xC0FFEE, 256, 20 * 256 * 16 + 77
    expected = Reference(ranks, width, cookie)
    with team(ranks, patient(width=width), cookie=cookie) as job:
        for op, factor in enumerate([1.0, 1.0, 10.0, 0.01, 1.0]):  # scales that jump: shifts up, codes wasted down
            inputs = [factor * x for x in gradients("U", ranks, numel, seed=op)]
            results = job.allreduce(inputs)
            assert whole(results)
            wanted = expected.allreduce(inputs, op_label(op, 0))
            for out, _ in results:
                np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))


def test_buckets_of_every_size() -> None:
    width, ranks = 128, 3
    sizes = [1, 2, 15, 16, 17, 255, 256, 257, width * 16 - 1, width * 16, width * 16 + 1]
    sizes += [width * 32 + 1, width * 64 - 1, width * 64, width * 64 + 1, width * 128 + 16, 100_003]
    with team(ranks, patient(width=width)) as job:
        for _, size in itertools.product(range(2), sizes):  # cold and warm
            inputs = gradients("U", ranks, size, seed=size)
            results = job.allreduce(inputs)
            assert whole(results)
            assert identical(results)
            # a lone entry is spread over 16 codes of one scale; larger ones reach the bound of the table
            assert nmse(results[0][0], exact_mean(inputs)) <= 4e-3
        for rank, (_, outcome) in enumerate(results):
            assert outcome.expected == outcome.delivered > 0
            assert set(job[rank].stats()["drops"]) <= STRAY


def test_buckets_larger_than_the_ring_are_cut() -> None:
    """Rule: clock-18."""
    ranks = 3
    with team(ranks, patient(ring_mib=0.0625)) as job:  # 256 rows of 256 codes
        rows = job[0].job.store.result_rows
        numel = 5 * rows * 256 + 1000
        for op in range(3):
            inputs = gradients("U", ranks, numel, seed=op)
            results = job.allreduce(inputs)
            assert whole(results)
            assert identical(results)
            assert nmse(results[0][0], exact_mean(inputs)) <= 1.5e-3
            assert results[0][1].label & 1023 > 8  # the step had many ops


def test_cut_covers_a_bucket_and_never_exceeds_the_rows() -> None:
    from tailbound.codec.shape import shape_for

    for width, rows in itertools.product([64, 256, 1408], [16, 32, 64, 100, 128, 4096]):
        for numel in [1, 15, 64, width, width * rows - 1, width * rows, width * rows + 1, 7 * width * rows + 13]:
            pieces = cut(numel, width, rows)
            assert pieces[0][0] == 0
            assert pieces[-1][1] == numel
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
            assert max(shape_for(hi - lo, width).rows for lo, hi in pieces) <= rows
    with pytest.raises(ConfigError, match="larger ring"):
        cut(64 * 16 * 1025, 64, 16)


def test_zeros_stay_zeros_and_a_group_wakes_again() -> None:
    ranks, numel = 3, 20_000
    zeros = [np.zeros(numel, np.float32)] * ranks
    ones = gradients("U", ranks, numel, seed=1)
    with team(ranks, patient()) as job:
        for _ in range(3):
            results = job.allreduce(zeros)
            assert whole(results)
            assert not any(out.any() for out, _ in results)
        results = job.allreduce(ones)  # scales are for zeros: clipped, counted, and known to all afterwards
        assert all(o.clipped > 0 for _, o in results)
        results = job.allreduce(ones)
        assert whole(results)
        assert nmse(results[0][0], exact_mean(ones)) <= 1.5e-3
        for member in job.communicators:
            assert set(member.stats()["drops"]) <= STRAY


def test_several_ops_in_flight() -> None:
    """More steps than there are op records for, of one size and of two, all launched before the first is over."""
    ranks, count = 3, 12
    inputs = [[gradients("U", ranks, 4000 + 3000 * (op % 2), seed=op)[r] for op in range(count)] for r in range(ranks)]
    with team(ranks, patient()) as job:
        for _ in range(2):

            def launch(communicator: Communicator) -> list[NDArray[np.float32]]:
                own = inputs[communicator.config.rank]
                outs = [np.full_like(x, np.nan) for x in own]
                futures = [communicator.allreduce(x, out) for x, out in zip(own, outs, strict=True)]
                outcomes = [future.result(PATIENCE) for future in futures]
                assert all(o.delivered == o.expected and o.deadline_hits == 0 for o in outcomes)
                return outs

            results = job.each(launch)
            for op in range(count):
                exact = exact_mean([inputs[r][op] for r in range(ranks)])
                for rank in range(ranks):
                    np.testing.assert_array_equal(results[rank][op], results[0][op])
                assert nmse(results[0][op], exact) <= 4e-3
        assert job[0].drain(PATIENCE)
        assert all("SCALE_MISMATCH" not in member.stats()["drops"] for member in job.communicators)


def test_labels_wrap() -> None:
    """Steps around 2**22, where the op label passes 2**32, and row sequences that pass it too (clock-18)."""
    ranks, numel = 3, 5000
    with team(ranks, patient(first_step=(1 << 22) - 4)) as job:
        for member in job.communicators:
            sequence, control = member.job.sequence, member.job.store.control
            sequence._result_seq = 0xFFFFFFFF - 100
            sequence.sum_seqs = (0xFFFFFFFF - 30,) * ranks
            control["result_base"], control["sum_base"] = 0xFFFFFFFF - 100, 0xFFFFFFFF - 30
        labels = []
        for op in range(8):
            inputs = gradients("U", ranks, numel, seed=op)
            results = job.allreduce(inputs)
            assert whole(results)
            assert identical(results)
            labels.append(results[0][1].label)
        assert labels == [op_label(((1 << 22) - 4 + op) % (1 << 22), 0) for op in range(8)]
        assert all(set(member.stats()["drops"]) <= STRAY for member in job.communicators)


def test_steady_state_allocates_nothing_big(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an op is kept and used again: neither the heap nor the pool grows with ops."""
    monkeypatch.setenv("TAILBOUND_STATUS", "off")  # its thread allocates when it likes
    ranks, numel = 2, 400_000

    def loop(job: Team, inputs: list[Any], outs: list[Any], count: int) -> None:
        def run(communicator: Communicator) -> None:
            rank = communicator.config.rank
            for _ in range(count):
                communicator.allreduce(inputs[rank], outs[rank]).result(PATIENCE)

        job.each(run)

    with team(ranks, patient()) as job:
        inputs = gradients("U", ranks, numel, seed=0)
        outs = [np.empty(numel, np.float32) for _ in range(ranks)]
        few = [np.ones(64, np.float32) for _ in range(ranks)]
        loop(job, few, [np.empty_like(x) for x in few], 200)  # what is remembered of the last 200 ops is there now
        loop(job, inputs, outs, 10)
        tracemalloc.start()
        try:
            for _ in range(10):  # what every op allocates shows in every round; other tests' leavings do not
                gc.collect()
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                loop(job, inputs, outs, 4)
                gc.collect()
                after, peak = tracemalloc.get_traced_memory()
                if after - before < 0.01 * numel * 4 and peak - before < 0.10 * numel * 4:
                    break
        finally:
            tracemalloc.stop()
        assert after - before < 0.01 * numel * 4
        assert peak - before < 0.10 * numel * 4
        assert all(job.each(lambda c: c.drain(PATIENCE)))
        for member in job.communicators:  # one in use, and one for an op that a packet named before it was over
            assert all(len(free) <= 2 for free in member._engine._window.pool._free.values())


@pytest.mark.parametrize(
    ("data", "out", "message"),
    [
        (np.zeros(8, np.float64), None, "float64"),
        (np.zeros((2, 4), np.float32), None, "one-dimensional"),
        (np.zeros(16, np.float32)[::2], None, "contiguous"),
        (np.zeros(0, np.float32), None, "at least one"),
        (np.zeros(8, np.float32), np.zeros(9, np.float32), "as many for out"),
        (np.zeros(8, np.float32), np.zeros(8, np.float16), "float16"),
        (np.zeros(8, np.uint16), None, "uint16"),  # bfloat16 only where it is said to be
    ],
)
def test_arrays_that_cannot_be_averaged_are_refused(data: Any, out: Any, message: str) -> None:
    with team(1, patient()) as job, pytest.raises(ConfigError, match=message):
        job[0].allreduce(data, out)


def test_after_close_nothing_is_launched() -> None:
    with team(2, patient()) as job:
        for member in job.communicators:
            member.close()
            member.close()
            with pytest.raises(TransportError, match="closed"):
                member.allreduce(np.zeros(8, np.float32))


def test_a_datapath_that_is_not_there_is_named() -> None:
    config = Config(rank=0, ranks=1)
    with pytest.raises(ConfigError, match="choose one of auto, xdp, udp"):
        Communicator(MemoryStore(), config, datapath="rdma")
    with pytest.raises(ConfigError, match="no interface 'nosuch0'"):
        Communicator(MemoryStore(), config, interface="nosuch0")
    with pytest.raises(ConfigError, match="needs an interface"):
        Communicator(MemoryStore(), config, datapath="xdp")


def test_a_small_sums_ring_bounds_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned maps may have been sized for more workers: the own rows of an op must fit the sums ring, too."""
    from tailbound.datapath import select

    monkeypatch.setattr(select, "ring_rows", lambda ring_mib, width, workers: (64, 4096))
    with team(2, patient()) as job:
        inputs = gradients("U", 2, 256 * 64 * 5, seed=3)
        (average, outcome), (other, _) = job.allreduce(inputs)
        assert outcome.delivered == outcome.expected
        np.testing.assert_array_equal(average, other)
        assert job[0].stats()["drops"] == {}


def test_a_large_bucket_is_many_ops() -> None:
    """However large the ring is: either half of an op ends within ``stage_max``, also at 100 Mbit/s."""
    with team(1, patient(width=1408, ring_mib=64.0)) as job:
        assert job[0].ops(8192 * 1408) == 1
        assert job[0].ops(124_439_808) == 11


def test_more_ops_than_a_step_can_number_are_refused() -> None:
    """Where the bucket is launched: the transport goes on, and the next bucket may end the step."""
    few, large = np.ones(64, np.float32), np.ones(2049 * 64, np.float32)
    with team(1, patient(width=64, ring_mib=0.25)) as job:
        done: list[Outcome] = []
        for bucket in range(1023):
            job[0].launch(bucket, few, few.copy(), last=False, done=done.append)
        with pytest.raises(ConfigError, match="bucket 1023 begins at op 1023 of its step and needs 3, of 1024"):
            job[0].launch(1023, large, large.copy(), last=True, done=done.append)
        job[0].launch(1023, few, few.copy(), last=True, done=done.append)
        await_that(lambda: len(done) == 1024, "all ops")
        assert not any(outcome.error for outcome in done)


def test_the_smallest_ring_of_all_ranks_bounds_what_is_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    """Programs attached for good may have other rings: a rank must not run ahead of what another's ring takes."""
    store = MemoryStore()

    def maker(rank: int, ring_mib: float) -> Callable[[], Communicator]:
        config = Config(rank=rank, ranks=2, **patient(ring_mib=ring_mib))
        return lambda: Communicator(store, config, datapath="udp")

    with assembled([maker(0, 1.0), maker(1, 0.0625)]) as job:
        assert job[0].job.store.result_rows == 16 * job[1].job.store.result_rows
        assert job[0]._engine._window._capacity() == job[1]._engine._window._capacity()
        (average, outcome), (other, _) = job.allreduce(gradients("U", 2, 256 * 64 * 5, seed=3))
        assert outcome.delivered == outcome.expected
        np.testing.assert_array_equal(average, other)
    assert "rank 0: its result ring has 4096 rows, another rank's 256" in caplog.text


def test_the_ledger_of_an_earlier_job_is_not_ours() -> None:
    """Pinned maps outlive a job, and nobody but the program may write them."""
    with team(2, patient()) as members:
        job = members[0].job
        job.store.ledger["verdict"][1, Verdict.LAYOUT_MISMATCH] += np.uint64(5)
        assert job.records.verdicts()[1][Verdict.LAYOUT_MISMATCH] == 5
        job.activate([words_of("127.0.0.1")] * 2, words_of("127.0.0.1"))
        assert not job.records.verdicts().any()
