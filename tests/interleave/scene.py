"""Who may do what: packets of three senders for two ops, and the moves of the host.

A and B share everything that ops can share: B comes one ring of sums, one ring of results and one ring of op records
after A, so its row, its result and its record stand where A's do. C is a label from far ahead whose row lies in the
windows all the same, as it does where ops are small: only its record would stand where A's does. Every sender has codes
of its own for every op and scale, so a sum says who is in it. B has another layout, and two codes a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cases
from tailbound.wire.schema import OP_INDEX_BITS, OP_PER_STEP, OP_STEPS, Flag, PacketType, op_label, op_slot

SENDERS = (1, 2, 3)
#: Codes of a row: the shortest that there is.
CODES = 16
#: Exponents and weights: by the larger scale sums move, or what comes after it loses bits.
OWN, OTHER = (cases.EXPONENT, 3), (cases.EXPONENT + 20, 1)
NEW_MAP = cases.MAP_ID + 1


@dataclass(frozen=True)
class Op:
    """One op of one row: its label and the row's places in the two sequences."""

    name: str
    label: int
    seq: int
    result_seq: int


A = Op("A", op_label(3, 1), cases.SUM_BASE, cases.RESULT_BASE)
B = Op("B", op_label(3 + OP_STEPS, 1), A.seq + cases.SUM_ROWS, A.result_seq + cases.RESULT_ROWS)
C = Op("C", op_label(3 + OP_STEPS, 1 + OP_PER_STEP), A.seq + 1, A.result_seq + 1)
SLOT, RESULT_ROW, RECORD = A.seq % cases.SUM_ROWS, A.result_seq % cases.RESULT_ROWS, op_slot(A.label)
assert (B.seq % cases.SUM_ROWS, B.result_seq % cases.RESULT_ROWS, op_slot(B.label)) == (SLOT, RESULT_ROW, RECORD)
assert op_slot(C.label) == RECORD


@dataclass(frozen=True)
class Action:
    """A packet of ``sender`` about ``op``, or a move of the host.

    Attributes:
        name: tests name it so.
        kind: contribution, result, ready, or of the host: seal, expect (results), control.
        packet: UDP payload; empty for a move of the host.
        control: fields that a move of the host writes.
        may: whether the host would do that now, by what it has written into the control record, and by what it has
            sealed and expects.
    """

    name: str
    kind: str
    op: Op = A
    packet: bytes = b""
    sender: int = 0
    control: Mapping[str, Any] = field(default_factory=dict)
    may: Callable[[Any, int, int], bool] = lambda control, sealed, expected: True


def _sent(name: str, kind: PacketType, sender: int, op: Op, codes: bytes, **fields: Any) -> Action:
    values = {"op": op.label, "layout": cases.LAYOUT + (op is B), "row": 0, "rows": 1, "owner": cases.RANK} | fields
    if op is B and kind != PacketType.READY:
        values["flags"] = values.get("flags", 0) | Flag.HALVES
    return Action(name, kind.name.lower(), op, cases.build(kind, codes, sender=sender, **values), sender)


def _contribution(name: str, sender: int, op: Op, scale: tuple[int, int] = OWN, **fields: Any) -> Action:
    codes = cases.codes(sender + (16 if op is B else 0) + (64 if scale == OTHER else 0), CODES)
    values = {"seq": op.seq, "exponent": scale[0], "weight": scale[1], "contributed": op.label}
    values |= {"published": cases.RELEASED} | fields
    return _sent(name, PacketType.CONTRIBUTION, sender, op, codes, **values)


def _result(name: str, owner: int, op: Op, **fields: Any) -> Action:
    values = {"seq": op.result_seq, "scale": 0.25, "count": owner, "owner": owner}
    values |= {"contributed": op.label, "published": op.label} | fields
    return _sent(name, PacketType.RESULT, owner, op, cases.codes(128 + owner + (16 if op is B else 0), CODES), **values)


def _ready(name: str, sender: int, op: Op, **fields: Any) -> Action:
    return _sent(name, PacketType.READY, sender, op, bytes(CODES), seq=op.result_seq, **fields)


def _seal(op: Op) -> Action:
    def may(control: Any, sealed: int, expected: int) -> bool:
        return control["sum_base"] <= op.seq < control["sum_base"] + cases.SUM_ROWS and sealed < op.label

    return Action(f"seal {op.name}", "seal", op, may=may)


