"""Feeding packets to programs one after the other without Python in between, and judging each as it comes back.

Every packet has to be counted once, under its sender or as nobody's; the kernel program and the udp datapath have to
agree; and nothing but a packet that was taken may change a sum or a result that anybody may still read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

import cases
from kernel_world import DROP, HEADERS, PASS, TX
from soak.forge import MOST
from tailbound.datapath.ingest import ingest
from tailbound.kernel import syscalls
from tailbound.wire import jit
from tailbound.wire.jit import Scalar
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, UNKNOWN_SENDER, VERDICTS, PacketType, Verdict

_SENDER, _SEQ, _TYPE = (HEADER_DTYPE.fields[n][1] for n in ("sender", "seq", "type"))  # type: ignore[index]
_STORED, _ADDED, _TAKEN = int(Verdict.STORED), int(Verdict.ADDED), int(Verdict.RESULT_TAKEN)
_CORRUPT = int(Verdict.CORRUPT)
_CONTRIBUTION, _RESULT = int(PacketType.CONTRIBUTION), int(PacketType.RESULT)
_PASSED, _REFLECTED, _ABANDONED = int(Verdict.CONTROL_PASSED), int(Verdict.REFLECTED), int(Verdict.ABANDONED)
_TEST_RUN, _ATTR = 10, 80
_SLOTS, _PLACES = cases.SUM_ROWS - 1, cases.RESULT_ROWS - 1
#: syscall(2) with the three arguments of bpf(2); numba passes no more, so none is left to chance.
_bpf: Any = types.ExternalFunction("syscall", types.int64(types.int64, types.int64, types.uintp, types.int64))
_NUMBER = syscalls._number()


def compiled(function: Callable[..., Any]) -> Any:
    """As ``jit.compiled``, made anew when the udp datapath has changed, too, whose code becomes part of it."""
    dispatcher = jit.cached(jit.njit(nogil=True, cache=True, boundscheck=False, _nrt=False)(function))
    index = dispatcher._cache._cache_file
    index._source_stamp = (index._source_stamp, jit._digest(Path(ingest.py_func.__code__.co_filename).parent))
    return dispatcher


class Wrong(IntEnum):
    """What is wrong with a packet; 0: nothing."""

    NOT_RUN = 1
    KERNEL_COUNTS = 2
    UDP_COUNTS = 3
    VERDICTS_DIFFER = 4
    ACTION = 5
    ECHO = 6
    REFUSED_AND_SUMMED = 7
    OTHER_SUM = 8
    REFUSED_AND_SHOWN = 9


class Runner:
    """BPF_PROG_TEST_RUN of one program; this process stays on one CPU from now on, whose counters are those it raises.

    Attributes:
        attr: u32[20], bpf(2)'s argument.
        back: u8[bytes], the packet as the program leaves it.
        cpu: that one.
    """

    def __init__(self, program: int) -> None:
        self.cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {self.cpu})
        self.attr = np.zeros(_ATTR // 4, np.uint32)
        self.back = np.zeros(HEADERS + MOST + 256, np.uint8)
        self.attr[0] = program

    @property
    def context(self) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """What ``run`` takes."""
        return self.attr, self.back


@compiled
def run(attr: NDArray[np.uint32], back: NDArray[np.uint8], frame: NDArray[np.uint8], length: Scalar) -> Scalar:
    """Runs the program on a frame; its action, or -1: the kernel would not."""
    wide = attr.view(np.uint64)
    attr[1], attr[2], attr[3] = 0, length, back.shape[0]
    wide[2], wide[3] = frame.ctypes.data, back.ctypes.data
    attr[8], attr[9] = 1, 0
    if _bpf(_NUMBER, _TEST_RUN, attr.ctypes.data, _ATTR) < 0:
        return np.int64(-1)
    return np.int64(attr[1])


@compiled
def gained(ledger: NDArray[np.uint64], known: NDArray[np.uint64], ranks: Scalar, named: Scalar) -> Any:
    """What a ledger u64[senders, verdicts] has gained since ``known``, which is brought up to date.

    Looked at are ``ranks`` rows, that of the sender who is named, and nobody's.

    Returns:
        (how often the packet was counted; its row and verdict as one number; who was charged with ABANDONED, a set)
    """
    count, last, abandoned = np.int64(0), np.int64(-1), np.int64(0)
    for i in range(ranks + 2):
        row = i if i < ranks else (UNKNOWN_SENDER if i == ranks else named)
        if i == ranks + 1 and (named < ranks or named == UNKNOWN_SENDER):
            break
        for verdict in range(VERDICTS):
            more = np.int64(ledger[row, verdict] - known[row, verdict])
            if more == 0:
                continue
            known[row, verdict] = ledger[row, verdict]
            if verdict == _ABANDONED:
                abandoned |= more << 8 * (row & 7)
            else:
                count += more
                last = row * VERDICTS + verdict
    return count, last, abandoned


@compiled
def _differ(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> Scalar:
    bits = np.uint64(0)
    for i in range(one.shape[0]):
        bits |= one[i] ^ other[i]
    return bits != 0


@compiled
def _rows_differ(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> Scalar:
    bits = np.uint64(0)
    for i in range(one.shape[0]):
        for k in range(one.shape[1]):
            bits |= one[i, k] ^ other[i, k]
    return bits != 0


@compiled
def _number_at(data: NDArray[np.uint8], at: Scalar) -> Scalar:
    value = np.int64(0)
    for i in range(4):
        value = value << 8 | np.int64(data[at + i])
    return value


@compiled
def _over(records: Any, at: Scalar, cookie: NDArray[np.uint32], released: NDArray[np.uint32]) -> Scalar:
    """Whether nobody reads a row any more: it is of another job or of none, or of an op that is over."""
    return records[0][at] != cookie[0] or np.int32(records[1][at] - released[0]) <= 0


@compiled
def _copy(to: NDArray[np.uint64], what: NDArray[np.uint64]) -> None:
    for i in range(to.shape[0]):
        to[i] = what[i]


@compiled
def _codes(row: NDArray[np.uint64], data: NDArray[np.uint8], length: Scalar, apart: Scalar) -> None:
    """Writes the codes of a packet into a row: as they come, or those in even and in odd places apart, as sums are."""
    for i in range((length - HEADER_BYTES) // 8):
        even, odd = np.uint64(0), np.uint64(0)
        for k in range(4):
            at = HEADER_BYTES + 8 * i + 2 * k
            even |= np.uint64(data[at]) << np.uint64(16 * k)
            odd |= np.uint64(data[at + 1]) << np.uint64(16 * k)
        if apart:
            row[2 * i], row[2 * i + 1] = even, odd
        else:
            row[i] = even | odd << np.uint64(8)


@compiled
def leave(kernel: Any, udp: Any, data: NDArray[np.uint8], length: Scalar) -> None:
    """After a packet that is CORRUPT: what it may have left in the kernel's memory (kernel-9).

    These are its own codes, all of them, as they are stored or copied, in its own row, where nobody reads it any more.
    Where that row has changed, it is expected so, and the same is written for the udp datapath, which leaves nothing.

    Args:
        kernel, udp: of ``feed``.
        data: the packet, u8[length].
    """
    _, _, sums, sums_known, results, results_known, slots, rows, cookie, released = kernel
    _, _, _, udp_sums, udp_results, _, _ = udp
    place = _number_at(data, _SEQ)
    slot, position = place & _SLOTS, place & _PLACES
    contribution, result = data[_TYPE] == _CONTRIBUTION, data[_TYPE] == _RESULT
    if contribution and _over(slots, slot, cookie, released) and _differ(sums[slot], sums_known[slot]):
        _codes(sums_known[slot], data, length, True)
        _copy(udp_sums[slot], sums_known[slot])
    if result and _over(rows, position, cookie, released) and _differ(results[position], results_known[position]):
        _codes(results_known[position], data, length, False)
        _copy(udp_results[position], results_known[position])


@compiled
def strayed(kernel: Any) -> Scalar:
    """``Wrong`` if sums or results are not as they are known to be."""
    _, _, sums, sums_known, results, results_known, _, _, _, _ = kernel
    if _rows_differ(sums, sums_known):
        return 7
    return 9 if _rows_differ(results, results_known) else 0


@compiled
def feed(
    program: Any, kernel: Any, udp: Any, packets: Any, words: NDArray[np.uint32], clock: Scalar, counts: Any
) -> Any:
    """Feeds packets to both datapaths until one of them is wrong.

    Args:
        program: of ``Runner.context``.
        kernel: (ledger, ledger as known, sums, sums as known, results, results as known), the last four u64[rows, ...],
            then (cookie, op) of slots, the same of results, cookie of the job, and its newest op that is over.
        udp: (context, ledger, ledger as known, sums, results, buffer u8[MOST], echoes).
        packets: (frames, sizes of their payloads, sources).
        words: addresses by source, u32[sources, 4].
        clock: ns, before the first packet.
        counts: i64[VERDICTS], raised.

    Returns:
        (number of the packet that is wrong, or how many there are; ``Wrong``; what the kernel counted; what udp did)
    """
    attr, back = program
    ledger, known, sums, sums_known, results, results_known, _, _, _, _ = kernel
    context, udp_ledger, udp_known, udp_sums, _, buffer, echoes = udp
    frames, sizes, sources = packets
    for n in range(frames.shape[0]):
        length = sizes[n]
        data = frames[n, HEADERS : HEADERS + length]
        named = np.int64(data[_SENDER]) if length >= HEADER_BYTES else np.int64(UNKNOWN_SENDER)
        action = run(attr, back, frames[n], HEADERS + length)
        if action < 0:
            return n, 1, -1, -1
        for i in range(length):
            buffer[i] = data[i]
        echoed = ingest(context, buffer, length, 0, words[sources[n]], clock + 1000 * n, False, echoes)
        ours = gained(ledger, known, cases.RANKS, named)
        theirs = gained(udp_ledger, udp_known, cases.RANKS, named)
        if ours[0] != 1:
            return n, 2, ours[1], theirs[1]
        if theirs[0] != 1:
            return n, 3, ours[1], theirs[1]
        if ours != theirs:
            return n, 4, ours[1], theirs[1]
        verdict = ours[1] % VERDICTS
        counts[verdict] += 1
        wanted = PASS if verdict == _PASSED else (TX if verdict == _REFLECTED else DROP)
        if action != wanted:
            return n, 5, ours[1], theirs[1]
        if (echoed != 0) != (verdict == _REFLECTED):
            return n, 6, ours[1], theirs[1]
        if verdict == _REFLECTED:
            for i in range(length):
                if back[HEADERS + i] != buffer[i]:
                    return n, 6, ours[1], theirs[1]
        if verdict == _CORRUPT:
            leave(kernel, udp, data, length)
        elif verdict in (_STORED, _ADDED):
            slot = _number_at(data, _SEQ) & _SLOTS
            if _differ(sums[slot], udp_sums[slot]):
                return n, 8, ours[1], theirs[1]
            _copy(sums_known[slot], sums[slot])
        elif verdict == _TAKEN:
            position = _number_at(data, _SEQ) & _PLACES
            _copy(results_known[position], results[position])
        wrong = strayed(kernel)
        if wrong:
            return n, wrong, ours[1], theirs[1]
    return frames.shape[0], 0, -1, -1


def words_of(wrong: int, ours: int, theirs: int) -> str:
    """What ``feed`` says, in words."""

    def one(counted: int) -> str:
        if counted < 0:
            return "nothing"
        row, verdict = divmod(counted, VERDICTS)
        return f"{Verdict(verdict).name} of {'nobody' if row == UNKNOWN_SENDER else f'rank {row}'}"

    return f"{Wrong(wrong).name}: the kernel counts {one(ours)}, udp {one(theirs)}"
