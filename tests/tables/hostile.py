"""Packets that nobody should send: noise, damage, and wrong fields under a check that is right; all from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import cases
from kernel_world import HEADERS
from tailbound.wire.schema import Flag, PacketType, op_label

KINDS = [*PacketType, 0, max(PacketType) + 1, 255]


def noise(rng: random.Random) -> bytes:
    """A UDP payload of random bytes, of a length that some rule is about or of any other."""
    size = rng.choice((0, 8, 63, 64, 80, 64 + cases.CODES, 64 + cases.WIDTH, rng.randrange(1400)))
    return rng.randbytes(size)


def damaged(rng: random.Random, frames: Sequence[bytes]) -> bytes:
    """One of ``frames`` with bytes of its UDP payload changed: what the check sees for certain (``wire.check``).

    Changes are within one word, or outside the top bytes of words.
    """
    data = bytearray(rng.choice(frames))
    places = [rng.randrange(HEADERS, len(data)) for _ in range(rng.choice((1, 1, 1, 2, 5, 20)))]
    for at in {at for at in places if (at - HEADERS) % 8 < 7} or places[:1]:
        data[at] ^= rng.randrange(1, 256)
    return bytes(data)


def hostile(rng: random.Random, moved: int = 0) -> bytes:
    """A packet to rank 0 of ``cases``, its check right, with fields from what is near the borders of every rule.

    ``moved``: ops that are over since, of four rows each.
    """
    kind = rng.choice([PacketType.CONTRIBUTION] * 6 + [PacketType.RESULT] * 4 + [PacketType.READY] * 2 + KINDS)
    sender = rng.choice((0, 1, 2, 3, 3, 2, 1, 4, 200))
    now = cases.OP + moved
    op = rng.choice((now, now, now, now + 1, now - 1, op_label(7, 1), op_label(3, 257), op_label(1, 3), 5))
    base = (cases.SUM_BASE if kind == PacketType.CONTRIBUTION else cases.RESULT_BASE) + 4 * moved
    ring = cases.SUM_ROWS if kind == PacketType.CONTRIBUTION else cases.RESULT_ROWS
    rows = rng.choice((1, 4, 4, 4, 300))
    count = rng.choice((16, 128, 128, 128, 128, 128, 256, 0, 272))
    near = cases.EXPONENT + 4 * rng.randrange(-12, 20)
    scales = (cases.EXPONENT, near, near, near + rng.randrange(4), -32768, 32767, rng.randrange(-32768, 32768))
    return cases.build(
        kind,
        cases.codes(rng.randrange(1000), count),
        sender=sender,
        cookie=rng.choice([cases.COOKIE] * 30 + [cases.COOKIE ^ 1]),
        op=op,
        layout=rng.choice([cases.LAYOUT] * 20 + [1]),
        owner=rng.choice((sender, cases.RANK) if kind == PacketType.RESULT else (cases.RANK,) * 9 + (2,)),
        seq=base + rng.choice((0, 1, 2, 3, 3, 2, 1, 0, ring - 1, ring, -1, 1 << 31)) & 0xFFFFFFFF,
        row=rng.choice((0, 1, 2, 3, 4, 299)),
        rows=rows,
        weight=rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 255)),
        exponent=rng.choice(scales),
        need=rng.randrange(-60, 60),
        scale=rng.random(),
        count=rng.randrange(5),
        flags=rng.choice((0, 0, 0, Flag.ABSTAIN, Flag.HALVES)),
        contributed=rng.choice((0, op - 1, op, now)),
        published=rng.choice((0, op - 1, op, now)),
        deadline=rng.choice((0, 0, 9)),
        lateness=rng.choice((0, 0, 0, 2)),
        map_id=rng.choice([cases.MAP_ID] * 9 + [cases.MAP_BEFORE]),
        map_known=rng.choice((0, 7, 8)),
    )


def plain(rng: random.Random, moved: int = 0) -> bytes:
    """A packet that a rank of ``cases`` may well send when as many ops are over."""
    sender, at, op = rng.randrange(1, 4), rng.randrange(6), cases.OP + moved + rng.choice((0, 0, 0, 1))
    length, row, kind = (cases.WIDTH, cases.CODES)[op % 2], at % 4, rng.randrange(5)
    fields = {"op": op, "row": row, "rows": 4, "exponent": cases.EXPONENT + 4 * rng.randrange(-5, 6)}
    if kind < 3:
        weight = rng.randrange(1, 8)
        return cases.contribution(sender, length, seq=cases.SUM_BASE + 4 * moved + at, weight=weight, **fields)
    if kind < 4:
        return cases.result(sender, length, seq=cases.RESULT_BASE + 4 * moved + at, **fields)
    return cases.ready(sender, op=op, seq=cases.RESULT_BASE + 4 * moved, contributed=op, published=op - 1)
