"""Sums of scales that differ (codec-9), for both datapaths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cases
import reference
from cases import contribution
from reference_worker import rounding_bits
from tailbound.wire.schema import Flag, PacketType, Verdict, op_label

SLOT = cases.SEQ & (cases.SUM_ROWS - 1)


class Fit(NamedTuple):
    """Contributions of ranks 1, 2 and 3, and what their sum is then, in a job of four ranks: F is 3.

    Attributes:
        given: exponents, as so much more than that of the cases, and weights.
        exponent: of the sum's unit, in the same way.
        lane: what a lane holds whose column has this code in every contribution, by how each is rounded; of code 128
            it is ``units``.
    """

    name: str
    given: tuple[tuple[int, int], ...]
    exponent: int
    units: int
    lane: Callable[[int, Callable[[int, int], int]], int]
    halves: bool | None = None  #: of codes of 4 bits alone, or of all others


# fmt: off
FITS = [
    Fit("the first is stored in a finer unit", ((0, 4),), -12, 4096, lambda c, r: 32 * c),
    Fit("with the largest weight", ((0, 7),), -12, 7168, lambda c, r: 56 * c),
    Fit("with a small weight in a unit twice as fine", ((0, 2),), -16, 4096, lambda c, r: 32 * c),
    Fit("with the smallest one in one four times as fine", ((0, 1),), -20, 4096, lambda c, r: 32 * c),
    Fit("the same scale", ((0, 5), (0, 6)), -12, 11264, lambda c, r: 88 * c),
    Fit("a smaller scale that the unit divides", ((0, 4), (-8, 5), (-12, 7)), -12, 6272, lambda c, r: 49 * c),
    Fit("one doubling below the unit", ((0, 4), (-16, 5)), -12, 4416, lambda c, r: 32 * c + (5 * c + r(2, 2)) // 2),
    Fit("several below", ((0, 4), (-20, 5), (-16, 7)), -12, 4704,
        lambda c, r: 32 * c + (5 * c + r(2, 4)) // 4 + (7 * c + r(3, 2)) // 2),
    Fit("three below", ((0, 4), (-24, 7)), -12, 4208, lambda c, r: 32 * c + (7 * c + r(2, 8)) // 8),
    Fit("seven below", ((0, 4), (-40, 7)), -12, 4103, lambda c, r: 32 * c + (7 * c + r(2, 128)) // 128, halves=False),
    Fit("a larger scale moves the sum", ((0, 4), (4, 4)), -8, 6144, lambda c, r: 48 * c),
    Fit("what moving takes", ((0, 4), (-12, 5), (4, 4)), -8, 6464, lambda c, r: (37 * c) // 2 + 32 * c),
    Fit("after moving there is no room for more", ((0, 4), (8, 7), (8, 7)), -4, 15360, lambda c, r: 8 * c + 112 * c),
    Fit("what came first is then the smaller one",
        ((0, 5), (16, 4), (0, 5)), 4, 4736, lambda c, r: 5 * c // 2 + 32 * c + (5 * c + r(3, 2)) // 2),
    Fit("by fifteen", ((0, 7), (60, 4)), 48, 4096, lambda c, r: 32 * c),
    Fit("by sixteen nothing is left", ((0, 7), (64, 6)), 52, 6144, lambda c, r: 48 * c),
    Fit("by more than lanes have bits", ((0, 7), (400, 6)), 388, 6144, lambda c, r: 48 * c),
    Fit("between two scales: quarters are not looked at",
        ((0, 4), (-1, 4), (-13, 5)), -12, 6464, lambda c, r: 48 * c + (5 * c + r(3, 2)) // 2),
    Fit("from the smallest to the largest", ((-32732, 7), (32803, 4)), 32788, 4096, lambda c, r: 32 * c),
    Fit("the smallest twice", ((-32732, 7), (-32732, 7)), -32744, 14336, lambda c, r: 112 * c),
    Fit("the largest twice", ((32803, 7), (32803, 7)), 32791, 14336, lambda c, r: 112 * c),
]
# fmt: on
#: Bytes of codes, and whether there are two codes in each: short rows, whole rounds of 32 bytes, and the widest.
LENGTHS = [(16, False), (112, False), (256, False), *((count, True) for count in (16, 32, 48, 112, 128))]


def check_fits(world: Any) -> None:
    """Codes of a byte, short rows and whole ones; codes of half a byte; and what is behind a row stays.

    Rule: codec-9.
    """
    rng = np.random.default_rng(9)
    step = 0
    for fit in FITS:
        assert fit.lane(128, lambda rank, parts: 0) == fit.units, fit.name
        for count, halves in LENGTHS:
            if fit.halves not in (None, halves):
                continue
            step += 1
            op = op_label(3 + step, 1)
            world.control(released=op - 1)
            world.take(contribution(3, cases.WIDTH, op=op - 1))
            behind = world.lanes(SLOT, cases.WIDTH)
            body = rng.integers(0, 256, count, np.uint8)
            codes = reference.unpack(body, 4 if halves else 8)
            for rank, (exponent, weight) in enumerate(fit.given, 1):
                fields = {"op": op, "seq": cases.SEQ, "owner": cases.RANK, "rows": 9, "flags": Flag.HALVES * halves}
                fields |= {"exponent": cases.EXPONENT + exponent, "weight": weight}
                given = cases.build(PacketType.CONTRIBUTION, body.tobytes(), sender=rank, **fields)
                assert world.take(given) == (Verdict.ADDED if rank > 1 else Verdict.STORED, rank), fit.name

            def rounded(rank: int, parts: int, op: int = op) -> int:
                return rounding_bits(cases.SEQ, op, rank) % parts

            want = [fit.lane(code, rounded) for code in codes.tolist()]
            assert world.lanes(SLOT, len(want)).tolist() == want, (fit.name, count, halves)
            record = world.store.slots[SLOT]
            said = record["exponent"] - cases.EXPONENT, record["units"], record["count"]
            assert said == (fit.exponent, fit.units, len(fit.given)), fit.name
            if record["exponent"] == cases.EXPONENT + fit.given[0][0] - 12:  # it was not moved
                assert np.array_equal(world.lanes(SLOT, cases.WIDTH)[len(want) :], behind[len(want) :])


CHECKS = [check_fits]
