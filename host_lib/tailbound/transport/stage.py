"""When a stage of an op is over: sealing and giving up (clock-7, clock-11 to clock-13), one decision for both halves.

Pure: what has been seen is asked of a ``Seen``, the time is an argument. The discrete-event simulation (``tests/sim``)
runs this code unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from tailbound.transport.clock import Extension, Quiet
from tailbound.transport.overtime import Overtime

Why = Literal["complete", "quiet", "deadline"]


class Seen(Protocol):
    """What a rank sees of one half of one op; asked only for what the decision still needs."""

    @property
    def progress(self) -> int:
        """Changes with every row that is taken."""

    @property
    def left(self) -> int:
        """By how much ``progress`` will rise until all rows of all that are waited for are in."""

    def complete(self) -> bool:
        """Whether all rows of all that are waited for are in, own ones too unless self-late (clock-7a, clock-8)."""

    def finished(self) -> bool:
        """Whether all that are waited for have sent everything, as far as their marks say (clock-7b, clock-12)."""

    def heard(self) -> int:
        """When somebody who is waited for and not through was last heard of, ns; 0: never."""

    def repair(self, now: int, *, late: bool) -> tuple[bool, int]:
        """Repairs what is to be repaired; whether an answer may still come, and when to look again (clock-23)."""

    def last_call(self, now: int) -> int:
        """Until when a launch that came too late waits for its one round of repair; 0: no longer (clock-13)."""


def decide(
    seen: Seen, clock: Extension, quiet: Quiet, now: int, q: int, launched: int = 0, overtime: Overtime | None = None
) -> tuple[Why | None, int]:
    """Why the stage is over, if it is; and when to look again if not (0: on arrival).

    Args:
        seen: the stage.
        clock: its deadline, begun by the caller as soon as the stage clock has started.
        quiet: its silence.
        now: the time, ns.
        q: clock-10.
        launched: own launch; one that came after the deadline takes what is there at once (clock-13).
        overtime: what may be waited past deadlines; None: nothing.
    """
    if seen.complete():
        return "complete", 0
    late = 0 < clock.due < launched
    repairing, repair_look = seen.repair(now, late=late)
    finished = not repairing and seen.finished()
    progress = seen.progress
    if quiet.passed(now, finished, progress, q):
        return "quiet", 0
    if late:  # what such a launch waits for others counts from itself
        clock.promised = max(clock.promised, launched)

    def worth(rows: bool) -> bool:
        return overtime is not None and overtime.worth(clock, now, now if rows else seen.heard())

    if clock.expired(now, progress, seen.left, unwatched=late, worth=worth):
        last = seen.last_call(now) if late else 0
        if not last:
            return "deadline", 0
        return None, min(last, repair_look or last)
    looks = [t for t in (quiet.next_look(q), clock.next_look(now), repair_look) if t]
    return None, min(looks, default=0)


def cut(elapsed: int, flows: Iterable[tuple[int, int]]) -> tuple[int | None, float]:
    """What a deadline has cut off.

    Args:
        elapsed: since the flows began, ns.
        flows: (rows that came, rows expected) of every flow whose sender has not said that it is through; one of
            which nothing came says nothing.

    Returns:
        How long the slowest would have taken at its pace (None: nothing was cut), in place of an arrival that will
        never be seen, since senders drop what nobody takes any more, but twice what it had at most: a rank that stopped
        in the middle has no pace; and the share of the rows that was lost by it.
    """
    begun = [(came, expected) for came, expected in flows if 0 < came < expected]
    if not begun:
        return None, 0.0
    whole = sum(expected for _, expected in begun)
    slowest = max(elapsed * expected // came for came, expected in begun)
    return min(slowest, 2 * elapsed), 1 - sum(came for came, _ in begun) / whole
