"""Who may do what: packets of three senders for two ops, and the moves of the host.

A and B share everything that ops can share: B comes one ring of sums, one ring of results and one ring of op records
after A, so its row, its result and its record stand where A's do. C is a label from far ahead whose row lies in the
windows all the same, as it does where ops are small: only its record would stand where A's does. Every sender has codes
of its own for every op and scale, so a sum says who is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cases
from tailbound.wire.schema import OP_PER_STEP, OP_STEPS, Flag, Verdict, op_label, op_slot

SENDERS = (1, 2, 3)
#: Codes of a row: the shortest that there is.
CODES = 16
#: Bytes of a sum, of op B with two codes a byte.
SUM_BYTES = 4 * CODES
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
#: Those that can be summed here.
OPS = {op.label: op for op in (A, B)}
SLOT, RESULT_ROW = A.seq % cases.SUM_ROWS, A.result_seq % cases.RESULT_ROWS
RECORD = op_slot(A.label)
assert (B.seq % cases.SUM_ROWS, B.result_seq % cases.RESULT_ROWS, op_slot(B.label)) == (SLOT, RESULT_ROW, RECORD)
assert op_slot(C.label) == RECORD


def codes_of(sender: int, op: Op, scale: tuple[int, int]) -> bytes:
    """What a sender contributes: to op B two codes a byte (``Flag.HALVES``)."""
    return cases.codes(sender + (16 if op is B else 0) + (64 if scale == OTHER else 0), CODES)


def result_codes(owner: int, op: Op) -> bytes:
    """What an owner publishes."""
    return cases.codes(128 + owner + (16 if op is B else 0), CODES)


def lanes(sender: int, op: Op, scale: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What a sender contributes, in the order of the lanes of a sum."""
    codes = np.frombuffer(codes_of(sender, op, scale), np.uint8)
    if op is B:
        codes = np.stack((codes.reshape(-1, 8) & 15, codes.reshape(-1, 8) >> 4), axis=1)
    return codes.reshape(-1, 4, 2).transpose(0, 2, 1).reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class Action:
    """A packet of ``sender`` about ``op``, or a move of the host.

    Attributes:
        name: what tests say to repeat it.
        packet: UDP payload; empty for a move of the host.
        kind: contribution, result, ready or host.
        sender: rank that sends the packet, 0 for the host.
        op: which op it is about, where there is one.
        map_id: what a packet carries.
        move: changes a world as the host would.
        may: whether the host would do that now, from what it has written itself.
    """

    name: str
    packet: bytes = b""
    kind: str = "host"
    sender: int = 0
    op: Op = A
    map_id: int = cases.MAP_ID
    move: Callable[[Any], None] = lambda world: None
    may: Callable[[Any], bool] = lambda view: True


def _contribution(name: str, sender: int, op: Op, scale: tuple[int, int] = OWN, **fields: Any) -> Action:
    exponent, weight = scale
    values = {"seq": op.seq, "op": op.label, "row": 0, "rows": 1, "exponent": exponent, "weight": weight}
    values |= {"owner": cases.RANK, "contributed": op.label, "published": cases.RELEASED} | fields
    values["flags"] = values.get("flags", 0) | (Flag.HALVES if op is B else 0)
    data = cases.build(cases.PacketType.CONTRIBUTION, codes_of(sender, op, scale), sender=sender, **values)
    return Action(name, data, "contribution", sender, op, fields.get("map_id", cases.MAP_ID))


def _result(name: str, owner: int, op: Op, **fields: Any) -> Action:
    values = {"seq": op.result_seq, "op": op.label, "row": 0, "rows": 1, "scale": 0.25, "count": owner}
    values |= {"contributed": op.label, "published": op.label, "owner": owner} | fields
    values["flags"] = values.get("flags", 0) | (Flag.HALVES if op is B else 0)
    data = cases.build(cases.PacketType.RESULT, result_codes(owner, op), sender=owner, **values)
    return Action(name, data, "result", owner, op, map_id=fields.get("map_id", cases.MAP_ID))


