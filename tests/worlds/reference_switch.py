"""A switch in plain numpy for tests in virtual time: the rules of ``switch_cases`` and nothing besides."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import packed
from reference_proof import check_packet
from tailbound.wire import packets
from tailbound.wire.schema import (
    EXPONENT_NONE,
    HEADER_BYTES,
    ROW_STEP,
    VERSION,
    Flag,
    PacketType,
    Verdict,
    serial_distance,
)

_NAMES = packets.HEADER_DTYPE.names
_SCALE = packets.HEADER_DTYPE.fields["scale"][1]  # type: ignore[index]
_TYPES = set(PacketType)


@dataclass
class Slot:
    """One row."""

    head: dict[str, Any]
    sums: NDArray[np.uint16]
    ranks: set[int]
    need: int
    final: bool = False


@dataclass
class Rules:
    """What happens to packets, for one job; pure but for its slots.

    Attributes:
        cookie, ranks, headroom, rows, form: the job's entry.
    """

    cookie: int
    ranks: int
    headroom: int = 2
    rows: int = 8192
    form: str = "mean"
    slots: dict[int, Slot] = field(default_factory=dict)
    counts: Counter[Verdict] = field(default_factory=Counter)

    def take(self, data: bytes) -> tuple[Verdict, bytes, bool]:
        """Takes a UDP payload; returns its verdict, a result to send (or nothing), and whether it is for all."""
        verdict, out, everybody = self._take(np.frombuffer(data, np.uint8))
        self.counts[verdict] += 1
        return verdict, out, everybody

    def _take(self, raw: NDArray[np.uint8]) -> tuple[Verdict, bytes, bool]:
        if len(raw) < HEADER_BYTES or len(raw) % ROW_STEP:
            return Verdict.BAD_LENGTH, b"", False
        head = dict(zip(_NAMES, raw[:HEADER_BYTES].view(packets.HEADER_DTYPE)[0].item(), strict=True))
        head["scale"] = raw[_SCALE : _SCALE + 4]  # moved as bits: it may be no number
        body, sender, kind = raw[HEADER_BYTES:], head["sender"], head["type"]
        probe = kind == PacketType.PROBE
        for wrong, verdict in (
            (not len(body) and kind in (PacketType.CONTRIBUTION, PacketType.RESULT), Verdict.BAD_LENGTH),
            (head["version"] != VERSION, Verdict.BAD_VERSION),
            (kind not in _TYPES, Verdict.BAD_TYPE),
            (head["cookie"] != self.cookie, Verdict.WRONG_COOKIE),
            (sender >= self.ranks, Verdict.UNKNOWN_RANK),
            (check_packet(raw) != head["check"], Verdict.CORRUPT),
            (head["owner"] != self.ranks, Verdict.NOT_FOR_THIS_RANK),
            (kind != PacketType.CONTRIBUTION and not probe, Verdict.BAD_TYPE),
            (head["row"] >= head["rows"] and not probe, Verdict.SLOT_OUT_OF_RANGE),
            (head["weight"] != 1 and not probe, Verdict.BAD_WEIGHT),
        ):
            if wrong:
                return verdict, b"", False
        if not probe:
            return self._add(head, body, sender)
        echo = raw[:HEADER_BYTES].view(packets.HEADER_DTYPE).copy()
        echo["type"], echo["owner"], echo["sender"] = PacketType.ECHO, sender, self.ranks
        echo["seq"] = 0  # a switch counts no marks
        return Verdict.REFLECTED, packed.packet(echo, body.tobytes()), False

    def _add(self, head: dict[str, Any], codes: NDArray[np.uint8], sender: int) -> tuple[Verdict, bytes, bool]:
        at, flush = head["seq"] % self.rows, bool(head["flags"] & Flag.FLUSH)
        slot = self.slots.get(at)
        newer = serial_distance(head["seq"], slot.head["seq"]) if slot is not None else 1
        if slot is not None and newer < 0:
            return Verdict.STALE_OP, b"", False
        if slot is None or newer > 0:
            if slot is not None and not slot.final:
                self.counts[Verdict.ABANDONED] += 1
            slot = self.slots[at] = Slot(head, codes.astype(np.uint16), {sender}, head["need"])
            verdict = Verdict.STORED
        elif any(head[f] != slot.head[f] for f in ("op", "layout", "row", "rows")) or len(codes) != len(slot.sums):
            return Verdict.LAYOUT_MISMATCH, b"", False
        elif slot.final:
            return Verdict.ANSWERED, self._result(slot, head), False
        elif sender in slot.ranks:
            if not flush:
                return Verdict.DUPLICATE, b"", False
            return Verdict.FLUSHED, self._release(slot, head), True
        elif head["exponent"] != slot.head["exponent"]:
            return Verdict.SCALE_MISMATCH, b"", False
        else:
            slot.sums += codes
            slot.ranks.add(sender)
            slot.need = max(slot.need, head["need"])
            verdict = Verdict.ADDED
        if flush or len(slot.ranks) >= min(head["count"] or self.ranks, self.ranks):
            return verdict, self._release(slot, head), True
        return verdict, b"", False

    def _release(self, slot: Slot, head: dict[str, Any]) -> bytes:
        slot.final = True
        return self._result(slot, head)

    def _result(self, slot: Slot, head: dict[str, Any]) -> bytes:
        """Of a row that is final, to whoever has sent ``head``; exponents wrap as in C."""
        count = len(slot.ranks)
        e = slot.head["exponent"] if slot.need == EXPONENT_NONE else slot.need + self.headroom
        out = packed.header(
            **{f: head[f] for f in ("cookie", "op", "layout", "seq", "row", "rows", "map_id", "map_known")},
            type=PacketType.RESULT, sender=self.ranks, owner=self.ranks, need=slot.need, count=count,
            exponent=((e + 0x8000) & 0xFFFF) - 0x8000, contributed=(head["op"] - 1) & 0xFFFFFFFF,
            published=(head["op"] - 1) & 0xFFFFFFFF,
            flags=int(Flag.SUMS if self.form == "sums" else Flag.SWITCHED),
        )  # fmt: skip
        out["scale"] = slot.head["scale"].view(">f4")
        if self.form == "sums":
            body = slot.sums.astype(">u2").tobytes()
        else:
            body = ((slot.sums.astype(np.int64) + count // 2) // count).astype(np.uint8).tobytes()
        return packed.packet(out, body)


def shuffled(seed: int, loss: float = 0.0, twice: float = 0.0, *, results: bool = True, rows: bool = True) -> Any:
    """A ``trouble`` that loses and doubles contributions (``rows``) and results."""
    chance = random.Random(seed)

    def trouble(rank: int, data: bytes, result: bool) -> int:
        if not (results if result else rows):
            return 1
        return 0 if chance.random() < loss else 1 + (chance.random() < twice)

    return trouble
