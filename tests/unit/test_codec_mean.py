"""The owner's pass against the plain numpy reference, bit by bit (codec-10, codec-12)."""

from __future__ import annotations

import numpy as np
import pytest

import reference
from tailbound.codec.mean import Means, mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Ring, Scales, Sums, results
from tailbound.codec.scale import Weights, weights_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
from tailbound.transport.control import Header, Stamp, parse
from tailbound.wire.bits import Bits
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import VERSION

SCRATCH, SEED = Scratch(1408), 12345


class Owner:
    """Sums ring and outputs of one owner, whose rows are those of rank 0 in a job of ``ranks``.

    The last of its rows is zero. ``apart``: doublings by which scales differ at most.
    """

    def __init__(
        self, numel: int = 100000, ring: int = 64, ranks: int = 4, bits: Bits = 8, apart: int = 2,
        tensors: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.shape = shape_for(numel, 1408, bits, tensors)
        self.placement = place(self.shape, OwnerMap(1, tuple(range(ranks))), ranks)
        self.rows, codes = int(self.placement.counts[0]), self.shape.codes
        self.k = self.placement.rows_of(0)
        self.groups = self.shape.layout.of[self.k]
        self.there = np.diff(self.shape.layout.entries)[self.groups]  # entries of each row's group
        self.ring, self.seq0, self.rotate = ring, 0xFFFFFFF0, True
        self.slots = np.zeros(self.ring, DTYPES["tb_slot"])
        self.at = (self.seq0 + np.arange(self.rows)) % self.ring
        rng, up = np.random.default_rng(0), self.shape.bits
        self.sums = rng.integers(0, 255, (self.ring, 2816), dtype=np.uint8)
        self.codes = rng.integers(up == 8, 256, (ranks, self.rows, codes), dtype=np.uint8)  # the own ones first
        zero = reference.pack(np.full(codes * 8 // up, reference.zero_of(up)), up)
        self.codes[:, -1] = zero
        for row in np.flatnonzero(self.there < self.shape.entries):  # columns without entries
            self.codes[:, row, self.there[row] :] = zero[self.there[row] :]
        self.own = np.concatenate((np.zeros((self.rows, 64), np.uint8), self.codes[0]), axis=1)
        self.weights = weights_of(ranks)
        self.exponents = (4 * rng.integers(-apart, apart + 1, (ranks, self.shape.groups))).astype(np.int16)
        self.by = rng.integers(self.weights.cap // 2 + 1, self.weights.cap + 1, self.exponents.shape).astype(np.uint8)
        self.slots["cookie"], self.slots["op"] = 9, 3
        self.made = results(self.rows, self.shape.results.codes)
        self.out, self.partials, self.scale, self.count, self.usable = self.made
        self.out[:] = 7
        for row in range(self.rows):
            self.hold(row, self.total(row, own=False))
        self.slots["ranks"][:, 0] = (1 << ranks) - 2

    def hold(self, row: int, total: reference.Sum | None) -> None:
        """Puts a sum into the slot of ``row``."""
        if total is not None:
            self.sums[self.at[row], : total.octets.size] = total.octets
            slot = self.slots[self.at[row]]
            slot["exponent"], slot["units"], slot["count"] = total[1:]

    def total(self, row: int, own: bool) -> reference.Sum | None:
        """What a slot holds of a row once all have given theirs, the owner last."""
        total, g = None, self.groups[row]
        for rank in [*range(1, len(self.codes)), *[0] * own]:
            e, weight = int(self.exponents[rank, g]), int(self.by[rank, g])
            payload = self.codes[rank, row]
            bits = reference.own_bits(int(self.k[row]), SEED) if rank == 0 else 977 * rank + row
            total = reference.added(total, payload, e, weight, self.weights, self.shape.bits, bits)
        return total

    def mean(self, own: bool = True) -> Means:
        sums = Sums(Ring(self.sums, self.slots), self.seq0, 9, 3)
        mine = Own(self.k, self.own, own, Scales(self.exponents[0], self.exponents[0], self.by[0]))
        return mean_rows(sums, mine, self.shape, Coding(SEED, self.weights, self.rotate), self.made, SCRATCH)

    def check(self, row: int, total: reference.Sum | None) -> None:
        assert total is not None
        there = int(self.there[row])
        expected = reference.mean(total, int(self.k[row]), SEED, self.shape.bits, self.rotate, there)
        assert np.array_equal(self.out[row, 64:], expected.payload)
        assert self.scale[row] == expected.scale
        assert self.count[row] == total.count
        packet = np.concatenate((np.zeros(64, np.uint8), expected.payload))[None]
        stamp = Stamp(packet, self.partials[row : row + 1], np.zeros(1, np.uint32))
        stamp.write(Header(version=VERSION), [(0, 1, 0, 0, 0, 1)], 0)
        assert parse(packet.tobytes())


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
@pytest.mark.parametrize(
    ("numel", "ranks", "apart"), [(300, 4, 2), (100000, 4, 2), (100000, 2, 20), (300000, 17, 3), (60000, 33, 5)]
)
@pytest.mark.parametrize("own", [True, False])
def test_mean_equals_the_reference(numel: int, ranks: int, apart: int, own: bool, bits: Bits) -> None:
    """With scales that fit the spare room, and with such that cost bits. Rules: codec-9, codec-12."""
    owner = Owner(numel, ring=256, ranks=ranks, bits=bits, apart=apart)
    assert owner.mean(own) == Means(owner.rows, owner.rows, 0, 0, owner.rows * (ranks - 1 + own))
    for row in range(owner.rows):
        owner.check(row, owner.total(row, own))
    assert owner.usable.all()
    assert (owner.out[:, :64] == 7).all()
    assert owner.scale[-1] == 0 or (bits != 8 and apart > 2)  # zero, but for what a lower plane or half has lost


def test_full_lanes_of_257_ranks() -> None:
    owner = Owner()
    owner.weights, owner.by[0], owner.exponents[0] = Weights(1, 0), 1, 0
    for row in range(owner.rows):
        lanes = np.full(owner.shape.codes, 256 * 255)
        owner.hold(row, reference.Sum(lanes, 0, 256 * 128, 256))
    owner.codes[0] = owner.own[:, 64:] = 255
    for owner.rotate in (True, False):
        owner.mean()
        assert (owner.out[:, 64:] >= 253).all()
        owner.check(3, reference.Sum(np.full(owner.shape.codes, 257 * 255), 0, 257 * 128, 257))


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("tensors", [(), (1408 * 20, 64, 700, 1407, 1, 1408 * 40)])
def test_offsets_are_taken_off_where_few_sums_are_zero(rotate: bool, tensors: tuple[int, ...]) -> None:
    """Zeros of columns without entries do not count. Rule: codec-10."""
    owner = Owner(sum(tensors) or 100000, tensors=tensors, apart=0)
    owner.rotate, rng = rotate, np.random.default_rng(3)
    owner.by[:] = 4
    for row in range(owner.rows):
        there = int(owner.there[row])
        if row % 4 == 3:  # more than half of even columns, of odd ones, or of both, are zero
            quiet = rng.random(owner.shape.codes) < 0.6
            quiet[row // 4 % 3 :: 2] &= row // 4 % 3 == 2
            owner.codes[:, row, quiet] = 128
        if row % 4 == 1:  # in a job that agrees, hardly anything but the offsets is left
            owner.codes[1:, row] = 128
            owner.codes[0, row, :there] = rng.integers(127, 130, owner.shape.codes)[:there]
        owner.own[row, 64:] = owner.codes[0, row]
        owner.hold(row, owner.total(row, own=False))
    owner.mean()
    for row in range(owner.rows):
        owner.check(row, owner.total(row, own=True))
    assert (owner.scale < 0).any() == rotate
    assert (owner.scale > 0).any()
    assert (owner.there == 64).any() == bool(tensors)


@pytest.mark.parametrize(("field", "value"), [("op", 2), ("cookie", 8), ("count", 0)])
def test_rows_of_another_tag_are_not_used(field: str, value: int) -> None:
    owner = Owner()
    owner.slots[field][owner.at[5]] = value
    made = owner.mean(own=False)
    assert (made.own_only, made.missing, made.rows) == (0, 1, owner.rows - 1)
    assert not owner.usable[5]
    assert owner.count[5] == 0
    made = owner.mean()
    assert (made.own_only, made.missing) == (1, 0)
    owner.codes = owner.codes[:1]
    owner.check(5, owner.total(5, own=True))
