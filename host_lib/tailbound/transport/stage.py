"""When a stage of an op starts, seals and gives up: clock-1, clock-3, clock-7, clock-10 to clock-13.

Pure: what has been seen is asked of a ``Seen``, the time is an argument. All times are nanoseconds of one host's
CLOCK_MONOTONIC; 0 means «not yet». One decision serves both halves of an op.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from tailbound.transport.overtime import Extension, Overtime

Why = Literal["complete", "quiet", "deadline"]

Request = TypeVar("Request")


def majority(voters: int) -> int:
    """How many of ``voters`` (ranks, self included) start a stage clock: more than half (clock-1)."""
    return voters // 2 + 1


def stage_start(*, heard_fewer: int, heard_need: int, alone: bool, launched: int, start_max: int) -> int:
    """c(i): when a majority of the ranks had shown up (clock-3); 0 while that has not happened.

    Args:
        heard_fewer: when ``need - 1`` live peers had been heard.
        heard_need: when ``need`` live peers had been heard.
        alone: ``need`` is 1, so that the own launch is a majority.
        launched: own launch, which counts as one rank.
        start_max: D_start; the clock starts at the latest this long after the own launch.
    """
    candidates = [heard_need] if heard_need else []
    if launched:
        candidates.append(launched + start_max)
        if alone:
            candidates.append(launched)
        elif heard_fewer:
            candidates.append(max(heard_fewer, launched))
    return min(candidates, default=0)


@dataclass(slots=True)
class Quiet:
    """Whether nothing came for ``q`` since everybody had finished (clock-7b, clock-12)."""

    since: int = 0
    progress: int = -1

    def passed(self, now: int, finished: bool, progress: int, q: int) -> bool:
        """Call at every look; ``progress`` is any number that changes when a packet is taken."""
        if not finished or progress != self.progress or not self.since:
            self.since = now if finished else 0
            self.progress = progress
            return False
        return now - self.since >= q

    def next_look(self, q: int) -> int:
        """When ``passed`` may turn true; 0 while not everybody has finished."""
        return self.since + q if self.since else 0


class Repair(NamedTuple, Generic[Request]):
    """What is to be repaired of a half (clock-23)."""

    open: bool = False  #: an answer may still come
    look: int = 0  #: when to look again, ns; 0: on arrival
    requests: tuple[Request, ...] = ()  #: what to ask for now


#: As a rule; made once, since it is asked for in every decision.
NO_REPAIR: Repair[Any] = Repair()


class Decision(NamedTuple, Generic[Request]):
    """What becomes of a half now."""

    why: Why | None  #: it is over; None: it goes on
    look: int = 0  #: when to look again, ns; 0: on arrival
    requests: tuple[Request, ...] = ()  #: what to ask for now, whether it is over or not


class Seen(Protocol[Request]):
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

    def heard(self, now: int) -> int:
        """Since when those who are waited for and not through leave a question open, the last of them, ns.

        ``now``: one of them has not been asked since it was heard of; 0: no rank is waited for, or ever was heard of.
        """

    def repair(self, now: int, *, late: bool) -> Repair[Request]:
        """What is to be asked for, and whether an answer may still come (clock-23); ``late``: see ``decide``."""

    def insists(self, over: int, *, late: bool) -> int:
        """Until when rows that can still be had are waited for, past a deadline that is ``over`` since then (clock-35).

        0: no longer.
        """


def decide(
    seen: Seen[Request],
    clock: Extension,
    quiet: Quiet,
    now: int,
    q: int,
    launched: int,
    overtime: Overtime | None,
) -> Decision[Request]:
    """Whether the stage is over, when to look again if not, and what to ask for.

    Args:
        seen: the stage.
        clock: its deadline, begun by the caller as soon as the stage clock has started.
        quiet: its silence.
        now: the time, ns.
        q: clock-10.
        launched: own launch, 0: not yet; one that came after the deadline takes what is there at once (clock-13).
        overtime: what may be waited past deadlines; None: nothing.
    """
    if seen.complete():
        return Decision("complete")
    late = 0 < clock.due < launched
    repair = seen.repair(now, late=late)
    finished = not repair.open and seen.finished()
    progress = seen.progress
    if clock.over:
        return _insisting(seen, clock, now, late, repair)
    if quiet.passed(now, finished, progress, q):
        return Decision("quiet", 0, repair.requests)
    if late:  # what such a launch waits for others counts from itself
        clock.promised = max(clock.promised, launched)

    if 0 < clock.due <= now + clock.step:  # what is left, and whether it is worth waiting for, matters there alone

        def worth(rows: bool) -> bool:
            if overtime is None:
                return False
            if overtime.worth(clock, now, now if rows else seen.heard(now)):
                return True
            return repair.open and overtime.worth(clock, now, now, reserve=overtime.reserve)

        if clock.expired(now, progress, seen.left if clock.due <= now else 0, unwatched=late, worth=worth):
            clock.over = now
            return _insisting(seen, clock, now, late, repair)
    looks = filter(None, (quiet.next_look(q), clock.next_look(now), repair.look))
    return Decision(None, min(looks, default=0), repair.requests)


def _insisting(
    seen: Seen[Request], clock: Extension, now: int, late: bool, repair: Repair[Request]
) -> Decision[Request]:
    """What becomes of a half whose deadline is over."""
    until = seen.insists(clock.over, late=late)
    if now >= until:
        return Decision("deadline", 0, repair.requests)
    return Decision(None, min(until, repair.look or until), repair.requests)


def cut(elapsed: int, flows: Iterable[tuple[int, int]]) -> tuple[int | None, float]:
    """What a deadline has cut off.

    Args:
        elapsed: since the flows began, ns.
        flows: (rows that came, rows expected) of every flow whose sender has not said that it is through; one of
            which nothing came says nothing.

    Returns:
        How long the slowest would have taken at its pace (None: nothing was cut), in place of an arrival that will
        never be seen, since senders drop what no rank takes any more, but twice what it had at most: a rank that
        stopped in the middle has no pace; and the share of the rows that was lost by it.
    """
    begun = [(came, expected) for came, expected in flows if 0 < came < expected]
    if not begun:
        return None, 0.0
    whole = sum(expected for _, expected in begun)
    slowest = max(elapsed * expected // came for came, expected in begun)
    return min(slowest, 2 * elapsed), 1 - sum(came for came, _ in begun) / whole
