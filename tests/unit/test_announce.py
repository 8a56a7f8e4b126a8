"""Bodies of READY packets, as packets carry them: padded with zeros to a multiple of 16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.collective.announce import READY_BYTES, decode_ready, encode_ready
from tailbound.wire import packets
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES, PacketType


@given(
    st.sets(st.integers(0, 255)),
    st.none() | st.lists(st.integers(-32768, 32767), min_size=1, max_size=640),
)
def test_what_goes_in_comes_out(heard: set[int], values: list[int] | None) -> None:
    needs = None if values is None else np.array(values, np.int16)
    data = packets.packet(packets.header(type=PacketType.READY), encode_ready(heard, needs))
    parsed = packets.parse(data)
    assert parsed is not None
    ready = decode_ready(parsed[1], 1 if values is None else len(values))
    assert ready is not None
    assert ready.heard == heard
    if needs is None:
        assert ready.needs is None
    else:
        np.testing.assert_array_equal(ready.needs, needs)


def test_the_bytes_are_in_network_order() -> None:
    body = encode_ready({0, 9, 255}, np.array([1, -2, EXPONENT_NONE], np.int16))
    assert body[:READY_BYTES] == bytes([0x80, *[0] * 29, 0x02, 0x01])
    assert body[READY_BYTES:] == bytes.fromhex("0001fffe8000")


@pytest.mark.parametrize("length", [0, 1, 31, 33, 34, 47])
def test_bodies_that_are_too_short_are_refused(length: int) -> None:
    assert decode_ready(bytes(length), 8) is None


def test_the_greatest_fits_a_packet() -> None:
    assert HEADER_BYTES + len(encode_ready({255}, np.zeros(640, np.int16))) <= 1472
