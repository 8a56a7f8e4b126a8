"""The mean by transpose, parameter server and ring, with the same codes and the same share of packets lost.

All three have rows of 8-bit codes, count who is in a sum, and divide by that; what does not arrive counts as zero, and
the rest of its group is scaled up, where groups are rotated. Transpose and parameter server are our codec as it is,
with all ranks for owners and with one. The ring codes the partial sum of every hop anew, as it must to keep the bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import reference
from tailbound.codec.hashing import seed_of
from tailbound.codec.local import LocalJob
from tailbound.codec.shape import Shape
from tailbound_lab.bench.losses import Pattern, lost

TOPOLOGIES = ("transpose", "parameter server", "ring")
_COOKIE, _WIDTH, _SPAN = 1, 1408, 127
Rows = NDArray[np.float32]


def dithered(rows: Rows, rng: np.random.Generator) -> Rows:
    """Rows f32[..., V] as codes of 8 bits by the largest value of each row say them, offsets of rounding taken off.

    The error is uniform, of the variance step^2 / 12 with a step of (largest value) / 127, whatever the values are.
    """
    most = np.abs(rows).max(axis=-1, keepdims=True)
    step = np.where(most > 0, most, 1) / np.float32(_SPAN)
    offset = rng.random(rows.shape, np.float32)
    coded = (np.floor(rows / step + offset) - offset + np.float32(0.5)) * step
    return np.where(most > 0, coded, 0).astype(np.float32)


def ring(
    rows: Rows, reduce_lost: NDArray[np.bool_], gather_lost: NDArray[np.bool_], rng: np.random.Generator
) -> tuple[Rows, NDArray[np.bool_]]:
    """The mean of ``rows`` by a ring all-reduce.

    Row k starts at rank k mod N and goes round: N - 1 hops add the next rank's, N - 1 more pass the mean on. A packet
    lost on the way takes with it what all ranks before have added; of the mean, it takes it from all ranks that follow.

    Args:
        rows: f32[N, T, V], of each rank.
        reduce_lost, gather_lost: bool[N - 1, T], by hop.

    Returns:
        f32[N, T, V], what each rank has, and bool[N, T], whether it has the row.
    """
    ranks, count = rows.shape[:2]
    at = np.arange(count)
    sums, members = rows[at % ranks, at], np.ones(count, np.int64)
    for hop in range(1, ranks):
        here = ~reduce_lost[hop - 1]
        sums = dithered(sums, rng) * here[:, None] + rows[(at + hop) % ranks, at]
        members = members * here + 1
    mean = dithered(sums / members[:, None].astype(np.float32), rng)
    out, present = np.zeros_like(rows), np.zeros((ranks, count), bool)
    alive = np.ones(count, bool)
    for hop in range(ranks):
        if hop:
            alive &= ~gather_lost[hop - 1]
        receiver = (at + ranks - 1 + hop) % ranks
        out[receiver, at] = mean * alive[:, None]
        present[receiver, at] = alive
    return out, present


def outputs(
    topology: str, gradients: Sequence[NDArray[np.float32]], pattern: Pattern, rate: float, *, rotate: bool, seed: int
) -> list[NDArray[np.float32]]:
    """What each rank has after one all-reduce over links that lose ``rate`` of their packets.

    Args:
        topology: one of ``TOPOLOGIES``; the parameter server is rank 0.
        gradients: f32[numel] by rank.
        pattern, rate: of the losses, which ``seed`` draws.
        rotate: whether groups of rows are rotated.
    """
    ranks, rng = len(gradients), np.random.default_rng(seed)
    job = LocalJob(
        ranks, gradients[0].size, _WIDTH, rotate=rotate, owners=[0] if topology == "parameter server" else None
    )
    shape = job.shape

    def mask(links: int, happens: bool) -> NDArray[np.bool_]:
        rows = np.zeros((links, shape.rows), bool)
        rows[:, job.placement.row_at] = lost(rng, links, shape.rows, rate if happens else 0.0, pattern.burst)
        return rows

    if topology != "ring":
        first, second = mask(ranks, pattern.first), mask(ranks, pattern.second)
        step = job.step(seed, gradients, lost_contributions=first, lost_results=second)
        return [step.outputs[rank] for rank in range(ranks)]
    signs = seed_of(_COOKIE, seed)
    first, second = mask(ranks - 1, pattern.first), mask(ranks - 1, pattern.second)
    got, present = ring(np.stack([_rotated(x, shape, signs, rotate) for x in gradients]), first, second, rng)
    return [reference.restored(got[rank], present[rank], shape, signs, rotate) for rank in range(ranks)]


def _rotated(x: NDArray[np.float32], shape: Shape, signs: int, rotate: bool) -> Rows:
    """f32[T, V], normalised."""
    root = math.sqrt(shape.group_rows) if rotate else 1.0
    rows: Rows = reference.rotated(x, shape, signs, rotate).reshape(shape.rows, shape.entries) / np.float32(root)
    return rows
