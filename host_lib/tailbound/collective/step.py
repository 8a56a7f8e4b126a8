"""The next thing to do for the own rows of an op: from what this rank knows of it, its state and the time.

Nothing here sends, reads a clock or touches a map. What changes is the state of the op, and nothing else.
``contribute`` does it. When halves end is decided in the library (``host_lib/core/halves.c``).
"""

from __future__ import annotations

import ctypes
from enum import Enum, auto

from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.kernel.core import core
from tailbound.wire.schema import Sending

#: How long until a device is asked again whether it is through, ns: an eighth of the time that it has taken so far, so
#: that a long backward pass costs few questions and a short one no delay; at least, and at most, so long.
_POLL_FIRST, _POLL_LAST = 100_000, 1_000_000


class Do(Enum):
    """Things to do; each but ``WAIT`` and ``TELL`` ends a phase of the op, so that ``step`` is asked again."""

    WAIT = auto()  #: Nothing now.
    ABSTAIN = auto()  #: Take part without rows, and say so.
    STAY_OUT = auto()  #: No rank takes the own rows (clock-17), or a switch takes other scales (codec-5): say so.
    MEASURE = auto()  #: Find the scales that the own rows need at a switch, and tell them (codec-5).
    TELL = auto()  #: Tell them again to ranks that have not told theirs, and ask for these (clock-25).
    AGREE = auto()  #: Settle the scales of a cold op from what ranks have told, and code the own rows.
    ENCODE = auto()  #: Code the own rows, and hand them to the send queue.
    ENCODE_LATE = auto()  #: The same; no rank waits for them any more, but they serve to ask a switch for results.
    COLLECT = auto()  #: Take the codes, which a device has made by now, and hand them to the send queue.


def step(op: Op, known: Speaker, now: int) -> tuple[Do, int]:
    """What to do for the own rows of ``op`` now, and when to look again, ns; 0: when something arrives.

    Args:
        op: its state, which may change. It is launched, its own rows are not sent, and the ops before it have sent
            theirs; for a switch the one whose scales it carries on is over.
        known: what the rank knows.
        now: the time, ns.
    """
    assert op.launch is not None
    if not op.launch.contribute:
        return Do.ABSTAIN, 0
    late = op.overtaken or (op.sealed and _over_for_all(op, known, now))
    if late and not (op.switched and _late_rows_serve(op, known)):
        return Do.STAY_OUT, 0
    if op.ready is not None and not op.ready():
        return Do.WAIT, now + min(max((now - op.begun) // 8, _POLL_FIRST), _POLL_LAST)
    if op.sending == Sending.CODING:
        return Do.COLLECT, 0
    if op.sending == Sending.LAUNCHED:
        op.cold = op.switched and known.scales(op) is None
        return Do.MEASURE if op.cold else Do.ENCODE_LATE if late else Do.ENCODE, 0
    return _agree(op, known, now)


def _late_rows_serve(op: Op, known: Speaker) -> bool:
    """Results that are lacking can be had of a switch by sending the own rows."""
    record = known.records.of(op.label)
    return not op.cold and record is not None and int(record["results_in"]) < op.place.layout.shape.rows


def _over_for_all(op: Op, known: Speaker, now: int) -> bool:
    """Whether the first half is over for everybody, and not only for the own rows, which may not be waited for.

    Its deadline says so where a switch sums. Owners wait longer for a rank that lives: their marks tell when they have
    published.
    """
    if not op.start or now <= op.start + core().fast.tb_lasts(known.terms.pointer, ctypes.addressof(op), 0):
        return False
    owners = [p for p in known.membership.owners if op.place.placement.shares[p]]
    through = len(known.records.all_published(owners, op.label)) == len(owners)
    return op.switched or now > op.start + known.config.stage_max or through


def _agree(op: Op, known: Speaker, now: int) -> tuple[Do, int]:
    """A cold op waits for the needs of all, but for half of the stage at most: what is agreed on is to be sent, too."""
    missing = untold(op, known)
    start = op.start or op.admitted + known.deadlines.start_max
    limit = start + known.config.stage_max // 2
    settled = known.records.all_contributed(missing, op.label)
    if len(settled) == len(missing):  # for them this op is not cold, or they have settled without us
        limit = min(limit, op.cold_since + (known.deadlines.advertised or known.config.stage_max))
    if op.warm or (settled and now >= limit):
        return Do.STAY_OUT, 0  # whatever this rank chose would not be theirs
    if not missing or now >= limit:
        return Do.AGREE, 0
    what = Do.WAIT
    if now >= op.agreeing.due:
        op.agreeing.ask(now)
        what = Do.TELL
    return what, min(op.agreeing.due, limit)


def untold(op: Op, known: Speaker) -> list[int]:
    """Live ranks that have told neither their scales nor that they bring no rows."""
    told = op.needs.keys() | op.abstainers
    return [p for p in known.membership.live if p not in told]
