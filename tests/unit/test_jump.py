"""The position a lost rank is told, as bytes (clock-20)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec.owners import OwnerMap
from tailbound.collective.jump import decode, encode
from tailbound.errors import TransportError
from tailbound.transport.agreement import Agreed
from tailbound.transport.sequence import Position

POSITION = Position(
    7, 1 << 31, (1, 2, 0xFFFFFFFF), (Agreed(2, OwnerMap(256, (0, 1))), Agreed(9, OwnerMap(513, (2,), 3)))
)


def test_a_position_comes_back() -> None:
    assert decode(encode(POSITION, 3), 3) == POSITION


@given(st.binary(max_size=200) | st.just(b"[" * 100_000))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(TransportError, match="no position"):
        decode(data, 3)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, -1), (0, 1 << 22), (0, 1e400), (1, 1 << 32), (1, None), (2, [1, 2]), (2, 5), (2, [1, 2, -1]), (2, "x"),
        (3, ""), (3, "x"), (3, 5), (3, "00" * 40),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(place: int, value: object) -> None:
    found = json.loads(encode(POSITION, 3))
    for wrong in ([*found[:place], value, *found[place + 1 :]], found[:place] + found[place + 1 :]):
        with pytest.raises(TransportError, match="no position"):
            decode(json.dumps(wrong).encode(), 3)
