"""Memory of ops is used again, and that of shapes that do not come again is let go of."""

from __future__ import annotations

import weakref

from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import shape_for
from tailbound.collective.buffers import BufferPool
from tailbound.transport.sequence import Layout, Sequence


def test_memory_of_ops_that_do_not_come_again_is_let_go_of() -> None:
    """DDP's first step is one bucket with everything; from the second on there are the smaller ones."""
    pool, sequence = BufferPool(rank=0, ranks=2, ring=256), Sequence(2, OwnerMap(0, (0, 1)))

    def held(numel: int) -> weakref.ref[object]:
        layout = Layout((0, numel, 0, 1), shape_for(numel, 64, 8), numel, True)
        place, _ = sequence.assign(layout)
        buffers = pool.acquire(layout.shape, place.placement)
        pool.keep(place, buffers)
        return weakref.ref(buffers)

    first = held(64 * 256)
    assert held(64 * 256)() is first()
    small = [held(64 * 64)() for _ in range(3)]
    assert first() is not None
    small += [held(64 * 64)() for _ in range(5)]
    assert first() is None
    assert small[0] is not None
    assert all(buffers is small[0] for buffers in small)
