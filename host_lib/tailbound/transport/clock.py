"""When a stage starts, seals and gives up: clock-3, clock-7, clock-10 to clock-13 as pure functions and small classes.

Nothing here reads a clock or a map: the time is an argument, and so is what has been seen. All times are nanoseconds
of one host's CLOCK_MONOTONIC; 0 means «not yet».
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def majority(live: int) -> int:
    """How many of ``live`` ranks (self included) start a stage clock: floor(L / 2) + 1 (clock-1)."""
    return live // 2 + 1


def stage_start(*, heard_fewer: int, heard_need: int, alone: bool, launched: int, start_max: int) -> int:
    """c(i): when a majority of live ranks had shown up (clock-3); 0 while that has not happened.

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


#: A deadline moves on by a tenth of itself, but by no less: over a link at a twentieth of its rate the bursts to one
#: of eight ranks are 8 ms apart, and a thread may well not run for as long.
LEAST_STEP = 10_000_000


@dataclass
class Extension:
    """A deadline that moves on by a tenth if that will do, up to ``start + stage_max`` (clock-7c, clock-11).

    Moved on as long as rows come at all, it would let a link that foreign traffic leaves a tenth of hold up all ranks
    for seconds. So the last tenth must have brought as many rows as are still missing, or waiting on must be worth its
    time (``transport.overtime``).

    Attributes:
        due: when it ends the stage, as far as is known now.
        promised: and before it was ever moved on.
        length: from the start of the stage to ``promised``.
        limit: when it ends the stage whatever comes.
        step: by how much it moves on.
        progress: as of the last look; -1: nobody has looked yet.
    """

    due: int = 0
    promised: int = 0
    length: int = 0
    limit: int = 0
    step: int = 1
    progress: int = -1

    def begin(self, start: int, length: int, stage_max: int, least_step: int = 1) -> None:
        """Starts the deadline at ``start + length``; later calls change nothing."""
        if not self.due:
            self.due = self.promised = start + length
            self.length = length
            self.limit = max(self.due, start + stage_max)
            self.step = max(least_step, length // 10)

    def expired(
        self,
        now: int,
        progress: int,
        left: int = 0,
        *,
        unwatched: bool = True,
        worth: Callable[[bool], bool] | None = None,
    ) -> bool:
        """Whether the deadline has passed, moving it on if ``progress`` rose by ``left`` since it was last looked at.

        ``unwatched`` is the answer where nobody looked in the last tenth: True, it is over (a launch that came too
        late, clock-13); False, this thread was busy with something else, and rows may be on their way: one tenth more.
        ``worth`` is asked otherwise, with whether rows came at all since then: it is moved on, too, if this says so.
        """
        if not self.due or now < self.due:
            if self.due and now >= self.due - self.step and self.progress < 0:
                self.progress = progress
            return False
        moved = max(1, left) <= progress - self.progress if self.progress >= 0 else not unwatched
        if not moved and worth is not None:
            moved = worth(0 <= self.progress < progress)
        self.progress = progress
        if moved:
            self.due = min(now + self.step, self.limit)
            return now >= self.limit
        return True

    def next_look(self, now: int) -> int:
        """The time to look again: the start of the last tenth, then the deadline itself."""
        if not self.due:
            return 0
        early = self.due - self.step
        return early if now < early else self.due


@dataclass
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
