"""The shape of an op: codec-1, and the layout tag."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec import shape
from tailbound.codec.shape import Shape, layout_tag, shape_for
from tailbound.errors import ConfigError

WIDTHS = st.integers(1, 140).map(lambda i: 64 * i)
TAG = {"bucket": 1, "numel": 1000, "dtype": "float32", "chunk": 0, "world_size": 4, "width": 1408, "mode": 0}


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        (1, (16, 1, 16)),
        (256, (16, 1, 16)),
        (257, (16, 1, 32)),
        (16 * 1408, (16, 1, 1408)),
        (16 * 1408 + 1, (32, 1, 704 + 16)),
        (32 * 1408 + 1, (64, 1, 704 + 16)),
        (64 * 1408, (64, 1, 1408)),
        (64 * 1408 + 1, (64, 2, 704 + 16)),
        (6553600, (64, 73, 1408)),
        (262144, (64, 3, 1376)),
    ],
)
def test_known_shapes(numel: int, expected: tuple[int, int, int]) -> None:
    shape = shape_for(numel, 1408)
    assert (shape.group_rows, shape.groups, shape.codes) == expected
    assert shape.rows == shape.groups * shape.group_rows


def padding(shape: Shape) -> int:
    """Entries after the last one that are sent as zeros."""
    return shape.rows * shape.entries - shape.numel


@given(st.integers(1, 1 << 31), WIDTHS)
def test_rule_one_holds_for_any_size(numel: int, width: int) -> None:
    shape = shape_for(numel, width)
    assert shape.group_rows in (16, 32, 64)
    assert shape.codes % 16 == 0
    assert 16 <= shape.codes <= width
    assert shape.rows * shape.codes >= numel
    # one step narrower would not hold them, one group fewer neither
    assert shape.codes == 16 or shape.rows * (shape.codes - 16) < numel
    assert (shape.groups - 1) * shape.group_rows * width < numel
    assert 0 <= padding(shape) < 16 * shape.rows


@pytest.mark.parametrize("numel", [0, -1, (1 << 31) + 1])
def test_bad_numel_is_refused(numel: int) -> None:
    with pytest.raises(ConfigError, match="entries"):
        shape_for(numel, 1408)


@pytest.mark.parametrize("width", [0, -64, 63, 1400])
def test_bad_width_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 64"):
        shape_for(1000, width)


def test_layout_tag_tells_every_field_apart() -> None:
    others = [TAG | {key: "bfloat16" if key == "dtype" else int(value) + 1} for key, value in TAG.items()]
    tags = {layout_tag(**fields) for fields in [TAG, *others]}  # type: ignore[arg-type]
    assert len(tags) == 1 + len(TAG)
    assert all(0 <= tag < 1 << 16 for tag in tags)


def test_layout_tag_tells_codecs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout_tag(**TAG)  # type: ignore[arg-type]
    monkeypatch.setattr(shape, "CODEC_NUMBER", 1)
    assert layout_tag(**TAG) != before  # type: ignore[arg-type]
