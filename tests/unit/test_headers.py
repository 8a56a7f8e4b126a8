"""Finished headers against the schema's own reader."""

from __future__ import annotations

import numpy as np
import pytest

from partials import partials
from tailbound.transport.headers import Contributions, Fields, finalise, finalise_contributions
from tailbound.wire import packets
from tailbound.wire.packets import HEADER_DTYPE, header
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES, Flag, PacketType
from tailbound.wire.tag import NO_KEY

TOTAL = 12
FIXED = {
    "flags": Flag.REPEAT, "cookie": 0xDEADBEEF, "op": 0xFFFFFF01, "layout": 0xABCD, "sender": 200, "owner": 255,
    "rows": 65535, "incast": 3, "deadline": 1562, "lateness": 77, "map_id": 5, "map_known": 0xFFFFFFFF,
}  # fmt: skip


class Memory:
    """Packet memory full of codes, with partial checks; headers hold rubbish."""

    def __init__(self, codes: int = 48, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.packets = rng.integers(0, 256, (TOTAL, HEADER_BYTES + codes), np.uint8)
        self.states = partials(self.packets)
        self.exponents = rng.integers(-300, 300, TOTAL).astype(np.int16)
        self.needs = rng.integers(-300, 300, TOTAL).astype(np.int16)
        self.needs[4] = EXPONENT_NONE
        self.weights = rng.integers(1, 8, TOTAL).astype(np.uint8)
        self.scales = rng.random(TOTAL).astype(np.float32)
        self.counts = rng.integers(1, 257, TOTAL).astype(np.uint16)
        self.places = rng.permutation(1000)[:TOTAL].astype(np.uint32)

    def publish(self, part: slice, head: np.ndarray, seq: int, mark: int) -> None:
        fields = Fields(scale=self.scales[part], counted=self.counts[part])
        finalise(self.packets[part], head, self.states[part], fields, seq, self.places[part], mark)

    def read(self, p: int) -> dict[str, int | float]:
        """Fields of packet ``p``, whose check must be right."""
        parsed = packets.parse(self.packets[p].tobytes())
        assert parsed is not None, f"packet {p} does not parse"
        return {n: parsed[0][n][0].item() for n in HEADER_DTYPE.names if n not in ("check", "version")}


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_results(memory: Memory) -> None:
    """Rule: codec-8."""
    head = header(type=PacketType.RESULT, contributed=9, published=0xFFFFFF00, **FIXED)
    memory.publish(slice(2, 9), head, 0xFFFFFFF0, 0xFFFFFF01)
    for row, p in enumerate(range(2, 9)):
        assert memory.read(p) == FIXED | {
            "type": PacketType.RESULT, "contributed": 9, "published": 0xFFFFFF01 if row == 6 else 0xFFFFFF00,
            "seq": (0xFFFFFFF0 + int(memory.places[p])) % 2**32, "row": row, "exponent": 0,
            "scale": memory.scales[p], "count": memory.counts[p], "need": 0, "weight": 0,
        }  # fmt: skip


def test_contributions_to_several_owners(memory: Memory) -> None:
    """Rule: codec-8."""
    before = memory.packets.copy()
    groups = np.array([2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 1, 2], np.int32)
    of_groups = memory.exponents[:3], memory.weights[:3]
    head = header(type=PacketType.CONTRIBUTION, contributed=76, **FIXED | {"owner": 0, "rows": 0})
    runs = [(1, 4, 7, 0xFFFFFFFE), (5, 6, 255, 12), (11, 1, 0, 3), (0, 0, 9, 9)]
    stamped = Contributions(memory.packets, memory.states, memory.places, groups)
    finalise_contributions(stamped, head.view(np.uint8), runs, *of_groups, 77, NO_KEY)
    for first, count, owner, seq in runs:
        for row, p in enumerate(range(first, first + count)):
            exponent, weight = (of[groups[p]] for of in of_groups)
            assert memory.read(p) == FIXED | {
                "type": PacketType.CONTRIBUTION, "contributed": 77 if row == count - 1 else 76, "published": 0,
                "seq": (seq + int(memory.places[p])) % 2**32, "row": row, "exponent": exponent, "owner": owner,
                "rows": count, "scale": 0, "count": 0, "need": 0, "weight": weight,
            }  # fmt: skip
    assert (memory.packets[0] == before[0]).all()
    assert (memory.packets[:, HEADER_BYTES:] == before[:, HEADER_BYTES:]).all()
