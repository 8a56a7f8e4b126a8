"""The position a lost rank is told, as bytes (clock-20)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.collective.jump import decode, encode
from tailbound.errors import TransportError
from tailbound.transport.sequence import Position

POSITION = Position(7, 1 << 31, (1, 2, 0xFFFFFFFF), 257, (2, 0, 2))


def test_a_position_comes_back() -> None:
    assert decode(encode(POSITION), 3) == POSITION


@given(st.binary(max_size=200) | st.just(b"[" * 100_000))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(TransportError, match="no position"):
        decode(data, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1), ("step", 1 << 22), ("step", 1e400), ("owners", [1e400]),
        ("result_seq", 1 << 32), ("map_id", None), ("sum_seqs", [1, 2]), ("sum_seqs", 5),
        ("owners", []), ("owners", [3]), ("owners", ["x"]),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(name: str, value: object) -> None:
    found = json.loads(encode(POSITION)) | {name: value}
    with pytest.raises(TransportError, match="no position"):
        decode(json.dumps(found).encode(), 3)
    del found[name]
    with pytest.raises(TransportError, match="no position"):
        decode(json.dumps(found).encode(), 3)
