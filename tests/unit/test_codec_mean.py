"""The owner's pass against the plain numpy reference, bit by bit (codec-10, codec-12)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import reference
from reference_proof import check_packet
from tailbound.codec import mean
from tailbound.codec.mean import Means, mean_by, mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Scales, Sums, results
from tailbound.codec.scale import scale_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
from tailbound.codec.threads import Threads
from tailbound.wire.bits import Bits
from tailbound.wire.check import final
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import EXPONENT_NONE

SCRATCH = Scratch(1408)


class Owner:
    """Sums ring and outputs of one owner, whose rows are those of rank 0 in a job of ``ranks``.

    The last of its rows is zero.
    """

    def __init__(self, numel: int = 100000, ring: int = 64, ranks: int = 4, bits: Bits = 8) -> None:
        self.shape = shape_for(numel, 1408, bits)
        self.placement = place(self.shape, OwnerMap(1, tuple(range(ranks))), ranks)
        self.rows, codes = int(self.placement.counts[0]), self.shape.codes
        self.groups, self.k = self.placement.groups_of(0), self.placement.rows_of(0)
        self.ring, self.seq0 = ring, 0xFFFFFFF0
        self.slots = np.zeros(self.ring, DTYPES["tb_slot"])
        self.at = (self.seq0 + np.arange(self.rows)) % self.ring
        rng, bits = np.random.default_rng(0), self.shape.bits
        self.sums = rng.integers(0, 255, (self.ring, 2816), dtype=np.uint8)
        self.codes = rng.integers(bits == 8, 256, (ranks, self.rows, codes), dtype=np.uint8)  # the own ones first
        self.codes[:, -1] = reference.pack(np.full(codes * 8 // bits, reference.zero_of(bits)), bits)
        self.own = np.concatenate((np.zeros((self.rows, 64), np.uint8), self.codes[0]), axis=1)
        self.exponents = np.arange(self.shape.groups).astype(np.int16) - 5
        self.need = np.full(self.shape.groups, -9, np.int16)
        self.shift = np.zeros(self.shape.groups, np.uint8)
        self.shifts = np.array([0, 0, 2, *[0] * ranks][:ranks], np.uint8) * (bits > 4)  # of ranks; 4 bits have none
        self.slots["cookie"], self.slots["op"], self.slots["need"] = 9, 3, EXPONENT_NONE
        self.made = results(self.rows, self.shape.results.codes)
        self.out, self.partials, self.scale, self.count, self.e_next, self.usable = self.made
        self.out[:] = 7
        for row, at in enumerate(self.at):
            self.sums[at, : (4 if bits == 4 else 2) * codes] = self.summed(row, own=False)
        self.slots["count"][self.at], self.slots["units"][self.at] = ranks - 1, self.units(own=False)
        self.slots["exponent"][self.at] = self.exponents[self.groups]
        self.slots["ranks"][:, 0] = (1 << ranks) - 2
        self.ranks, self.rotate = ranks, True

    def summed(self, row: int, own: bool) -> NDArray[np.uint8]:
        """What a slot holds of a row once all have given theirs."""
        return reference.sums_of(self.codes[not own :, row], self.shifts[not own :], self.shape.bits)

    def units(self, own: bool) -> int:
        return int((1 << self.shifts[not own :].astype(int)).sum())

    def mean(
        self,
        own: bool = True,
        expected: NDArray[np.int16] | None = None,
        threads: Threads | None = None,
        **options: Any,
    ) -> Means:
        sums = Sums(self.sums, self.slots, self.seq0, 9, 3, self.exponents if expected is None else expected)
        scales, groups = Scales(self.exponents, self.need, self.shift), self.shape.groups
        mine = Own(self.k, self.own, own, scales, np.zeros(groups, np.int16))
        coding = Coding(12345, 0, 0, 2, self.rotate, self.ranks)
        if threads is not None:
            return mean_by(threads, sums, mine, self.shape, coding, self.made)
        return mean_rows(sums, mine, self.shape, coding, self.made, SCRATCH, **options)

    def check(self, row: int, sums: NDArray[Any], units: int, members: Sequence[int]) -> None:
        """``sums``: bytes of a slot, or lanes."""
        octets = sums.astype("<u2").view(np.uint8) if sums.dtype == np.uint16 else sums
        place = reference.Row(int(self.k[row]), int(self.slots["exponent"][self.at[row]]), units, members)
        expected = reference.mean(octets, place, 12345, self.ranks, self.shape.bits, self.rotate)
        assert np.array_equal(self.out[row, 64:], expected.payload)
        assert self.scale[row] == expected.scale
        assert self.count[row] == len(members)
        packet = np.concatenate((np.zeros(64, np.uint8), expected.payload))
        assert final(np.zeros(8, np.uint64), self.partials[row].copy()) == check_packet(packet)

    def own_only(self, row: int) -> None:
        """The mean of a row is what the owner has coded."""
        self.slots["exponent"][self.at[row]] = self.exponents[self.groups[row]]
        self.check(row, reference.to_lanes(self.codes[0, row]), 1, [0])


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
@pytest.mark.parametrize(("numel", "ranks"), [(300, 4), (100000, 4), (100000, 2), (300000, 17)])
@pytest.mark.parametrize("own", [True, False])
def test_mean_equals_the_reference(numel: int, ranks: int, own: bool, bits: Bits) -> None:
    """Rule: codec-12."""
    owner = Owner(numel, ring=256, ranks=ranks, bits=bits)
    owner.shifts[0] = owner.shift[:] = owner.shape.bits > 4
    assert owner.mean(own) == Means(owner.rows, owner.rows, 0, 0, 0, owner.rows * (ranks - 1 + own))
    for row in range(owner.rows):
        owner.check(row, owner.summed(row, own), owner.units(own), range(not own, ranks))
    assert owner.usable.all()
    assert (owner.out[:, :64] == 7).all()
    assert owner.scale[-1] == 0


def test_full_lanes_of_256_ranks() -> None:
    owner = Owner()
    owner.sums.view(np.uint16)[owner.at, : owner.shape.codes] = 255 * 255
    owner.slots["count"][owner.at] = owner.slots["units"][owner.at] = 255
    owner.slots["ranks"][owner.at] = [(1 << 64) - 2, *3 * [(1 << 64) - 1]]
    owner.own[:, 64:] = 255
    owner.ranks = 256
    for owner.rotate in (True, False):
        owner.mean()
        assert (owner.count == 256).all()
        largest = [scale_of(owner.exponents[g]) for g in owner.groups]
        assert np.allclose(np.abs(owner.scale), largest, rtol=1e-4)  # offsets of all ranks cancel
        assert (owner.out[:, 64:] >= 254).all()
        owner.check(3, np.full(owner.shape.codes, 256 * 255, np.uint16), 256, range(256))


@pytest.mark.parametrize("ranks", [5, 9, 200])
@pytest.mark.parametrize("rotate", [True, False])
def test_offsets_of_those_who_are_in_are_taken_off(ranks: int, rotate: bool) -> None:
    """Few or many of the ranks; rows with a shift and with many zeros are left as they are. Rule: codec-10."""
    rng, owner = np.random.default_rng(ranks), Owner()
    owner.ranks, owner.rotate = ranks, rotate
    everybody = {}
    for row in range(owner.rows):
        others = rng.permutation(np.arange(1, ranks))[: rng.integers(1, ranks)].tolist()
        at, shifted = owner.at[row], row % 5 == 0
        total = rng.integers(1, 256 * len(others), owner.shape.codes).astype(np.uint16)
        own = owner.own[row, 64:]
        if row % 4 == 3:  # more than half of even columns, of odd ones, or of both, are zero
            quiet = rng.random(owner.shape.codes) < 0.6
            quiet[row // 4 % 3 :: 2] &= row // 4 % 3 == 2
            own[quiet] = 128
            total[reference.to_lanes(quiet.astype(np.uint8)) > 0] = 128 * len(others)
        if row % 4 == 1:  # in a job that agrees, hardly anything but the offsets is left
            total[:] = 128 * len(others)
            own[:] = rng.integers(127, 130, own.size)
        units = len(others) + shifted
        owner.sums.view(np.uint16)[at, : owner.shape.codes] = total
        owner.slots["count"][at], owner.slots["units"][at] = len(others), units
        owner.slots["ranks"][at] = [sum(1 << r - 64 * w for r in others if r >> 6 == w) for w in range(4)]
        everybody[row] = total + reference.to_lanes(own), units + 1, [0, *others]
    owner.mean()
    for row, (total, units, members) in everybody.items():
        owner.check(row, total, units, members)
    assert (owner.scale < 0).any() == rotate
    assert (owner.scale > 0).any()


@pytest.mark.parametrize(("field", "value"), [("op", 2), ("cookie", 8), ("count", 0), ("exponent", 99)])
def test_rows_of_another_tag_or_scale_are_not_used(field: str, value: int) -> None:
    owner = Owner()
    owner.slots[field][owner.at[5]] = value
    made, another = owner.mean(), field == "exponent"
    assert (made.own_only, made.missing, made.mismatched) == (1, 0, another)
    made = owner.mean(own=False)
    assert (made.own_only, made.missing, made.rows) == (0, 1, owner.rows - 1)
    assert not owner.usable[5]
    assert owner.count[5] == 0
    owner.mean()
    owner.own_only(5)


def test_unknown_expectation_takes_the_first_contributors_scale() -> None:
    owner = Owner()
    unknown = np.full_like(owner.exponents, EXPONENT_NONE)
    owner.exponents[1] = EXPONENT_NONE  # the own group was skipped
    made = owner.mean(expected=unknown)
    assert (made.rows, made.mismatched) == (owner.rows, 0)
    for row in range(owner.rows):
        own = bool(owner.groups[row] != 1)
        owner.check(row, owner.summed(row, own), owner.units(own), range(not own, 4))


def test_next_scale_is_the_largest_need_plus_headroom() -> None:
    owner = Owner()
    first = np.flatnonzero(owner.groups == 0)
    owner.slots["need"][owner.at[first[3]]] = 4
    owner.slots["need"][owner.at[first[4]]] = 11
    owner.slots["op"][owner.at[first[5]]] = 2
    owner.slots["need"][owner.at[first[5]]] = 99
    owner.mean()
    assert (owner.e_next[first] == 13).all()
    assert (owner.e_next[owner.groups == 1] == -7).all()
    owner.mean(own=False)
    assert (owner.e_next[owner.groups == 1] == owner.exponents[1]).all()
    owner.mean(places=(2, 3))
    assert owner.e_next[2] == 13 or owner.groups[2] != 0


def test_threads_that_share_the_rows_make_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two pieces, the last block of rows a short one; the need of a row in one piece counts in the other, too."""
    whole, shared = (Owner(4 * 1408 * 64 * 16 + 9, ring=2048) for _ in range(2))
    for owner in (whole, shared):
        owner.slots["need"][owner.at[-1]] = 11
    expected, pieces = whole.mean(), []

    def noted(*args: Any, places: tuple[int, int]) -> Means:
        pieces.append(places)
        return mean_rows(*args, places=places)

    monkeypatch.setattr(mean, "mean_rows", noted)
    with contextlib.closing(Threads(2, 1408)) as threads:
        assert shared.mean(threads=threads) == expected
    assert sorted(pieces) == [(0, 512), (512, shared.rows)]
    for ours, theirs in zip(shared.made, whole.made, strict=True):
        assert np.array_equal(ours, theirs)
