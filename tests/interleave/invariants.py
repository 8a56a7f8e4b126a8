"""What must hold whatever happened before. Each function says what is broken, or returns None.

They say what the tables mean to the host, not by which rule a packet is taken or refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

import cases
from interleave.scene import CODES, OPS, OTHER, OWN, SENDERS, Action, lanes, result_codes
from interleave.view import MARKS, RISING, SETS, View
from reference_worker import add_scaled, rounding_bits, spare_of
from tailbound.codec.scale import weights_of
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import Event, Verdict

Counted = tuple[tuple[int, int], ...]
_WEIGHTS = weights_of(cases.RANKS)
#: Exponent, units and lanes.
Sum = tuple[int, int, bytes]


@functools.cache
def sums_of(ranks: int, op: int) -> frozenset[Sum]:
    """What a sum with ``ranks`` in it may be: they came in some order, each by one of its scales."""
    members = [sender for sender in SENDERS if ranks >> sender & 1]
    out = set()
    for order in itertools.permutations(members):
        for scales in itertools.product((OWN, OTHER), repeat=len(order)):
            record = np.zeros(1, DTYPES["tb_slot"])[0]
            record["exponent"] = scales[0][0] - 4 * spare_of(scales[0][1], *_WEIGHTS)
            row = np.zeros(len(lanes(1, OPS[op], OWN)), np.uint16)
            for sender, scale in zip(order, scales, strict=True):
                bits = rounding_bits(cases.SEQ, OPS[op].label, sender)
                add_scaled(record, row, lanes(sender, OPS[op], scale), *scale, spare_of(scale[1], *_WEIGHTS), bits)
            out.add((int(record["exponent"]), int(record["units"]), row.tobytes()))
    return frozenset(out)


def state_is_sound(view: View, changed: frozenset[str]) -> Iterator[str]:
    """What holds in every state; looked at where one of the ``changed`` arrays says it."""
    if view.slot and changed & {"slots", "sums"}:
        members = view.ranks.bit_count()
        if view.get("slots.count") != members:
            yield f"a sum of {members} ranks counts {view.get('slots.count')}"
        said = (view.get(f"slots.{name}") for name in ("exponent", "units"))
        if (*said, view.part("sums", 2 * len(lanes(1, OPS[view.slot], OWN)))) not in sums_of(view.ranks, view.slot):
            yield f"the sum is not that of its members {view.ranks:#x} in any order"
    if changed & {"presence", "result_records", "results"}:
        yield from _result_is_sound(view)
    if view.get("ops.heard_live") > view.get("ops.heard").bit_count():
        yield "more live ranks heard than ranks"


def _result_is_sound(view: View) -> Iterator[str]:
    present, cookie = view.get("presence.op"), view.get("presence.cookie")
    if (present, cookie) != (view.result, view.get("result_records.cookie")):
        yield f"presence names op {present:#x}, the row's record {view.result:#x}"
    if view.result and view.part("results", CODES) != result_codes(view.get("result_records.owner"), OPS[view.result]):
        yield "a result is not what its owner published"


def nothing_lost(before: View, after: View, changed: frozenset[str]) -> Iterator[str]:
    """What holds from one state to the next, whatever was done; looked at where a ``changed`` array says it."""
    for sender in SENDERS:
        if f"peer_states.{sender}" in changed and before.get(f"peer_states.{sender}.cookie"):
            for mark in MARKS:
                name = f"peer_states.{sender}.{mark}"
                if after.get(name) < before.get(name):
                    yield f"{name} went back from {before.get(name):#x} to {after.get(name):#x}"
    if "ops" in changed:
        yield from _record_kept(before, after)
    for name in ("sum_base", "result_base", "released", "first_op", "map_since"):
        if "control" in changed and after.get(f"control.{name}") < before.get(f"control.{name}"):
            yield f"control.{name} went back"
    kept = before.slot in OPS and before.window(OPS[before.slot])
    if kept and before.sealed >= before.slot and changed & {"slots", "sums"}:
        yield f"the sealed row of op {before.slot:#x} has changed"
    shown = before.result in OPS and before.result_window(OPS[before.result])
    if shown and changed & {"presence", "result_records", "results"}:
        yield f"the result of op {before.result:#x}, which nobody has taken out, has changed"


def _record_kept(before: View, after: View) -> Iterator[str]:
    if before.record == after.record:
        for name in SETS:
            if before.get(f"ops.{name}") & ~after.get(f"ops.{name}"):
                yield f"ops.{name} lost a rank"
        for name in RISING:
            if after.get(f"ops.{name}") < before.get(f"ops.{name}"):
                yield f"ops.{name} went back"
    elif before.record > before.released:
        yield f"the record of op {before.record:#x}, which is in progress, was taken by {after.record:#x}"
    elif after.record < before.record:
        yield "a record went back to an older op"


def books_balance(before: View, after: View, action: Action, gained: Counted, changed: frozenset[str]) -> Iterator[str]:
    """Every packet is counted once, under its sender; rows in sums = STORED + ADDED."""
    if len(gained) != 1 or gained[0][0] != action.sender:
        yield f"counted {len(gained)} times: {gained}"
        return
    put_in = gained[0][1] in (Verdict.STORED, Verdict.ADDED)
    there = before.get("slots.count") if before.slot == after.slot else 0
    if put_in and after.get("slots.count") != there + 1:
        yield f"{there} rows were in and one came: {after.get('slots.count')} are in"
    if not put_in and changed & {"slots", "sums"}:
        yield "a packet that was refused has changed a sum"
    if gained[0][1] != Verdict.RESULT_TAKEN and changed & {"presence", "result_records", "results"}:
        yield "a packet that was refused has changed a result"


def promises_kept(before: View, after: View, action: Action) -> Iterator[str]:
    """What came in time, and right, is there afterwards."""
    op = action.op
    if action.map_id != before.map_of(op):
        return
    in_time = before.window(op) and before.sealed < op.label and before.in_reach(op) and before.slot <= op.label
    there = after.slot == op.label and after.ranks >> action.sender & 1
    if action.kind == "contribution" and in_time and not there:
        yield f"rank {action.sender} gave op {op.name} in time and is not in its sum"
    if action.kind == "result" and before.result_window(op) and after.result < op.label:
        yield f"the result of op {op.name} came while its place was kept, and is not there"


class Announcements:
    """A row is counted as complete, and COMPLETE said, once: when a packet is in with which it has all live ranks.

    An op has one row here. What was said is remembered beside a state: bit 0 for the sum of op A, bit 1 for that of B.
    """

    @staticmethod
    def step(known: int, before: View, after: View, gained: Counted, events: Counted) -> tuple[int, str | None]:
        """What is known afterwards, and what is wrong."""
        completed = [op for kind, op in events if kind == Event.COMPLETE]
        grown = any(verdict in (Verdict.STORED, Verdict.ADDED) for _, verdict in gained)
        wrong = None
        for i, op in enumerate(OPS):
            whole = after.slot == op and not after.live & ~after.ranks
            if op in completed:
                if not whole:
                    wrong = f"op {op:#x} was called complete, and ranks {after.live & ~after.ranks:#x} are missing"
                if known >> i & 1 or len(completed) > 1:
                    wrong = f"op {op:#x} was called complete twice"
                known |= 1 << i
            elif whole and grown and not known >> i & 1:
                wrong = f"op {op:#x} is complete and nobody was told"
            if after.record == op and after.get("ops.rows_complete") != known >> i & 1:
                wrong = f"op {op:#x} counts {after.get('ops.rows_complete')} complete rows"
        return known, wrong


assert cases.RANK not in SENDERS
