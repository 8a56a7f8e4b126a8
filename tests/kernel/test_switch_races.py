"""Two CPUs in one switch: a flush against the last contribution, a newer generation against an older one.

All ranks send the same codes, so a row's mean is these codes whoever is in it, and anything else is a sum that does not
belong to its count. Threads stay in the kernel (the benchmark's turntable moves the packet from row to row).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tailbound.wire.schema import HEADER_BYTES, Flag, Verdict
from tailbound_lab.bench.program_run import run_xdp
from turntable import TURN_RANK, TURN_ROW, Turntable

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")

SLOTS, WIDTH = 1024, 256
#: Laps at most until both sides have won.
LAPS = 300


@pytest.fixture
def table(loader: str) -> Iterator[Turntable]:
    made = Turntable(loader, SLOTS, WIDTH)
    made.job(2)
    yield made
    made.close()


def together(table: Turntable, *runs: tuple[bytes, int, int]) -> None:
    """Packets, how they are turned, and repeats; each on a CPU of its own, at the same time."""
    barrier = threading.Barrier(len(runs), timeout=60)

    def body(cpu: int, data: bytes, turn: int, repeat: int) -> None:
        os.sched_setaffinity(0, {cpu})
        frame = table.turn(cpu, data, turn, 2)
        barrier.wait()
        run_xdp(table.program, frame, repeat)

    threads = [
        threading.Thread(target=body, args=(cpu, *run))
        for cpu, run in zip(sorted(os.sched_getaffinity(0)), runs, strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_rows(table: Turntable, codes: bytes) -> None:
    """Every row is final, its count is that of its bitmap, and its mean is the codes."""
    slots = table.switch.maps.arrays["switch_slots"]
    assert slots["final"].all()
    members = np.array([int(word).bit_count() for word in slots["ranks"][:, 0]])
    assert np.array_equal(slots["count"], members)
    kept = table.switch.maps.arrays["switch_sums"].view(np.uint64)[:, : WIDTH // 4 : 2]
    assert (np.ascontiguousarray(kept).view(np.uint8) == np.frombuffer(codes, np.uint8)).all()


def test_flush_against_the_last_contribution(table: Turntable) -> None:
    """Each row has one outcome: both are in it, or the flush alone; and the loser is told which."""
    slots = table.switch.maps.arrays["switch_slots"]
    added = answered = 0
    for lap in range(LAPS):
        seq = lap * SLOTS
        flush = table.packet(0, 2, seq, Flag.FLUSH, WIDTH)
        plain = table.packet(1, 2, seq, 0, WIDTH)
        before = table.counted()
        together(table, (flush, TURN_ROW, SLOTS), (plain, TURN_ROW, SLOTS))
        after = table.counted() - before
        check_rows(table, flush[HEADER_BYTES:])
        assert (slots["ranks"][:, 0] & 1).all()
        assert int(after[Verdict.STORED]) == SLOTS
        assert int(after[Verdict.ADDED]) == np.count_nonzero(slots["count"] == 2)
        assert int(after[Verdict.ANSWERED]) == np.count_nonzero(slots["count"] == 1)
        added, answered = added + int(after[Verdict.ADDED]), answered + int(after[Verdict.ANSWERED])
        if added and answered and lap >= 9:
            break
    assert added, "the flush was always first: the test has not met its race"
    assert answered, "the flush was always last: the test has not met its race"


def test_generations(table: Turntable) -> None:
    """Two generations of the same slots at once: a row of the newer one is never made of the older one's codes."""
    met = 0
    for lap in range(0, LAPS, 2):
        older = table.packet(0, 2, lap * SLOTS, 0, WIDTH)
        newer = table.packet(0, 2, (lap + 1) * SLOTS, 0, WIDTH)
        before = table.counted()
        together(table, (older, TURN_RANK, 2 * SLOTS), (newer, TURN_RANK, 2 * SLOTS))
        after = table.counted() - before
        check_rows(table, newer[HEADER_BYTES:])
        slots = table.switch.maps.arrays["switch_slots"]
        assert np.array_equal(np.sort(slots["seq"]), (lap + 1) * SLOTS + np.arange(SLOTS))
        assert (slots["count"] == 2).all()
        met += int(after[Verdict.STALE_OP] + after[Verdict.ABANDONED])
        if met and lap >= 10:
            break
    assert met, "the generations never met"
