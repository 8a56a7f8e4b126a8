"""The mean in the kernel is plain division: every sum of every count, by the program itself and by its formula."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import switch_cases
from switch_cases import Job, Step, contribution
from switch_world import HEADERS, REDIRECT, SwitchWorld
from tailbound.wire import packets
from tailbound.wire.schema import HEADER_BYTES, Flag, Verdict

WIDTH, MOST = 1408, 255
BITS, PAIR, TOP = 24, np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFF000000FF000000)
JOB = Job(ranks=MOST)


def test_formula() -> None:
    """``tb_mean_word`` in numpy, lanes 0 and 2 of a word, for every sum up to 256 ranks."""
    for count in range(1, 257):
        sums = np.arange(255 * count + 1, dtype=np.uint64)
        m = np.uint64(-(-(1 << BITS) // count))
        lanes = (sums + np.uint64(count // 2)) & np.uint64(0xFFFF)
        assert (lanes == sums + np.uint64(count // 2)).all(), "half overflows a lane"
        both = (lanes | lanes[::-1] << np.uint64(32)) & PAIR
        word = both * m & TOP
        want = (sums + np.uint64(count // 2)) // np.uint64(count)
        assert np.array_equal(word >> np.uint64(24) & np.uint64(0xFF), want), count
        assert np.array_equal(word >> np.uint64(56), want[::-1]), count


@pytest.fixture
def world(make_switch: Callable[..., SwitchWorld]) -> SwitchWorld:
    """A switch whose sums and records the test writes."""
    return make_switch((JOB,), width=WIDTH)


def all_means(world: SwitchWorld, count: int, codes: int) -> None:
    """Rows that hold every sum of ``count`` codes, each released by a flush."""
    record = world.slots()[:1]
    lanes = world.switch.maps.arrays["switch_sums"][0].view(np.uint16).reshape(-1, 2, 4)
    step = Step(contribution(0, codes, job=JOB, seq=16, flags=Flag.FLUSH), Verdict.FLUSHED, 0, job=JOB)
    frame = world.frame_of(step)
    head = packets.parse(step.packet)
    assert head is not None
    for name in ("cookie", "seq", "op", "layout", "row", "rows"):
        record[name] = head[0][name]
    record["codes"], record["count"], record["ranks"] = codes, count, 1
    sums = np.arange(255 * count + 1)
    for at in range(0, len(sums), codes):
        row = np.zeros(codes, np.uint16)
        part = sums[at : at + codes]
        row[: len(part)] = part
        lanes[: codes // 8] = row.reshape(-1, 4, 2).transpose(0, 2, 1)
        record["final"] = 0
        assert world.run(frame) == REDIRECT
        back = np.frombuffer(world.back, np.uint8, codes, HEADERS + HEADER_BYTES)
        assert np.array_equal(back[: len(part)], (part + count // 2) // count), (count, at)
        kept = world.switch.maps.arrays["switch_sums"][0].view(np.uint64)[: codes // 4 : 2]
        assert np.array_equal(np.ascontiguousarray(kept).view(np.uint8), back), (count, at)


def test_every_sum_of_every_count(world: SwitchWorld) -> None:
    """In rounds, as full rows take it."""
    for count in range(1, MOST + 1):
        all_means(world, count, WIDTH)


def test_every_sum_in_short_rows(world: SwitchWorld) -> None:
    """In the steps behind the rounds."""
    for count in (1, 2, 3, 4, 5, 7, 64, 100, 127, 128, 129, 254, 255):
        all_means(world, count, 48)


def test_the_reference_rounds_halves_up() -> None:
    assert switch_cases.mean(np.array([0, 1, 2, 3, 509, 510]), 2) == bytes([0, 1, 1, 2, 255, 255])
