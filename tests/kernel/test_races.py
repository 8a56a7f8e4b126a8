"""Two CPUs at once where ``test_pairs`` does not reach: a record that a newer op takes between two looks at it."""

from __future__ import annotations

import os
import threading

import pytest

import cases
from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS, Verdict

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")


def test_a_record_that_a_newer_op_takes_is_not_of_another_layout(make) -> None:
    """A record is looked at without its lock: between its tag and its layout a newer op may have taken it."""
    world = make()
    span, layout = OP_STEPS << OP_INDEX_BITS, 7
    foreign = world.frame_of(cases.contribution(), port=cases.PORT + 1)
    stored = 0

    def run(barrier: threading.Barrier, cpu: int, *frames: tuple[bytes, int]) -> None:
        os.sched_setaffinity(0, {cpu})
        barrier.wait()
        for data, repeat in frames:  # the thread stays in the kernel, so that both really meet
            world.run(data, repeat)

    for lap in range(60):
        op = cases.OP + 2 * lap * span
        old = world.frame_of(cases.contribution(op=op, layout=layout))
        new = world.frame_of(cases.contribution(op=op + span, layout=layout + 1, sender=2, seq=cases.SEQ + 1, row=6))
        world.control(released=op)
        barrier, (first, second, *_) = threading.Barrier(2, timeout=60), sorted(os.sched_getaffinity(0))
        later = ((foreign, 1 + 61 * lap % 2500), (new, 1))
        both = [threading.Thread(target=run, args=(barrier, first, (old, 3000)))]
        both.append(threading.Thread(target=run, args=(barrier, second, *later)))
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        counts = world.counted()
        assert Verdict.LAYOUT_MISMATCH not in counts, lap
        stored = counts[Verdict.STORED]
    assert stored >= 60  # every newer op
    assert counts[Verdict.STALE_OP] > 0
