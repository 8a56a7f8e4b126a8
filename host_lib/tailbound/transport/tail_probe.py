"""When to ask for marks that are missing, and whom (clock-30). Pure state, the clock injected.

The last packet of a flow carries the mark that says that nothing more will come. If that packet is lost, the wait shows
as a silence, and a question costs milliseconds where a deadline would cost tens of them.

Of many that are missing few have lost a tail, and nearly all are late: so no more than ``AT_ONCE`` are asked together,
in turn, but before a deadline.

A peer of which nothing has come is computing, as a rule: with hundreds of ranks, all asking each other for as long as
the slowest computes, questions would be most of the traffic. It is asked, too, since a short flow may be lost as a
whole, but late and ever more rarely; and once shortly before the deadline, since the only packet of a rank that has no
rows to send (it abstains) may be the one that was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import FLOOR
from tailbound.transport.recovery import NEVER


class Patience(NamedTuple):
    """How long nothing must have come before one asks.

    Attributes:
        begun, not_begun: a peer that has begun, and one that has not.
        last_call: how long before the deadline there is still time for an answer, ns.
    """

    begun: Policy
    not_begun: Policy
    last_call: int


@cache
def patience(floor: int) -> Patience:
    """In proportion to the shortest deadline, ns."""
    return Patience(Policy(2 * floor // 5, 2 * floor), Policy(2 * floor, 16 * floor), 3 * floor // 5)


#: Peers of either kind that are asked together.
AT_ONCE = 8
#: A flow of so few rows may well be lost as a whole: its sender counts as one that has begun, until it has been asked
#: so often. With many ranks all flows are short, and who is late would be asked every 20 ms.
SHORT, _SHORT_ASKED = 3, 3


class TailProbe:
    """One op's waiting for marks.

    Args:
        floor: see ``Config``.

    Attributes:
        again: when to look again, monotonic ns; 0: not begun.
    """

    __slots__ = ("_before", "_called", "_idle", "_last", "_late", "_patience", "_progress", "_since", "_soon", "again")

    def __init__(self, floor: int = FLOOR) -> None:
        self._patience = asked = patience(floor)
        self.again = self._since = 0
        self._progress: int | None = None
        # those that have begun, and those that have not: their rows answer a question, in a way; and when to look for
        # rows
        self._soon, self._late = Backoff(asked.begun, asked=1), Backoff(asked.not_begun, asked=1)
        self._idle = Backoff(asked.begun)
        self._called = 0  # the deadline before which all have been asked last
        self._before: dict[bool, int] = {}  # questions to those that have begun before either half
        self._last: dict[bool, int] = {}  # who was asked last of those that have begun, and of the others

    def patient(self, published: bool) -> bool:
        """Whether senders of short flows were asked often enough in this half to count as what they seem: not begun."""
        return self._soon.asked - self._before.setdefault(published, self._soon.asked) >= _SHORT_ASKED

    def came(self, now: int, progress: int) -> int:
        """What ``turn`` says of rows that have come before anybody was asked, without asking what else it asks for.

        Returns:
            When to look again, monotonic ns; 0: ask ``turn``.
        """
        if progress == self._progress or self._called or not self._soon.asked == self._late.asked == 1:
            return 0
        self._progress, self._since = progress, now
        self._soon.due = self.again = now + self._patience.begun.first
        self._late.due, self._idle.asked = now + self._patience.not_begun.first, 1
        return self.again

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
        last = NEVER
        if due > self._called:  # one that has moved on is another one: who is missed is to say that it lives
            begun, call = self._patience.begun, self._patience.last_call
            before = self._called + begun.most if self._called else 0
            last = max(due - call, self._since + begun.first, before - call)
        self.again = min(self.again, last)
        if now < self.again:
            return []
        here, others = missing()
        asked = []
        everybody = now >= last
        if here and (everybody or now >= self._soon.due):
            asked += here if everybody else self._some(here, begun=True)
            self._soon.ask(now)
        if everybody or now >= self._late.due:
            asked += others if everybody else self._some(others, begun=False)
            self._late.ask(now)
        if everybody:
            self._called, last = due, NEVER
        # rows wake nobody, so that a flow that has begun meanwhile is noticed by looking only
        self._idle.ask(now)
        self.again = min(self._soon.due if here else self._idle.due, self._late.due, last)
        return asked

    def _some(self, peers: list[int], *, begun: bool) -> list[int]:
        """``AT_ONCE`` of them, beginning behind those that were asked last."""
        if len(peers) <= AT_ONCE:
            return peers
        last = self._last.get(begun)
        at = peers.index(last) + 1 if last in peers else 0
        some = (peers[at:] + peers[:at])[:AT_ONCE]
        self._last[begun] = some[-1]
        return some
