"""Threads that share an op's groups: each group once, a scratch each, the first error comes out."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from support import PATIENCE, gradients, launch, patient, team
from tailbound.codec.scratch import Scratch
from tailbound.codec.threads import Threads, threads_for
from tailbound.collective.communicator import Communicator, Handling
from tailbound.wire.bits import Bits


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "threads"), [(0, 2, 1, 1), (0, 8, 1, 2), (0, 16, 4, 1), (0, 128, 8, 4), (3, 1, 4, 3)]
)
def test_threads_by_cores(asked: int, cores: int, ranks: int, threads: int) -> None:
    """Two cores are never shared out: an op must not be slower there."""
    assert threads_for(asked, cores, ranks) == threads


@pytest.mark.parametrize("groups", [1, 15, 16, 24, 1001])
def test_every_group_once_by_as_many_threads_as_pay_and_a_scratch_each(groups: int) -> None:
    """Every thread's first piece waits for those of the others."""
    lock, seen = threading.Lock(), np.zeros(groups, int)
    expected = max(1, min(3, groups // 8))
    together, scratch_of = threading.Barrier(expected), dict[int, int]()

    def work(scratch: Scratch, part: tuple[int, int]) -> int:
        with lock:
            seen[part[0] : part[1]] += 1
            first = threading.get_ident() not in scratch_of
            assert scratch_of.setdefault(threading.get_ident(), id(scratch)) == id(scratch)
        if first:
            together.wait(PATIENCE)
        return part[1] - part[0]

    with contextlib.closing(Threads(3, 64)) as threads:
        assert sum(threads.each(groups, work)) == groups
    assert (seen == 1).all()
    assert len(set(scratch_of.values())) == len(scratch_of) == expected


@pytest.mark.parametrize(("groups", "divide", "pieces"), [(1, True, 1), (31, True, 1), (73, True, 4), (73, False, 1)])
def test_a_thread_alone_has_a_moment_for_others_after_each_piece(groups: int, divide: bool, pieces: int) -> None:
    threads, seen = Threads(1, 64), list[str]()
    threads.meanwhile = lambda: seen.append("others")

    def work(_: Scratch, part: tuple[int, int]) -> int:
        seen.append("piece")
        return part[1] - part[0]

    assert sum(threads.each(groups, work, divide=divide)) == groups
    assert seen == ["piece", "others"] * pieces


def test_a_thread_that_does_not_get_to_run_is_not_waited_for() -> None:
    free = threading.Event()
    with contextlib.closing(Threads(2, 64)) as threads:
        busy = threads._threads.submit(free.wait, PATIENCE)
        assert sum(threads.each(100, lambda _, part: part[1] - part[0])) == 100
        assert not busy.done()
        free.set()


def test_an_error_comes_out_after_all_have_ended() -> None:
    begun, failed, over = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def work(_: Scratch, part: tuple[int, int]) -> None:
        if threading.get_ident() == caller:
            assert begun.wait(PATIENCE)
            failed.set()
            raise ValueError("first")
        begun.set()
        assert failed.wait(PATIENCE)
        over.set()

    with contextlib.closing(Threads(2, 64)) as threads:
        with pytest.raises(ValueError, match="first"):
            threads.each(1000, work)
        assert over.is_set()


def averages(threads: int, bits: Bits) -> list[NDArray[np.float32]]:
    """Of a job of two ranks: a cold step, one with what that has left unsaid, and what is left then."""
    inputs = gradients("C", 2, 1408 * 64 * 40 + 5, 1)
    residuals = [np.zeros_like(x) for x in inputs]

    def average(communicator: Communicator) -> NDArray[np.float32]:
        rank = communicator.config.rank
        data, handling = inputs[rank] + residuals[rank], Handling(residual=residuals[rank])
        outcome = launch(communicator, data, out := np.empty_like(data), handling=handling).result(PATIENCE)
        assert (outcome.delivered, len(communicator.job.threads)) == (outcome.expected, threads)
        return out

    with team(2, patient(codec_threads=threads, bits=bits), cookie=11) as job:
        found = [*job.each(average), *job.each(average), *residuals]
    assert all(r.any() for r in residuals)
    return found


@pytest.mark.parametrize("bits", [8, (4, 8)])
def test_the_bits_are_those_of_one_thread(bits: Bits) -> None:
    np.testing.assert_array_equal(averages(3, bits), averages(1, bits))
