"""What is taken of an answer to a question for lost results (clock-35)."""

from __future__ import annotations

import numpy as np
import pytest

from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import shape_for
from tailbound.collective.fetched import Fetch
from tailbound.transport.sequence import Layout, Sequence
from tailbound.wire import packets
from tailbound.wire.schema import PacketType

RIGHT = {"layout": 7, "owner": 1, "count": 3, "row": 2, "map_id": 256}


@pytest.mark.parametrize(
    ("wrong", "rows"),
    [
        ({}, [2]), ({"map_id": 513}, []), ({"layout": 8}, []), ({"owner": 2}, []), ({"count": 0}, []), ({"row": 3}, []),
        ({"type": PacketType.CONTRIBUTION}, []), ({"op": 5}, []),
    ],
)  # fmt: skip
def test_only_rows_that_the_kernel_would_take_are_taken(wrong: dict[str, int], rows: list[int]) -> None:
    shape = shape_for(64 * 64, 64)
    place, _ = Sequence(3, OwnerMap(256, (0, 1, 2), True)).assign(Layout((0, 64 * 64, 0, 1), shape, 7, True))
    fetch = Fetch("deadline", 0, 1, {1: np.array([2, 4])})
    head = packets.header(**{"type": PacketType.RESULT, "op": place.label, **RIGHT, **wrong})
    fetch.arrived(place, 1, np.asarray(head).tobytes() + bytes(shape.codes))
    assert [places.tolist() for _, places, _ in fetch.came] == [rows]
    assert not fetch.waiting
