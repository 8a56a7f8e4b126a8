"""Where ranks that synchronise meet and compare what they hold (clock-21).

A rank that synchronises after a step publishes a *standing* in each round: digests of its state, and whether it is
sound. It asks all others for theirs, and they answer as soon as they have come as far. All alike: it is through.
Otherwise those who hold something else than the *reference* take it, and meet again in the next round.

- The reference follows from the standings alone, so ranks that have heard the same choose the same: what most of the
  sound ranks hold (of all ranks, where none is sound); of equally many the first in an order that begins with another
  rank after every step. Buffers, which are each rank's own, are those of the lowest rank that holds it, as in DDP.
- A standing can still be asked for when its rank is through: others may be slower. Who closes soon after waits for
  them, for a few seconds at most.
- Ranks may meet twice after one step. So a meeting has a number at each rank, by which it is asked for in all rounds
  but the first; there, who has heard the last standing of a meeting asks for the next one.
- A rank that is past the step without having synchronised says so, and nobody waits for it.
- All ranks of the job are asked, those too that seem to be dead: who takes a connection has not died.
- Where all are alike each publishes its verdict in one more round: whether it has met every rank that has not died, and
  a majority. The answer is that of all verdicts, so that ranks which have heard each other give the same.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tailbound.errors import TransportError
from tailbound.torch.moment import Moment
from tailbound.torch.replica import DIGEST
from tailbound.transport.reliable import Refusal, Reliable, Unreachable
from tailbound.transport.requests import ask_each, of_form
from tailbound.transport.steps import step_distance

_NAME = "standing"
#: Step, round, who asks, ms to wait, number of the meeting (0: the present one).
_ASK = struct.Struct("!IBHHH")
#: What the asked rank does; whether it is sound, and its verdict (bit 1); number of the meeting, state, form.
_HEAD = struct.Struct("!BBH16s16s")
_HERE, _NOT_YET, _ELSEWHERE = range(3)
_ANSWER_MOST = 1 << 16
#: Milliseconds that a rank lets others wait for its standing before they have to ask again.
_POLL = 2000
#: Seconds between two looks whether the step is past here, and between two attempts at a rank that cannot be reached.
_LOOK = 0.05
#: Seconds after a meeting within which a rank that closes waits for the others to have heard its last standing.
LINGER = 5.0
#: Meetings whose standings are kept.
_KEPT = 2


class Standing(NamedTuple):
    """What a rank holds: ``state`` digests parameters and optimizers, ``form`` the latter's shapes and plain values.

    ``slices``: a digest each, with buffers. ``well``: the verdict, that all who have not died are equal.
    """

    sound: bool
    state: bytes
    form: bytes
    slices: tuple[bytes, ...]
    well: bool = False

    def holds(self, other: Standing) -> bool:
        """Whether both are the same to the bit, buffers included."""
        return self.state == other.state and self.slices == other.slices

    def pack(self, meeting: int) -> bytes:
        """As bytes."""
        return _HEAD.pack(_HERE, self.sound | self.well << 1, meeting, self.state, self.form) + b"".join(self.slices)


def holds_most(held: Mapping[int, Hashable], step: int, ranks: int) -> int:
    """The rank that holds what most hold: of equals the first in an order that begins with another rank by ``step``."""
    counts = Counter(held.values())
    order = sorted(held, key=lambda rank: (rank - step) % ranks)
    return max(order, key=lambda rank: counts[held[rank]])  # of equals, max takes the first


def reference(standings: Mapping[int, Standing], step: int, ranks: int) -> int:
    """The rank whose state the others take."""
    sound = {rank: standing.state for rank, standing in standings.items() if standing.sound}
    held = sound or {rank: standing.state for rank, standing in standings.items()}
    state = held[holds_most(held, step, ranks)]
    return min(rank for rank in held if held[rank] == state)


@dataclass
class _Meeting:
    """This rank's part in a meeting after ``step``: a standing by round, and who has heard the last one."""

    step: int
    number: int
    standings: list[Standing] = field(default_factory=list)
    members: set[int] = field(default_factory=set)
    heard_by: set[int] = field(default_factory=set)
    left_at: float | None = None


