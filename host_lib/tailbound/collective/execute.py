"""Carries out what ``step`` says: the one place where an op's state becomes packets, sums and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailbound.collective import switched
from tailbound.collective.actions import (
    Abstain,
    Action,
    Agree,
    AskMarks,
    AskRows,
    Encode,
    Finish,
    Measure,
    Release,
    Repeat,
    Seal,
    StayOut,
    Tell,
)
from tailbound.collective.announce import announce
from tailbound.collective.average import seal
from tailbound.collective.collect import finish
from tailbound.collective.contribute import abstain, agree, encode, measure, stay_out
from tailbound.collective.job import Job
from tailbound.collective.op import Op
from tailbound.collective.repair import encode_repair
from tailbound.collective.step import listen, step
from tailbound.collective.view import View
from tailbound.wire.schema import Flag, PacketType


def move(job: Job, op: Op, view: View, *, may_send: bool) -> int:
    """Moves ``op`` on as far as it goes; returns when to look again, ns (0: when something arrives)."""
    while True:
        found = step(op, view, job.now(), may_send=may_send)
        for action in found.actions:
            _EXECUTE[type(action)](job, op, action)
        if not found.moves:
            return found.look


def remind(job: Job, op: Op, now: int) -> int:
    """Asks for marks that are missing; returns when to look again, ns (0: never)."""
    if not op.encoded or op.finished:
        return 0
    found = listen(op, View(job, op), now)
    for action in found.actions:
        _EXECUTE[type(action)](job, op, action)
    return found.look


def _tell(job: Job, op: Op, action: Tell) -> None:
    if action.ask:
        _asked(job, action.peers)
    announce(job, op, action.peers, ask=action.ask)


def _ask_marks(job: Job, op: Op, action: AskMarks) -> None:
    _asked(job, action.peers)
    head = job.header(PacketType.REPAIR, op.label, op.place.layout.tag)
    for peer in action.peers:
        job.tell(peer, head)
        job.counters["asked"] += 1


def _asked(job: Job, peers: tuple[int, ...]) -> None:
    now = job.now()
    for peer in peers:
        job.overtime.asked(peer, now, job.heard([peer]))


def _ask_rows(job: Job, op: Op, action: AskRows) -> None:
    flags = Flag.FIRST_HALF if action.first_half else Flag(0)
    for first, body in encode_repair(action.places, job.store.width):
        head = job.header(PacketType.REPAIR, op.label, op.place.layout.tag, row=first, rows=action.rows, flags=flags)
        job.tell(action.rank, head, body)
        job.counters["repair_asked"] += 1


_EXECUTE: dict[type[Action], Callable[[Job, Op, Any], None]] = {
    Abstain: abstain,
    StayOut: stay_out,
    Measure: measure,
    Agree: agree,
    Encode: encode,
    Seal: seal,
    Finish: finish,
    Tell: _tell,
    AskMarks: _ask_marks,
    AskRows: _ask_rows,
    Repeat: switched.repeat,
    Release: switched.release,
}
