"""The shape of an op (codec-1), its layout tag, and scales agreed on without a round trip (codec-5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.codec import shape
from tailbound.codec.scale import NEED_LEAST, agreed, warm_exponents
from tailbound.codec.shape import cut_tensors, group_sizes, layout_tag, shape_for
from tailbound.errors import ConfigError
from tailbound.wire.schema import EXPONENT_NONE

WIDTHS = st.integers(1, 140).map(lambda i: 64 * i)
TAG = {"bucket": 1, "whole": 9, "numel": 9, "dtype": "f", "chunk": 0, "world_size": 4, "width": 8, "mode": 0, "last": 0}


@pytest.mark.parametrize(
    ("tensors", "codes", "groups"),
    [
        # a number alone: which tensors it has is not known
        (1, 16, [16]),
        (256, 16, [16]),
        (257, 32, [16]),
        (16 * 1408, 1408, [16]),
        (16 * 1408 + 1, 704 + 16, [32]),
        (32 * 1408 + 1, 704 + 16, [64]),
        (64 * 1408 + 1, 704 + 16, [64] * 2),
        (6553600, 1408, [64] * 73),
        (262144, 1376, [64] * 3),
        # rows are shortened where all are short; groups are the largest that fit
        ((10,), 16, [1]),
        ((10, 100), 112, [1, 1]),
        ((1409,), 720, [2]),
        ((1408 * (64 * 2 + 32 + 8 + 1),), 1408, [64, 64, 32, 8, 1]),
    ],
)
def test_known_shapes(tensors: int | tuple[int, ...], codes: int, groups: list[int]) -> None:
    known = isinstance(tensors, tuple)
    shape = shape_for(sum(tensors), 1408, 8, tensors) if known else shape_for(tensors, 1408)
    assert (shape.codes, np.diff(shape.layout.rows).tolist()) == (codes, groups)
    assert (shape.groups, shape.rows) == (len(groups), sum(groups))


@given(st.integers(1, 1 << 31), WIDTHS)
def test_rule_one_holds_for_any_size(numel: int, width: int) -> None:
    shape = shape_for(numel, width)
    assert shape.group_rows in (16, 32, 64)
    assert shape.codes % 16 == 0
    assert 16 <= shape.codes <= width
    # one step narrower would not hold them, one group fewer neither
    assert numel <= shape.rows * shape.codes < numel + 16 * shape.rows
    assert (shape.groups - 1) * shape.group_rows * width < numel


SIZES = st.lists(st.integers(1, 200_000) | st.integers(1, 2000), min_size=1, max_size=80).map(tuple)


@given(SIZES, WIDTHS)
def test_tensors_begin_rows_and_fill_groups_of_powers_of_two(tensors: tuple[int, ...], width: int) -> None:
    shape = shape_for(sum(tensors), width, 8, tensors)
    rows, entries = np.diff(shape.layout.rows), np.diff(shape.layout.entries)
    assert set(rows.tolist()) <= {1, 2, 4, 8, 16, 32, 64}
    assert np.array_equal(shape.layout.of, np.repeat(np.arange(shape.groups), rows))
    assert (entries > (rows - 1) * shape.entries).all(), "less than a row is padding"
    assert (entries <= rows * shape.entries).all()
    assert sum(shape.runs) == shape.numel
    assert set(np.cumsum(shape.runs)) <= set(np.cumsum(tensors)) & set(shape.layout.entries.tolist())
    assert shape.rows == sum(-(-run // shape.entries) for run in shape.runs)
    assert shape.results.layout.entries.tolist() == shape.layout.entries.tolist()


def test_a_small_tensor_has_a_row_of_its_own_unless_that_costs_too_many() -> None:
    few, many = (64 * 1408, *[100] * 60), (64 * 1408, *[100] * 80)
    assert shape_for(sum(few), 1408, 8, few).runs == few
    packed = shape_for(sum(many), 1408, 8, many)
    assert packed.runs == (64 * 1408, *[1400] * 5, 1000)
    assert packed.rows == 70


@given(SIZES, st.integers(1, 300), st.integers(1, 20))
def test_ops_of_a_bucket_have_no_more_rows_and_groups_than_they_may(
    tensors: tuple[int, ...], rows: int, groups: int
) -> None:
    ops = list(cut_tensors(tensors, 1408, rows, groups))
    assert sum(map(sum, ops)) == sum(tensors)
    ends = {int(end) for end in np.cumsum([part for op in ops for part in op])}
    assert set(np.cumsum(tensors).tolist()) <= ends
    for op in ops:
        counts = [-(-part // 1408) for part in op]
        assert sum(counts) <= rows
        assert sum(len(group_sizes(count)) for count in counts) <= groups


@pytest.mark.parametrize(
    ("numel", "width", "named"),
    [
        *((numel, 1408, "entries") for numel in (0, -1, (1 << 31) + 1)),
        *((1000, width, "multiple of 64") for width in (0, -64, 63, 1400)),
    ],
)
def test_a_shape_that_cannot_be_is_refused(numel: int, width: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_for(numel, width)


def test_layout_tag_tells_every_field_and_codecs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [TAG | {"runs": (999, 1)}] + [
        TAG | {key: "bfloat16" if key == "dtype" else int(value) + 1} for key, value in TAG.items()
    ]
    tags = [layout_tag(**fields) for fields in [TAG, *others]]  # type: ignore[arg-type]
    monkeypatch.setattr(shape, "CODEC_NUMBER", 1)
    tags.append(layout_tag(**TAG))  # type: ignore[arg-type]
    assert len(set(tags)) == 3 + len(TAG)


def test_scales_for_a_switch_are_the_largest_need_and_headroom() -> None:
    """A group of zeros has one, too: without any no rank would ever contribute to it. Rule: codec-5."""
    needs = [np.array([3, -40, EXPONENT_NONE, 7], np.int16), np.array([5, EXPONENT_NONE, EXPONENT_NONE, -7], np.int16)]
    np.testing.assert_array_equal(agreed(np.stack(needs)), [5 + 4, -40 + 4, NEED_LEAST + 4, 7 + 4])
    assert agreed(np.array([[480]], np.int16)).dtype == np.int16


def test_warm_is_the_largest_of_the_rows_that_came() -> None:
    none = EXPONENT_NONE
    rows = np.array([4, none, 6, none, none, none, none, none, -9, none, none, -11], np.int16)
    np.testing.assert_array_equal(warm_exponents(rows, np.arange(0, 13, 4)), [6, none, -9])
