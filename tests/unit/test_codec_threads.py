"""Threads that share an op's groups: each group once, a scratch each, and a failure ends all."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from support import PATIENCE, gradients, launch, patient, team
from tailbound.codec import threads as codec_threads
from tailbound.codec.threads import Threads, threads_for
from tailbound.collective import contribute
from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.step import Do
from tailbound.kernel.core import core
from tailbound.wire.bits import Bits
from tailbound.wire.jit import entry
from tailbound.wire.packets import record_of
from tailbound.wire.schema import SLEEP, Woken

_KIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p, *[ctypes.c_int64] * 4)


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "threads"), [(0, 2, 1, 1), (0, 8, 1, 2), (0, 16, 4, 1), (0, 128, 8, 4), (3, 1, 4, 3)]
)
def test_threads_by_cores(asked: int, cores: int, ranks: int, threads: int) -> None:
    """Two cores are never shared out: an op must not be slower there."""
    assert threads_for(asked, cores, ranks) == threads


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of Python run in place of compiled ones: (working memory, (low, high)) -> what a piece returns."""
    kept: list[Any] = []

    def begins(work: Any) -> int:
        if hasattr(work, "py_func"):
            return entry(work)

        def code(result: Any, _: int, __: int, low: int, high: int, memory: int) -> int:
            result[0] = work(memory, (low, high))
            return 0

        kept.append(_KIND(code))
        return ctypes.cast(kept[-1], ctypes.c_void_p).value or 0

    monkeypatch.setattr(codec_threads, "entry", begins)


@pytest.mark.parametrize("groups", [1, 15, 16, 24, 1001])
def test_every_group_once_by_as_many_threads_as_pay_and_a_scratch_each(groups: int) -> None:
    """Every thread's first piece waits for those of the others."""
    lock, seen = threading.Lock(), np.zeros(groups, int)
    expected = max(1, min(3, groups // 8))
    together, memory_of = threading.Barrier(expected), dict[int, int]()

    def work(memory: int, part: tuple[int, int]) -> int:
        with lock:
            seen[part[0] : part[1]] += 1
            first = threading.get_ident() not in memory_of
            assert memory_of.setdefault(threading.get_ident(), memory) == memory
        if first:
            together.wait(PATIENCE)
        return part[1] - part[0]

    with contextlib.closing(Threads(3, 64)) as threads:
        assert threads.run(work, 0, groups) == groups
    assert (seen == 1).all()
    assert len(set(memory_of.values())) == len(memory_of) == expected


@pytest.mark.parametrize(("end", "unit", "pieces"), [(1, 1, 1), (31, 1, 1), (73, 1, 4), (720, 10, 4)])
def test_between_two_pieces_python_does_what_cannot_wait(end: int, unit: int, pieces: int) -> None:
    """Here the thread seems to have been stopped each time."""
    rest, threads, seen = record_of(SLEEP)(stopped=0), Threads(1, 64), list[object]()
    threads.rest, threads.meanwhile = ctypes.addressof(rest), seen.append

    def work(_: int, part: tuple[int, int]) -> int:
        seen.append("piece")
        return part[1] - part[0]

    assert threads.run(work, 0, end, unit) == end
    assert seen == ["piece", Woken.TURN] * pieces + [0]


def test_a_failure_ends_the_pass_when_all_pieces_at_work_have_ended() -> None:
    begun, failed, over = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def work(_: int, part: tuple[int, int]) -> int:
        if threading.get_ident() == caller:
            assert begun.wait(PATIENCE)
            failed.set()
            return -1
        begun.set()
        assert failed.wait(PATIENCE)
        over.set()
        return 1

    with contextlib.closing(Threads(2, 64)) as threads:
        assert threads.run(work, 0, 1000) == -1
        assert over.is_set()


def test_who_stays_out_of_an_op_lets_no_thread_code_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was overtaken between two pieces; its memory is the next op's soon."""
    begun, go, pieces, caller = threading.Event(), threading.Event(), list[Any](), threading.get_ident()
    monkeypatch.setattr(contribute, "_done_sending", lambda *_: None)

    def work(_: int, part: tuple[int, int]) -> int:
        if threading.get_ident() == caller:
            return int(begun.wait(PATIENCE))
        begun.set()
        assert go.wait(PATIENCE)
        pieces.append(part)
        return 1

    with contextlib.closing(Threads(2, 64)) as threads:
        op: Any = Mock(buffers=Mock(encodes=threads.work(work, 0, 100_000)), launch=Mock(prepare=None))
        where, rest = ctypes.addressof(op.buffers.encodes), record_of(SLEEP)(stopped=0)
        assert core().waits.tb_work(where, threads.scratch.memory_at, ctypes.addressof(rest)) == Woken.TURN
        go.set()
        contribute._DO[Do.STAY_OUT](Mock(threads=threads, counters=Counter()), op)
        done = len(pieces)
    assert 1 <= len(pieces) == done


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
