"""Finished headers against the schema's own reader."""

from __future__ import annotations

import numpy as np

import packed
from partials import partials
from tailbound.transport.control import Header, Stamp
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, Flag, PacketType

TOTAL = 12
FIXED = {
    "flags": Flag.REPEAT, "cookie": 0xDEADBEEF, "op": 0xFFFFFF01, "layout": 0xABCD, "sender": 200, "pad": 0,
    "deadline": 1562, "lateness": 77, "map_id": 5, "map_known": 0xFFFFFFFF,
}  # fmt: skip


def test_contributions_to_several_owners() -> None:
    """Rule: codec-8."""
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 256, (TOTAL, HEADER_BYTES + 48), np.uint8)  # codes, and rubbish in headers
    before = memory.copy()
    exponents, weights = rng.integers(-300, 300, 3).astype(np.int16), rng.integers(1, 8, 3).astype(np.uint8)
    places = rng.permutation(1000)[:TOTAL].astype(np.uint32)
    groups = np.array([2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 1, 2], np.int32)
    head = packed.header(type=PacketType.CONTRIBUTION, contributed=76, **FIXED)
    runs = [(1, 4, 7, 0xFFFFFFFE), (5, 6, 255, 12), (11, 1, 0, 3)]
    stamp = Stamp(memory, partials(memory), places, groups, exponents=exponents, weights=weights)
    stamp.write(
        Header.from_buffer_copy(head),
        [(first, count, count - 1, seq, owner, count) for first, count, owner, seq in runs],
        77,
    )
    for first, count, owner, seq in runs:
        for row, p in enumerate(range(first, first + count)):
            parsed = packed.parse(memory[p].tobytes())
            assert parsed is not None, f"packet {p} does not parse"
            read = {name: parsed[0][name][0].item() for name in HEADER_DTYPE.names if name not in ("check", "version")}
            assert read == FIXED | {
                "type": PacketType.CONTRIBUTION, "contributed": 77 if row == count - 1 else 76, "published": 0,
                "seq": (seq + int(places[p])) % 2**32, "row": row, "exponent": exponents[groups[p]], "owner": owner,
                "rows": count, "scale": 0, "count": 0, "need": 0, "weight": weights[groups[p]],
            }  # fmt: skip
    assert (memory[0] == before[0]).all()
    assert (memory[:, HEADER_BYTES:] == before[:, HEADER_BYTES:]).all()