class Meetings:
    """Publishes own standings and asks for the others'.

    Args:
        reliable: the path to the other ranks.
        rank: the own one.
        live: gives the peers that answer, as far as is known.
        moment: after which step the state here stands.
        inside: whether this process takes part in the job.
    """

    def __init__(
        self,
        reliable: Reliable,
        rank: int,
        live: Callable[[], Collection[int]],
        moment: Moment,
        inside: Callable[[], bool] = lambda: True,
    ) -> None:
        self._reliable, self._rank, self._live, self._moment, self._inside = reliable, rank, live, moment, inside
        #: peers of which no process of the job was there when they were asked last
        self.unreachable: set[int] = set()
        self._changed = threading.Condition()
        self._meetings: list[_Meeting] = []
        self._begun = 0
        self._numbers: dict[int, int] = {}  # of the present meeting at its members
        self._over = False
        reliable.serve(_NAME, of_form(_ASK, self._answer))
        reliable.before_close(self._see_off)

    def publish(self, step: int, number: int, standing: Standing) -> None:
        """The own standing in round ``number`` of the meeting after ``step``; round 0 begins a meeting."""
        with self._changed:
            if number == 0:
                self._begun = self._begun % 0xFFFF + 1
                self._meetings = [*self._meetings[1 - _KEPT :], _Meeting(step, self._begun)]
                self._numbers = {}
            self._meetings[-1].standings.append(standing)
            self._meetings[-1].heard_by.clear()
            self._changed.notify_all()

    def gather(self, step: int, number: int, members: Collection[int], until: float) -> dict[int, Standing]:
        """The standings of ``members`` in a round, as far as they come until ``until`` (monotonic seconds)."""
        heard = ask_each(sorted(members), lambda rank: self._ask(rank, step, number, until), "tailbound-meeting")
        with self._changed:
            self._meetings[-1].members |= heard.keys()
        return heard

    def leave(self) -> None:
        """The meeting is over here: the last standing is final."""
        with self._changed:
            self._meetings[-1].left_at = time.monotonic()
            self._changed.notify_all()

    def _ask(self, rank: int, step: int, number: int, until: float) -> Standing | None:
        while (left := until - time.monotonic()) > 0 and not self._over:
            wait = min(_POLL, int(left * 1000))
            request = _ASK.pack(step, number, self._rank, wait, self._numbers.get(rank, 0))
            try:
                body = bytes(self._reliable.pull(rank, _NAME, request, wait / 1000 + 1, _ANSWER_MOST))
            except TransportError as error:
                absent = isinstance(error, Refusal | Unreachable)  # who refuses is about to register, or outside
                (self.unreachable.add if absent else self.unreachable.discard)(rank)
                if rank not in self._live():
                    return None
                time.sleep(min(_LOOK, left))
                continue
            self.unreachable.discard(rank)
            if len(body) < _HEAD.size or (len(body) - _HEAD.size) % DIGEST or body[0] == _ELSEWHERE:
                return None
            if body[0] == _HERE:
                _, flags, self._numbers[rank], state, form = _HEAD.unpack_from(body)
                slices = tuple(body[at : at + DIGEST] for at in range(_HEAD.size, len(body), DIGEST))
                return Standing(bool(flags & 1), state, form, slices, bool(flags & 2))
        return None

    # -- answering, in threads of the reliable path

    def _answer(self, step: int, number: int, asker: int, wait: int, which: int) -> list[bytes]:
        if not self._inside():
            raise Refusal("this process has no part in the job yet")
        until = time.monotonic() + min(wait, _POLL) / 1000
        with self._changed:
            while not self._over and not self._past(step):
                found = (m for m in reversed(self._meetings) if m.step == step and which in (0, m.number))
                meeting = next(found, None)
                standing = self._standing(meeting, number)
                if meeting is not None and standing is not None and (which or asker not in meeting.heard_by):
                    if number >= len(meeting.standings) - 1:  # by number: two rounds may show one and the same standing
                        meeting.heard_by.add(asker)
                        self._changed.notify_all()
                    return [standing.pack(meeting.number)]
                left = until - time.monotonic()
                if left <= 0:
                    return [_HEAD.pack(_NOT_YET, 0, 0, b"", b"")]
                self._changed.wait(min(left, _LOOK))
        return [_HEAD.pack(_ELSEWHERE, 0, 0, b"", b"")]

    @staticmethod
    def _standing(meeting: _Meeting | None, number: int) -> Standing | None:
        if meeting is None:
            return None
        if number < len(meeting.standings):
            return meeting.standings[number]
        return meeting.standings[-1] if meeting.left_at is not None else None

    def _past(self, step: int) -> bool:
        now = self._moment.step
        met = any(meeting.step == step for meeting in self._meetings)
        return now is not None and step_distance(now, step) > 0 and not met

    def _see_off(self) -> None:
        """Before the path is closed: lets those who met this rank lately hear its last standing."""
        with self._changed:
            last = self._meetings[-1] if self._meetings else None
            if last is not None and last.left_at is not None:
                self._changed.wait_for(
                    lambda: not (last.members - last.heard_by).intersection(self._live()),
                    max(0.0, last.left_at + LINGER - time.monotonic()),
                )
            self._over = True
            self._changed.notify_all()
