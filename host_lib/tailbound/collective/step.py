"""What is to be done for the own rows of an op now: from what this rank knows of it, its state and the time to actions.

Nothing here sends, reads a clock or touches a map. What changes is the state of the op, and nothing else. ``execute``
carries the actions out. When halves end is decided in the library (``host_lib/core/halves.c``).
"""

from __future__ import annotations

from tailbound.collective.actions import Abstain, Action, Agree, Collect, Encode, Measure, StayOut, Tell
from tailbound.collective.aggregation import of
from tailbound.collective.op import Op
from tailbound.collective.view import View
from tailbound.wire.schema import Sending

#: How long until a device is asked again whether it is through, ns: an eighth of the time that it has taken so far, so
#: that a long backward pass costs few questions and a short one no delay; at least, and at most, so long.
_POLL_FIRST, _POLL_LAST = 100_000, 1_000_000


def step(op: Op, view: View, now: int) -> tuple[Action | None, int]:
    """What to do for the own rows of ``op`` now, and when to look again, ns; 0: when something arrives.

    Args:
        op: its state, which may change. It is launched, its own rows are not sent, and the ops before it have sent
            theirs; for a switch the one whose scales it carries on is over.
        view: what is known of it.
        now: the time, ns.
    """
    assert op.launch is not None
    if not op.launch.contribute:
        return Abstain(), 0
    late = op.overtaken or (op.sealed and _over_for_all(op, view, now))
    if late and not of(op).late_rows_serve(view):
        return StayOut(), 0
    if op.ready is not None and not op.ready():
        return None, now + min(max((now - op.begun) // 8, _POLL_FIRST), _POLL_LAST)
    if op.sending == Sending.CODING:
        return Collect(), 0
    if op.sending == Sending.LAUNCHED:
        scales = view.known.scales(op) if op.switched else None
        op.cold = op.switched and scales is None
        return Measure() if op.cold else Encode(scales, late), 0
    return _agree(op, view, now)


def _over_for_all(op: Op, view: View, now: int) -> bool:
    """Whether the first half is over for everybody, and not only for the own rows, which may not be waited for.

    Its deadline says so where a switch sums. Owners wait longer for a rank that lives: their marks tell when they have
    published.
    """
    if not op.start or now <= op.start + view.first_deadline():
        return False
    return op.switched or now > op.start + view.known.config.stage_max or all(map(view.published, view.owners()))


def _agree(op: Op, view: View, now: int) -> tuple[Action | None, int]:
    """A cold op waits for the needs of all, but for half of the stage at most: what is agreed on is to be sent, too."""
    known = view.known
    missing = [p for p in known.membership.live if p not in op.needs and p not in op.abstainers]
    start = op.start or op.admitted + known.deadlines.start_max
    limit = start + known.config.stage_max // 2
    settled = [p for p in missing if view.contributed(p)]
    if len(settled) == len(missing):  # for them this op is not cold, or they have settled without us
        limit = min(limit, op.cold_since + known.deadlines.advertised)
    if op.warm or (settled and now >= limit):
        return StayOut(), 0  # whatever this rank chose would not be theirs
    if not missing or now >= limit:
        return Agree(incomplete=bool(missing)), 0
    action: Action | None = None
    if now >= op.agreeing.due:
        op.agreeing.ask(now)
        action = Tell(tuple(p for p in known.peers if p not in op.heard_by))
    return action, min(op.agreeing.due, limit)