def _ready(name: str, sender: int, op: Op, **fields: Any) -> Action:
    values = {"seq": op.result_seq, "op": op.label, "owner": cases.RANK} | fields
    return Action(name, cases.build(cases.PacketType.READY, bytes(CODES), sender=sender, **values), "ready", sender, op)


def _seal(op: Op) -> Action:
    return Action(
        f"seal {op.name}",
        move=lambda world: world.seal(op.label, op.seq, 1),
        op=op,
        may=lambda view: view.window(op) and view.sealed < op.label,
    )


def _control(**values: Any) -> Callable[[Any], None]:
    return lambda world: world.control(**values)


#: The three words that a host writes when an op is over here, in its order.
_OVER = [
    Action("released", move=_control(released=A.label), may=lambda v: v.sealed >= A.label and v.released < A.label),
    Action(
        "results move on",
        move=_control(result_base=B.result_seq),
        may=lambda v: v.released == A.label and v.result_base < B.result_seq,
    ),
    Action("sums move on", move=_control(sum_base=B.seq), may=lambda v: v.result_base == B.result_seq > v.sum_base),
]
_LIVE = [
    Action("3 is out", move=_control(live=[0b0110, 0, 0, 0], live_peers=2, need=2), may=lambda v: v.live == 0b1110),
    Action("3 is back", move=_control(live=[0b1110, 0, 0, 0], live_peers=3, need=3), may=lambda v: v.live == 0b0110),
]
_MAP = Action(
    "new map",
    move=_control(map_id=NEW_MAP, map_since=B.label, map_before=cases.MAP_ID),
    may=lambda v: v.map_id == cases.MAP_ID,
)
_EXPECT_RESULTS = [
    Action(
        f"results of {op.name}",
        move=lambda world, op=op: world.expect_results(op.label, 1),
        op=op,
        may=lambda v, op=op: v.expected_results < op.label and v.released >= op.label - (OP_STEPS << 10),
    )
    for op in (A, B)
]

_ALL: list[Action] = [
    *(_contribution(f"{s} gives {op.name}", s, op) for op in (A, B) for s in SENDERS),
    *(_contribution(f"{s} repeats {op.name}", s, op, flags=Flag.REPEAT) for op in (A, B) for s in SENDERS),
    *(_contribution(f"{s} gives {op.name} by another scale", s, op, OTHER) for op in (A, B) for s in SENDERS),
    *(_contribution(f"{s} gives B by the new map", s, B, map_id=NEW_MAP) for s in SENDERS),
    *(_result(f"result of {op.name} by {s}", s, op) for op in (A, B) for s in SENDERS),
    *(_result(f"result of {op.name} by {s} again", s, op, flags=Flag.REPEAT) for op in (A, B) for s in SENDERS),
    *(_result(f"result of B by {s} by the new map", s, B, map_id=NEW_MAP) for s in SENDERS),
    *(_ready(f"{s} is ready for {op.name}", s, op) for op in (A, B) for s in SENDERS),
    *(_ready(f"{s} is too late for {op.name}", s, op, flags=Flag.LATE) for op in (A, B) for s in SENDERS),
    *(_ready(f"{s} abstains from {op.name}", s, op, flags=Flag.ABSTAIN) for op in (A, B) for s in SENDERS),
    *(_ready(f"{s} is ready for C", s, C) for s in SENDERS),
    *(_seal(op) for op in (A, B)),
    *_OVER,
    *_LIVE,
    _MAP,
    *_EXPECT_RESULTS,
]
ACTIONS = {action.name: action for action in _ALL}
assert len(ACTIONS) == len(_ALL)
#: Verdicts by which a contribution is in.
TAKEN = (Verdict.STORED, Verdict.ADDED)
_OVER_NAMES = tuple(action.name for action in _OVER)

#: Parts of the whole that are explored to their ends, and the whole, which is explored as far as there is time.
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
