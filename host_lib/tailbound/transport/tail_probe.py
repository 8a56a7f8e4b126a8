"""When to ask for marks that are missing, and whom (clock-30). Pure state, the clock injected.

The last packet of a flow carries the mark that says that nothing more will come. If that packet is lost, the wait shows
as a silence, and a question costs milliseconds where a deadline would cost tens of them.

A peer of which nothing has come is computing, as a rule: with hundreds of ranks, all asking each other for as long as
the slowest computes, questions would be most of the traffic. It is asked, too, since a short flow may be lost as a
whole, but late and ever more rarely; and once shortly before the deadline, since the only packet of a rank that has no
rows to send (it abstains) may be the one that was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import MS

#: How long nothing must have come before a peer that has begun is asked, and one that has not.
BEGUN, NOT_BEGUN = Policy(4 * MS, 20 * MS), Policy(20 * MS, 160 * MS)
#: How long before the deadline there is still time for an answer.
LAST_CALL = 6 * MS
#: A flow of so few rows may well be lost as a whole: its sender counts as one that has begun.
SHORT = 3


_NEVER = 1 << 62


@dataclass(slots=True)
class TailProbe:
    """One op's waiting for marks.

    Attributes:
        again: when to look again, monotonic ns; 0: not begun.
    """

    again: int = 0
    _progress: int | None = None
    _since: int = 0
    # those that have begun, and those that have not: their rows answer a question, in a way; and when to look for rows
    _soon: Backoff = field(default_factory=lambda: Backoff(BEGUN, asked=1))
    _late: Backoff = field(default_factory=lambda: Backoff(NOT_BEGUN, asked=1))
    _idle: Backoff = field(default_factory=lambda: Backoff(BEGUN))
    _called: int = 0  # the deadline before which all have been asked last

    def turn(self, now: int, progress: int, due: int, missing: Callable[[], tuple[list[int], list[int]]]) -> list[int]:
        """Whom to ask now.

        Args:
            now: monotonic ns.
            progress: any number that changes when a row is taken.
            due: when the deadline ends the waiting, monotonic ns; 0: not known.
            missing: peers whose mark is missing: those that have begun, and those of which nothing has come. Asked for
                only once it has been silent for long enough.
        """
        if progress != self._progress:
            self._progress, self._since = progress, now
            self._soon.wait(now)
            self._late.wait(now)
            self.again, self._idle.asked = self._soon.due, 1
        last = _NEVER
        if due > self._called:  # one that has moved on is another one: who is missed is to say that it lives
            before = self._called + BEGUN.most if self._called else 0
            last = max(due - LAST_CALL, self._since + BEGUN.first, before - LAST_CALL)
        self.again = min(self.again, last)
        if now < self.again:
            return []
        begun, others = missing()
        asked = []
        if begun and now >= self._soon.due:
            asked += begun
            self._soon.ask(now)
        if now >= min(self._late.due, last):
            asked += others
            self._late.ask(now)
        if now >= last:
            self._called, last = due, _NEVER
        # rows wake nobody, so that a flow that has begun meanwhile is noticed by looking only
        self._idle.ask(now)
        self.again = min(self._soon.due if begun else self._idle.due, self._late.due, last)
        return asked
