"""Rows of a result that was not rotated, against means in float64 over every set of ranks they could be of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Squared error over squared length of a row that is what it should be; means over other ranks differ by 0.1 and more.
CLOSE = 0.02


def contributors(
    out: NDArray[np.float32], inputs: Sequence[NDArray[np.float32]], may: set[int], width: int
) -> list[frozenset[int] | None]:
    """Whose mean each row is: all ranks but those of ``may``, and some of these; None where there is nothing.

    Args:
        out: f32[rows * width].
        inputs: by rank, f32[rows * width]; independent of each other.
        may: ranks that may be missing.
        width: entries of a row.

    Raises:
        AssertionError: a row is no such mean: something was summed twice, or in part, or comes from nowhere.
    """
    rows = out.reshape(-1, width).astype(np.float64)
    always = frozenset(range(len(inputs))) - may
    parts = [set(some) for n in range(len(may) + 1) for some in itertools.combinations(sorted(may), n)]
    subsets = [always | part for part in parts if always | part]
    # |mean - row|^2 of every set, out of the products of a row with the inputs, and of these with each other
    data = np.stack(inputs).reshape(len(inputs), -1, width).transpose(1, 0, 2).astype(np.float64)
    products, along = data @ data.transpose(0, 2, 1), (data @ rows[:, :, None])[:, :, 0]
    weights = np.array([[(rank in subset) / len(subset) for rank in range(len(inputs))] for subset in subsets])
    lengths = np.einsum("si,kij,sj->sk", weights, products, weights)
    errors = (lengths - 2 * weights @ along.T + np.square(rows).sum(axis=1)) / lengths
    best = errors.argmin(axis=0)
    empty = ~rows.any(axis=1)
    wrong = [
        (k, float(errors[best[k], k])) for k in range(len(rows)) if not empty[k] and not errors[best[k], k] < CLOSE
    ]
    assert not wrong, f"{len(wrong)} rows are nobody's mean, the first: {wrong[0]}"
    return [None if empty[k] else frozenset(subsets[best[k]]) for k in range(len(rows))]


def same_bits(one: NDArray[np.float32], other: NDArray[np.float32], width: int) -> None:
    """Rows that are there on both of two ranks are the same, bit by bit.

    Raises:
        AssertionError: some are not.
    """
    a, b = one.reshape(-1, width), other.reshape(-1, width)
    both = a.any(axis=1) & b.any(axis=1)
    np.testing.assert_array_equal(a[both].view(np.uint32), b[both].view(np.uint32))
