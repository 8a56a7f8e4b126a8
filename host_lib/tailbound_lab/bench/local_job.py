"""All ranks of a job in one process, without packets: for the error table, the tests and the benchmark's report.

Sums are made in the lane layout of the kernel; everything else is the codec that the transport uses. Losses are given
as masks, so a case can be stated exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.decode import MISSING, decode, own_source
from tailbound.codec.encode import encode
from tailbound.codec.format import HALVES
from tailbound.codec.hashing import fmix, seed_of
from tailbound.codec.mean import Means, mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Packets, Received, Results, Ring, Scales, Sums, results
from tailbound.codec.scale import DOWN_HALVES, DOWN_MOST, Sum, begin, join, weights_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
from tailbound.wire.bits import Bits
from tailbound.wire.jit import compiled
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import HEADER_BYTES


@dataclass
class Step:
    """What an op gave.

    ``outputs`` f32[numel] by receiving rank; ``failed`` groups by receiving rank; ``means`` by owner; ``finite`` by
    rank; ``clipped`` entries over all ranks.
    """

    outputs: dict[int, NDArray[np.float32]]
    failed: dict[int, int]
    means: list[Means]
    finite: list[bool]
    clipped: int


_RANK = np.uint32(0x7FEB352D)


@compiled
def add_row(slot, lanes, codes, sender, exponent, weight, weights, down_most):  # type: ignore[no-untyped-def]
    """Adds a contribution to a slot (``tb_slot``) and its sums u16[lanes] as the kernel does; codes in lane order."""
    if slot.count == 0:
        total, added = begin(exponent, weight, weights)
        lanes[:] = 0
    else:
        total = Sum(np.int64(slot.exponent), np.int64(slot.units))
        bits = fmix(np.uint32(slot.row + np.uint32(sender) * _RANK))
        total, added = join(total, exponent, weight, weights, down_most, bits)
    for i in range(codes.shape[0]):
        moved = np.int64(lanes[i]) >> added.move
        lanes[i] = moved + (np.int64(codes[i]) * added.weight + added.add >> added.down)
    slot.exponent, slot.units = total.exponent, total.units
    slot.ranks[sender >> 6] |= np.uint64(1) << np.uint64(sender & 63)
    slot.count += 1


@compiled
def add_rows(slots, lanes, codes, taken, sender, exponents, by, weights, down_most):  # type: ignore[no-untyped-def]
    """``add_row`` of those rows that are ``taken``, bool[T]; all by packet position."""
    for i in range(codes.shape[0]):
        if taken[i]:
            add_row(slots[i], lanes[i], codes[i], sender, exponents[i], by[i], weights, down_most)


class LocalJob:
    """``world_size`` ranks that average buckets of ``numel`` entries, those of ``tensors``."""

    def __init__(
        self, world_size: int, numel: int, width: int = 1408, *, rotate: bool = True, cookie: int = 1,
        owners: Sequence[int] | None = None, bits: Bits = 8, tensors: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.world_size = world_size
        self.shape = shape_for(numel, width, bits, tensors)
        self.placement = place(self.shape, OwnerMap(1, tuple(owners or range(world_size))), world_size)
        self.rotate = rotate
        self.cookie = cookie
        self.weights = weights_of(world_size)
        self.scratch = Scratch(width)
        shape, ranks = self.shape, world_size
        self.row_groups = shape.layout.of[self.placement.row_at]
        self.packets = np.zeros((ranks, shape.rows, HEADER_BYTES + shape.codes), np.uint8)
        self.partials = np.zeros((shape.rows, 4), np.uint64)  # of the rank that was coded last
        self.scales = [
            Scales(np.zeros(shape.groups, np.int16), np.zeros(0, np.int16), np.zeros(shape.groups, np.uint8))
            for _ in range(ranks)
        ]

    def coding(self, op: int) -> Coding:
        """How ``op`` is coded."""
        return Coding(seed_of(self.cookie, op), self.weights, self.rotate)

    def packets_of(self, rank: int) -> Packets:
        """Memory of a rank's contributions."""
        return Packets(self.packets[rank], self.placement.position, self.partials)

    def step(
        self,
        op: int,
        gradients: Sequence[NDArray[np.float32]],
        *,
        lost_contributions: NDArray[np.bool_] | None = None,
        lost_results: NDArray[np.bool_] | None = None,
        receivers: Sequence[int] | None = None,
    ) -> Step:
        """One op.

        Args:
            op: op label.
            gradients: f32[numel] by rank.
            lost_contributions: bool[sender, T], row order; the own row is never lost.
            lost_results: bool[receiver, T], row order; own rows are never lost.
            receivers: ranks that decode (default: all).
        """
        shape, ranks = self.shape, self.world_size
        finite, clipped = [], 0
        for rank, x in enumerate(gradients):
            packets, scales = self.packets_of(rank), self.scales[rank]
            done = encode(x, shape, self.coding(op), packets, scales, self.scratch)
            finite.append(done.finite)
            clipped += done.clipped if done.finite else 0
        lost = np.zeros((ranks, shape.rows), bool) if lost_contributions is None else lost_contributions.copy()
        lost[[not f for f in finite]] = True
        sums, slots = self._sum(op, lost)
        out, means = results(shape.rows, shape.results.codes), []
        for owner in range(ranks):
            start, rows = int(self.placement.starts[owner]), int(self.placement.counts[owner])
            if rows:
                part = slice(start, start + rows)
                sealed = Sums(Ring(sums, slots), start, self.cookie, op)
                own = Own(self.placement.rows_of(owner), self.packets[owner][part], finite[owner], self.scales[owner])
                made = Results._make(each[part] for each in out)
                means.append(mean_rows(sealed, own, shape, self.coding(op), made, self.scratch))
        outputs, failed = self._receive(op, out, lost_results, receivers)
        return Step(outputs, failed, means, finite, clipped)

    def _sum(self, op: int, lost: NDArray[np.bool_]) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Sums and records of all owners, by packet position, as their kernels would make them."""
        shape, at = self.shape, self.placement
        ring, halves = 1 << (shape.rows - 1).bit_length(), shape.code.packing == HALVES
        sums, slots = np.zeros((ring, 2 * shape.width), np.uint8), np.zeros(ring, DTYPES["tb_slot"])
        rows = slots[: shape.rows]
        lanes = sums.view(np.uint16)[: shape.rows, : shape.codes * shape.code.lanes_a_byte]
        rows["cookie"], rows["op"] = self.cookie, op
        rows["row"] = np.random.default_rng((self.cookie, op)).integers(1 << 32, size=shape.rows)  # what rounds them
        owner = at.owner[at.row_at]
        for sender, scales in enumerate(self.scales):
            taken = ~lost[sender][at.row_at] & (owner != sender)
            codes = self.packets[sender][:, HEADER_BYTES:]
            if halves:
                both = np.stack((codes & 15, codes >> 4), axis=1).reshape(shape.rows, 2, -1, 8)
                codes = both.swapaxes(1, 2).reshape(shape.rows, -1)
            e, by = scales.exponents[self.row_groups], scales.weights[self.row_groups]
            down = DOWN_HALVES if halves else DOWN_MOST
            add_rows(rows, lanes, _to_lanes(codes), taken, sender, e, by, self.weights, down)
        return sums, slots

    def _receive(
        self, op: int, out: Results, lost_results: NDArray[np.bool_] | None, receivers: Sequence[int] | None
    ) -> tuple[dict[int, NDArray[np.float32]], dict[int, int]]:
        shape, place_of = self.shape, self.placement
        outputs: dict[int, NDArray[np.float32]] = {}
        failed: dict[int, int] = {}
        ring = np.zeros((shape.rows, shape.width), np.uint8)
        ring[:, : shape.results.codes] = out.packets[:, HEADER_BYTES:]
        for rank in range(self.world_size):
            here = out.usable.astype(bool)
            if lost_results is not None:
                here &= ~lost_results[rank][place_of.row_at] | (place_of.owner[place_of.row_at] == rank)
            if receivers is not None and rank not in receivers:
                continue
            start, rows = int(place_of.starts[rank]), int(place_of.counts[rank])
            by_position = np.where(here, np.arange(shape.rows), MISSING)
            own = np.arange(rows)
            by_position[start : start + rows] = np.where(here[start : start + rows], own_source(own), MISSING)  # type: ignore[arg-type]
            outputs[rank] = np.empty(shape.numel, np.float32)
            received = Received(
                ring, out.packets[start : start + rows], by_position[place_of.position], out.scale[place_of.position]
            )
            failed[rank] = decode(received, shape, self.coding(op), outputs[rank], self.scratch)
        return outputs, failed


def nmse(value: NDArray[np.float32], gradients: Sequence[NDArray[np.float32]]) -> float:
    """Squared error of ``value`` against the float64 mean of ``gradients``, over the mean's squared norm."""
    exact = np.mean([g.astype(np.float64) for g in gradients], axis=0)
    return float(((value - exact) ** 2).sum() / (exact**2).sum())


def _to_lanes(codes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Codes [..., V] in the lane order of the sums ring: u16[..., V]."""
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 4, 2)
    return np.swapaxes(eights, -1, -2).astype(np.uint16).reshape(codes.shape)
