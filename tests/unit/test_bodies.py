"""What packets and answers carry beside rows, as bytes: READY, an entrance (clock-20, clock-32)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailbound.codec.owners import OwnerMap
from tailbound.collective import comeback
from tailbound.collective.comeback import Entrance
from tailbound.errors import TransportError
from tailbound.transport.agreement import Agreed
from tailbound.transport.control import decode_needs, encode_needs
from tailbound.transport.sequence import Position
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES


@given(st.lists(st.integers(-32768, 32767), min_size=1, max_size=704))
def test_needs_come_back(values: list[int]) -> None:
    needs = np.array(values, np.int16)
    body = encode_needs(needs)
    assert HEADER_BYTES + len(body) <= 1472, "the greatest one fits a packet"
    np.testing.assert_array_equal(decode_needs(body, len(values)), needs)
    assert decode_needs(body, len(values) + 8) is None


def test_the_bytes_of_needs_are_in_network_order() -> None:
    assert encode_needs(np.array([1, -2, EXPONENT_NONE], np.int16)) == bytes.fromhex("0001fffe8000")
    assert encode_needs(None) == b""


MAPS = (Agreed(2, OwnerMap(256, (0, 1))), Agreed(9, OwnerMap(513, (2,), 3)))
POSITION = Position(7, 1 << 31, (1, 2, 0xFFFFFFFF), MAPS)
ENTRANCE = Entrance(POSITION, 0xC0, frozenset({2}), frozenset({0, 1}))


def test_an_entrance_comes_back() -> None:
    assert comeback.decode(comeback.encode(ENTRANCE, 3), 3) == ENTRANCE


@given(st.binary(max_size=200))
@example(b"")
@example(b"{}")
@example(b"[" * 100_000)
@example(comeback.encode(ENTRANCE, 3)[:-9])
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(TransportError, match="is no entrance"):
        comeback.decode(data, 3)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, -1), (0, 1 << 22), (0, 1e400), (1, 1 << 32), (1, None), (2, [1, 2]), (2, 5), (2, [1, 2, -1]), (2, "x"),
        (3, ""), (3, "x"), (3, 5), (3, "00" * 40), (4, None), (4, 1e400), (4, -1), (5, 2), (5, [3]), (5, [{}]),
        (6, 2), (6, [3]),
    ],
)  # fmt: skip
def test_wrong_fields_of_an_entrance_are_refused(place: int, value: object) -> None:
    found = json.loads(comeback.encode(ENTRANCE, 3))
    for wrong in ([*found[:place], value, *found[place + 1 :]], found[:place] + found[place + 1 :]):
        with pytest.raises(TransportError, match="no entrance"):
            comeback.decode(json.dumps(wrong).encode(), 3)
