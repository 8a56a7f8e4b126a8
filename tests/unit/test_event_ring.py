"""The consuming end of the event ring on a processor that shows reads in another order than they were written."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tailbound.kernel import events
from tailbound.kernel.events import _HEAD, _RECORD, EventRing

RECORD = 8 + _RECORD.size


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> tuple[EventRing, list[tuple[int, bytes]]]:
    """A ring of a page, and what becomes visible with each barrier, in order: (place, bytes)."""
    made = EventRing.__new__(EventRing)
    made._their = bytearray(mmap.PAGESIZE * 3)  # type: ignore[assignment]
    made._mask = mmap.PAGESIZE - 1
    made._consumed, made._produced = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    shown: list[tuple[int, bytes]] = []

    def acquire() -> None:
        place, data = shown.pop(0)
        made._their[mmap.PAGESIZE + place : mmap.PAGESIZE + place + len(data)] = data  # type: ignore[index]

    monkeypatch.setattr(events, "_acquire", acquire)
    return made, shown


def test_heads_and_records_are_no_older_than_the_position(ring: tuple[EventRing, list[tuple[int, bytes]]]) -> None:
    """A head of 0 from before the position moved would put the consumer out of step for good."""
    made, shown = ring
    assert made.drain() == []
    heads = b"".join(_HEAD.pack(_RECORD.size) + bytes(4 + _RECORD.size) for _ in range(2))
    whole = b"".join(_HEAD.pack(_RECORD.size) + bytes(4) + _RECORD.pack(1, op, 9) for op in (5, 6))
    shown += [(0, heads), (0, whole)]
    made._produced[0] = 2 * RECORD
    assert made.drain() == [(1, 5, 9), (1, 6, 9)]
    assert made._consumed[0] == 2 * RECORD
    assert not shown


def test_a_record_that_is_being_written_waits(ring: tuple[EventRing, list[tuple[int, bytes]]]) -> None:
    made, shown = ring
    head = _HEAD.pack(_RECORD.size) + bytes(4) + _RECORD.pack(1, 5, 9)
    shown += [(0, head), (RECORD, _HEAD.pack(_RECORD.size | 1 << 31))]
    made._their[mmap.PAGESIZE + RECORD : mmap.PAGESIZE + RECORD + 4] = _HEAD.pack(_RECORD.size | 1 << 31)  # type: ignore[index]
    made._produced[0] = 2 * RECORD
    assert made.drain() == [(1, 5, 9)]
    assert made._consumed[0] == RECORD