def _expect(op: Op) -> Action:
    def may(control: Any, sealed: int, expected: int) -> bool:
        return expected < op.label <= control["released"] + (OP_STEPS << OP_INDEX_BITS)

    return Action(f"results of {op.name}", "expect", op, may=may)


def _control(name: str, may: Callable[[Any, int, int], bool], **values: Any) -> Action:
    return Action(name, "control", control=values, may=may)


#: The three words that a host writes when an op is over here, in its order.
_OVER = [
    _control("released", lambda c, sealed, _: sealed >= A.label > c["released"], released=A.label),
    _control(
        "results move on",
        lambda c, *_: c["released"] == A.label and c["result_base"] < B.result_seq,
        result_base=B.result_seq,
    ),
    _control("sums move on", lambda c, *_: c["result_base"] == B.result_seq and c["sum_base"] < B.seq, sum_base=B.seq),
]
_ALL: list[Action] = [
    *(_contribution(f"{s} gives {op.name}", s, op) for op in (A, B) for s in SENDERS),
    *(_contribution(f"{s} repeats {op.name}", s, op, flags=Flag.REPEAT) for op in (A, B) for s in SENDERS),
    *(_contribution(f"{s} gives {op.name} by another scale", s, op, OTHER) for op in (A, B) for s in SENDERS),
    *(_contribution(f"{s} gives B by the new map", s, B, map_id=NEW_MAP) for s in SENDERS),
    *(_result(f"result of {op.name} by {s}", s, op) for op in (A, B) for s in SENDERS),
    *(_result(f"result of {op.name} by {s} again", s, op, flags=Flag.REPEAT) for op in (A, B) for s in SENDERS),
    *(_result(f"result of B by {s} by the new map", s, B, map_id=NEW_MAP) for s in SENDERS),
    *(_ready(f"{s} is ready for {op.name}", s, op) for op in (A, B, C) for s in SENDERS),
    *(_ready(f"{s} is too late for {op.name}", s, op, flags=Flag.LATE) for op in (A, B) for s in SENDERS),
    *(_ready(f"{s} abstains from {op.name}", s, op, flags=Flag.ABSTAIN) for op in (A, B) for s in SENDERS),
    *(_seal(op) for op in (A, B)),
    *_OVER,
    _control("3 is out", lambda c, *_: c["live"][0] == 0b1110, live=[0b0110, 0, 0, 0], live_peers=2, need=2),
    _control("3 is back", lambda c, *_: c["live"][0] == 0b0110, live=[0b1110, 0, 0, 0], live_peers=3, need=3),
    _control(
        "new map",
        lambda c, *_: c["map_id"] == cases.MAP_ID,
        map_id=NEW_MAP, map_since=B.label, map_before=cases.MAP_ID,
    ),
    *(_expect(op) for op in (A, B)),
]  # fmt: skip
ACTIONS = {action.name: action for action in _ALL}
assert len(ACTIONS) == len(_ALL)
_OVER_NAMES = tuple(action.name for action in _OVER)

#: Parts of the whole that can be explored to their ends, and the whole, as far as there is time.
SCENES: dict[str, tuple[str, ...]] = {
    "sums": (
        *(f"{s} gives A" for s in SENDERS), *(f"{s} gives A by another scale" for s in (1, 2)), "1 repeats A",
        *(f"{s} gives B" for s in (1, 2)), "1 gives B by another scale",
        "seal A", "seal B", *_OVER_NAMES, "3 is out", "3 is back",
    ),
    "records": (
        "1 gives A", "2 is ready for A", "3 is too late for A", "3 abstains from A", "1 is ready for B",
        "1 is ready for C", "2 gives B", "3 gives B by the new map", "result of A by 1", "result of B by 2",
        "seal A", *_OVER_NAMES, "new map",
    ),
    "results": (
        *(f"result of A by {s}" for s in (1, 2)), "result of A by 1 again",
        *(f"result of B by {s}" for s in (1, 2)), "result of B by 2 again", "result of B by 3 by the new map",
        *(f"3 is ready for {op}" for op in "ABC"), "results of A", "results of B",
        "seal A", *_OVER_NAMES, "new map", "3 is out", "3 is back",
    ),
    "all": tuple(ACTIONS),
}  # fmt: skip
