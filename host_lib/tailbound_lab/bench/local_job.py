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
from tailbound.codec.encode import encode, measure
from tailbound.codec.format import HALVES
from tailbound.codec.hashing import seed_of
from tailbound.codec.mean import Means, mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Packets, Received, Results, Scales, Sums, results
from tailbound.codec.scale import cold_exponents, headroom_of, shift_cap_of, warm_exponents
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
from tailbound.wire.bits import Bits
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES


@dataclass
class Step:
    """What an op gave.

    ``outputs`` f32[numel] by receiving rank; ``failed`` groups by receiving rank; ``means`` by owner; ``finite`` by
    rank; ``clipped`` entries and ``shifted`` groups over all ranks; ``refused`` contributions whose scale
    was not the owner's.
    """

    outputs: dict[int, NDArray[np.float32]]
    failed: dict[int, int]
    means: list[Means]
    finite: list[bool]
    clipped: int
    shifted: int
    refused: int


class LocalJob:
    """``world_size`` ranks that average buckets of ``numel`` entries, those of ``tensors``. Scales are carried on.

    ``exponents`` i16[world_size, G] is what each rank uses next, None before the first op.
    """

    def __init__(
        self, world_size: int, numel: int, width: int = 1408, *, rotate: bool = True, cookie: int = 1,
        owners: Sequence[int] | None = None, bits: Bits = 8, tensors: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.world_size = world_size
        self.shape = shape_for(numel, width, bits, tensors)
        self.placement = place(self.shape, OwnerMap(1, tuple(owners or range(world_size))), world_size)
        self.rotate = rotate
        self.cookie = cookie
        self.headroom = headroom_of(world_size, self.shape.bits)
        self.scratch = Scratch(width)
        self.exponents: NDArray[np.int16] | None = None
        shape, ranks = self.shape, world_size
        self.row_groups = shape.layout.of[self.placement.row_at]
        self.packets = np.zeros((ranks, shape.rows, HEADER_BYTES + shape.codes), np.uint8)
        self.partials = np.zeros((shape.rows, 4), np.uint64)  # of the rank that was coded last
        self.need = np.zeros((ranks, shape.groups), np.int16)
        self.shift = np.zeros((ranks, shape.groups), np.uint8)

    def coding(self, op: int, rank: int) -> Coding:
        """How ``rank`` codes ``op``."""
        seed, cap = seed_of(self.cookie, op), shift_cap_of(self.world_size)
        return Coding(seed, rank, cap, self.headroom, self.rotate, self.world_size)

    def packets_of(self, rank: int) -> Packets:
        """Memory of a rank's contributions."""
        return Packets(self.packets[rank], self.placement.position, self.partials)

    def scales_of(self, rank: int) -> Scales:
        """What a rank's codes mean."""
        assert self.exponents is not None
        return Scales(self.exponents[rank], self.need[rank], self.shift[rank])

    def cold(self, gradients: Sequence[NDArray[np.float32]], op: int) -> None:
        """The agreement on scales before a first op, nothing lost."""
        needs = np.zeros((self.world_size, self.shape.groups), np.int16)
        heard = [
            measure(x, self.shape, self.coding(op, rank), needs[rank], self.scratch) for rank, x in enumerate(gradients)
        ]
        exponents = cold_exponents(needs[np.array(heard)], self.headroom)
        self.exponents = np.tile(exponents, (self.world_size, 1))

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
            receivers: ranks that decode (default: all); all learn the next scales.
        """
        if self.exponents is None:
            self.cold(gradients, op)
        assert self.exponents is not None
        shape, ranks = self.shape, self.world_size
        finite, clipped = [], 0
        for rank, x in enumerate(gradients):
            packets, scales = self.packets_of(rank), self.scales_of(rank)
            done = encode(x, shape, self.coding(op, rank), packets, scales, self.scratch)
            finite.append(done.finite)
            clipped += done.clipped if done.finite else 0
        lost = np.zeros((ranks, shape.rows), bool) if lost_contributions is None else lost_contributions.copy()
        lost[[not f for f in finite]] = True
        sums, slots, refused = self._sum(op, lost)
        out, means = results(shape.rows, shape.results.codes), []
        for owner in range(ranks):
            start, rows = int(self.placement.starts[owner]), int(self.placement.counts[owner])
            if rows:
                part = slice(start, start + rows)
                sealed = Sums(sums, slots, start, self.cookie, op, self.exponents[owner])
                own = Own(
                    self.placement.rows_of(owner), self.packets[owner][part], finite[owner], self.scales_of(owner),
                    np.zeros(shape.groups, np.int16),
                )  # fmt: skip
                made = Results._make(each[part] for each in out)
                means.append(mean_rows(sealed, own, shape, self.coding(op, owner), made, self.scratch))
        outputs, failed = self._receive(op, out, lost_results, receivers)
        ready = np.array(finite)
        shifted = int(np.count_nonzero(self.shift[ready]))
        return Step(outputs, failed, means, finite, clipped, shifted, refused)

    def _sum(self, op: int, lost: NDArray[np.bool_]) -> tuple[NDArray[np.uint8], NDArray[Any], int]:
        """Sums and records of all owners, by packet position, as their kernels would make them; and the refused."""
        assert self.exponents is not None
        shape, at = self.shape, self.placement
        ring = 1 << (shape.rows - 1).bit_length()
        sums, slots = np.zeros((ring, 2 * shape.width), np.uint8), np.zeros(ring, DTYPES["tb_slot"])
        rows, refused = slots[: shape.rows], 0
        lanes = sums.view(np.uint16)[: shape.rows, : shape.codes * shape.code.lanes_a_byte]
        rows["need"], rows["cookie"], rows["op"] = EXPONENT_NONE, self.cookie, op
        owner = at.owner[at.row_at]
        expected = self.exponents[owner, self.row_groups]
        rows["exponent"] = expected
        for sender in range(self.world_size):
            e = self.exponents[sender][self.row_groups]
            sent = ~lost[sender][at.row_at] & (owner != sender)
            taken = sent & (e == expected)
            refused += int(np.count_nonzero(sent & ~taken))
            k = np.where(taken, self.shift[sender][self.row_groups], 0)
            sent_codes = self.packets[sender][:, HEADER_BYTES:] * taken[:, None]
            if shape.code.packing == HALVES:
                halves = np.stack((sent_codes & 15, sent_codes >> 4), axis=1).reshape(shape.rows, 2, -1, 8)
                lanes += _to_lanes(halves.swapaxes(1, 2).reshape(shape.rows, -1))
            else:
                lanes += _to_lanes(sent_codes) << k[:, None]
            rows["count"] += taken
            rows["ranks"][:, sender >> 6] |= np.where(taken, np.uint64(1 << (sender & 63)), np.uint64(0))
            rows["units"] += np.where(taken, 1 << k, 0).astype(np.uint32)
            rows["need"] = np.where(taken, np.maximum(rows["need"], self.need[sender][self.row_groups]), rows["need"])
        return sums, slots, refused

    def _receive(
        self, op: int, out: Results, lost_results: NDArray[np.bool_] | None, receivers: Sequence[int] | None
    ) -> tuple[dict[int, NDArray[np.float32]], dict[int, int]]:
        assert self.exponents is not None
        shape, place_of = self.shape, self.placement
        outputs: dict[int, NDArray[np.float32]] = {}
        failed: dict[int, int] = {}
        ring = np.zeros((shape.rows, shape.width), np.uint8)
        ring[:, : shape.results.codes] = out.packets[:, HEADER_BYTES:]
        for rank in range(self.world_size):
            here = out.usable.astype(bool)
            if lost_results is not None:
                here &= ~lost_results[rank][place_of.row_at] | (place_of.owner[place_of.row_at] == rank)
            row_exponents = np.full(shape.rows, EXPONENT_NONE, np.int16)
            row_exponents[place_of.row_at[here]] = out.exponent_next[here]
            fresh = warm_exponents(row_exponents, shape.layout.rows)
            self.exponents[rank] = np.where(fresh == EXPONENT_NONE, self.exponents[rank], fresh)
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
            failed[rank] = decode(received, shape, self.coding(op, rank), outputs[rank], self.scratch)
        return outputs, failed


def nmse(value: NDArray[np.float32], gradients: Sequence[NDArray[np.float32]]) -> float:
    """Squared error of ``value`` against the float64 mean of ``gradients``, over the mean's squared norm."""
    exact = np.mean([g.astype(np.float64) for g in gradients], axis=0)
    return float(((value - exact) ** 2).sum() / (exact**2).sum())


def _to_lanes(codes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Codes [..., V] in the lane order of the sums ring: u16[..., V]."""
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 4, 2)
    return np.swapaxes(eights, -1, -2).astype(np.uint16).reshape(codes.shape)
