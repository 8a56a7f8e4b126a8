"""What is to be done for an op now: from what this rank knows of it, its state and the time to actions.

Nothing here sends, reads a clock or touches a map. What changes is the state of the op, and nothing else. ``execute``
carries the actions out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tailbound.collective.actions import (
    MOVES,
    Abstain,
    Action,
    Agree,
    Collect,
    Encode,
    Finish,
    Measure,
    Seal,
    StayOut,
    Tell,
)
from tailbound.collective.aggregation import of
from tailbound.collective.op import Half, Op, Phase, Sending
from tailbound.collective.peers import Contributions
from tailbound.collective.view import View
from tailbound.transport.overtime import Extension
from tailbound.transport.stage import Seen, Why, decide, stage_start


class Step(NamedTuple):
    """What is to be done for one op."""

    actions: tuple[Action, ...] = ()
    look: int = 0  #: when to look again, ns; 0: when something arrives

    @property
    def moves(self) -> bool:
        """Whether a phase ends by it, so that there is more to do as soon as it is done."""
        return bool(self.actions) and not MOVES.isdisjoint(map(type, self.actions))


#: How long until a device is asked again whether it is through, ns: an eighth of the time that it has taken so far, so
#: that a long backward pass costs few questions and a short one no delay; at least, and at most, so long.
_POLL_FIRST, _POLL_LAST = 100_000, 1_000_000
#: Nothing to do before something arrives.
_NOTHING = Step()


def step(op: Op, view: View, now: int, *, may_send: bool) -> Step:
    """What to do for ``op`` now.

    Args:
        op: its state, which may change.
        view: what is known of it.
        now: the time, ns.
        may_send: the ops before it have sent theirs, and for a switch the one whose scales it carries on is over.
    """
    found = _NOTHING
    for part in _PARTS if may_send else _PARTS[1:]:
        one = part(op, view, now)
        if one is _NOTHING:
            continue
        if one.actions and one.moves:
            return Step(found.actions + one.actions) if found.actions else one
        if found is _NOTHING:
            found = one  # as a rule only one part has something to say
        else:
            look = min(found.look, one.look) if found.look and one.look else found.look or one.look
            found = Step(found.actions + one.actions, look)
    return found


# -- clocks -------------------------------------------------------------------------------------------------------


def start_clock(op: Op, view: View, now: int) -> int:
    """Looks whether a majority has shown up (clock-3), and notes when; once started, a clock stands.

    Returns:
        When to look again, ns, since it starts then at the latest; 0: it has started, or only others can start it.
    """
    start = 0
    if not op.start:
        record, known = view.record, view.known
        fewer, need = map(int, record["majority_ns"]) if record is not None else (0, 0)
        start = stage_start(
            heard_fewer=fewer,
            heard_need=need,
            alone=int(known.store.control["need"][0]) <= 1,
            launched=op.admitted if op.launch else 0,
            start_max=known.deadlines.start_max,
        )
        op.start = start if start <= now else 0
    if op.start:
        op.start = max(op.start, op.held)
        return 0
    return 0 if op.finished else start


def stand_still(op: Op, now: int) -> None:
    """While a live rank holds, no clock runs; all start anew from the end of the hold (clock-16)."""
    op.held = now
    if not op.sealed:
        op.start = 0
    if not op.sealed or op.switched:
        op.first.clock = Extension()
    if op.sealed:
        op.second.clock = Extension()


def overtaken(op: Op, view: View, now: int) -> bool:
    """Notes that all others were through with ``op`` before this rank sent rows: no more comes (clock-13, clock-20).

    Returns:
        Whether that is news.
    """
    if op.overtaken or op.launch is None or op.encoded:
        return False
    owners = view.owners()
    if not owners or not all(view.published(p) and view.contributed(p) for p in owners):
        return False
    op.start = op.start or max(1, now - 4 * view.known.config.stage_max)
    op.overtaken = True
    return True


# -- the own rows -------------------------------------------------------------------------------------------------


def _sending(op: Op, view: View, now: int) -> Step:
    if op.launch is None or op.sending is Sending.OVER:
        return _NOTHING
    if not op.launch.contribute:
        return Step((Abstain(),))
    late = op.overtaken or (op.sealed and _over_for_all(op, view, now))
    if late and not of(op).late_rows_serve(view):
        return Step((StayOut(),))
    if op.ready is not None and not op.ready():
        return Step((), now + min(max((now - op.begun) // 8, _POLL_FIRST), _POLL_LAST))
    if op.sending == Sending.CODING:
        return Step((Collect(),))
    if op.sending == Sending.LAUNCHED:
        scales = view.known.scales(op) if op.switched else None
        op.cold = op.switched and scales is None
        return Step((Measure() if op.cold else Encode(scales, late),))
    return _agree(op, view, now)


def _over_for_all(op: Op, view: View, now: int) -> bool:
    """Whether the first half is over for everybody, and not only for the own rows, which may not be waited for.

    Its deadline says so where a switch sums. Owners wait longer for a rank that lives: their marks tell when they have
    published.
    """
    if not op.start or now <= op.start + view.first_deadline():
        return False
    return op.switched or now > op.start + view.known.config.stage_max or all(map(view.published, view.owners()))


def _agree(op: Op, view: View, now: int) -> Step:
    """A cold op waits for the needs of all, but for half of the stage at most: what is agreed on is to be sent, too."""
    known = view.known
    missing = [p for p in known.membership.live if p not in op.needs and p not in op.abstainers]
    start = op.start or op.admitted + known.deadlines.start_max
    limit = start + known.config.stage_max // 2
    settled = [p for p in missing if view.contributed(p)]
    if len(settled) == len(missing):  # for them this op is not cold, or they have settled without us
        limit = min(limit, op.cold_since + known.deadlines.advertised)
    if op.warm or (settled and now >= limit):
        return Step((StayOut(),))  # whatever this rank chose would not be theirs
    if not missing or now >= limit:
        return Step((Agree(incomplete=bool(missing)),))
    actions: tuple[Action, ...] = ()
    if now >= op.agreeing.due:
        op.agreeing.ask(now)
        actions = (Tell(tuple(p for p in known.peers if p not in op.heard_by)),)
    return Step(actions, min(op.agreeing.due, limit))


# -- waiting ------------------------------------------------------------------------------------------------------


def _first_half(op: Op, view: View, now: int) -> Step:
    """Seals when all is in, when it is quiet, or at the deadline (clock-7 to clock-9)."""
    if op.first.phase:  # sealed
        return _NOTHING
    if not view.own:
        op.first.phase = Phase.DONE
        return _NOTHING
    if op.launch is None and view.foreseen_wrongly():  # then nothing can be said before the launch
        return _NOTHING
    if op.start and not op.first.clock.due:
        config = view.known.config
        op.first.clock.start(op.start, view.first_deadline(), config.stage_max, config.floor)
    why, step = _wait(op.first, Contributions(view), view, now, launched=0)
    return step if why is None else Step((*step.actions, Seal(why)))


def _second_half(op: Op, view: View, now: int) -> Step:
    """Ends the op when all results are in, when it is quiet, or when it gives up (clock-11 to clock-13)."""
    if not op.first.phase or op.second.phase or op.launch is None or not op.encoded:
        return _NOTHING
    if op.start and not op.second.clock.due:
        config = view.known.config
        op.second.clock.start(op.start, view.second_deadline(), 2 * config.stage_max, config.floor)
    why, step = _wait(op.second, of(op).results(view), view, now, launched=op.admitted)
    return step if why is None else Step((*step.actions, Finish(why)))


def _wait(half: Half, seen: Seen[Action], view: View, now: int, *, launched: int) -> tuple[Why | None, Step]:
    overtime = None if view.op.switched else view.known.overtime
    why, look, requests = decide(seen, half.clock, half.quiet, now, view.known.deadlines.quiet, launched, overtime)
    return why, Step(requests, look) if look or requests else _NOTHING


#: What an op is asked in turn, when it may send.
_PARTS: tuple[Callable[[Op, View, int], Step], ...] = (_sending, _first_half, _second_half)


# -- silence ------------------------------------------------------------------------------------------------------


def recover(op: Op, view: View, now: int) -> Step:
    """Requests lost rows while their flows run and once these have ended, and marks in a silence (clock-23, clock-30).

    Marks only once the own rows have left: until then this rank holds up the others.
    """
    before = _standing(op)
    actions, look = of(op).recover(view, now)
    op.news = False
    op.stirred |= before != _standing(op)
    return Step(tuple(actions), look)


def _standing(op: Op) -> list[tuple[bool, int]]:
    return [half.recovery.standing if half.recovery is not None else (False, 0) for half in (op.first, op.second)]
