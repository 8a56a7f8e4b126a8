"""One question between ranks, "what is your state", and its one answer (clock-21, clock-33).

A rank asks for one of three *topics*: the present standing (whether it is sound, and DDP's buckets); the digest of one
slice after a step; or a round of a meeting, in which all ranks that synchronize after one step compare all that they
hold.

In each round of a meeting a rank publishes its standing and asks all others for theirs:

- Ranks that hold something else than the *reference* take it, and all meet again in the next round. The reference
  follows from the standings alone: the state that most sound ranks hold (most ranks, if none is sound). Of equally many
  it is the first in an order that begins with another rank after every step. Buffers are those of its lowest rank.
- If all hold the same, each rank publishes its verdict in one more round. The answer combines all verdicts.
- A standing can still be asked for after the meeting, because other ranks may be slower. ``close`` waits for them.
- A meeting has a number at each rank, since ranks may meet twice after one step. The first round is asked without it.
- A rank that went past the step without synchronizing says so. All ranks of the job are asked, also suspects.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tailbound.collective.comeback import Part, ask_each, of_form
from tailbound.collective.communicator import Communicator
from tailbound.errors import TransportError
from tailbound.torch.moment import Moment
from tailbound.torch.replica import DIGEST
from tailbound.transport.reliable import Refusal, Unreachable
from tailbound.transport.steps import step_distance

_NAME = "standing"
#: Rank and topic, step, slice or round, ms to wait, number of the meeting (0: the newest), the asker's digest.
_ASK = struct.Struct("!HBIHHH16s")
_NOW, _SLICE, _ROUND = range(3)
#: Kind of answer; number of the meeting; flags, two digests. Digests of slices follow.
_HEAD = struct.Struct("!BHB16s16s")
_HERE, _NOT_YET, _ELSEWHERE = range(3)
_SOUND, _WELL = 1, 2
_ANSWER_MOST = 1 << 16
#: Seconds for the answer about the present, and about a slice: a peer may end the step later.
_SAY, _SLICE_WAIT = 0.25, 2.0
#: Milliseconds that a rank lets others wait for its standing before they have to ask again.
_POLL = 2000
#: Seconds between two looks whether the step is past here, and between two attempts at a rank that cannot be reached.
_LOOK = 0.05
#: Seconds after a meeting within which a rank that closes waits for the others to have heard its last standing.
LINGER = 5.0
#: Meetings that are kept.
_MEETINGS = 2


class Standing(NamedTuple):
    """What a rank says of its state."""

    sound: bool  #: the rank has missed nothing since it was last equal to the others
    well: bool = False  #: its verdict: all ranks that have not died are equal
    state: bytes = bytes(DIGEST)  #: digest of parameters and optimizers, or of the slice that was asked for
    form: bytes = bytes(DIGEST)  #: of optimizers' form, ``extra_state``; for a slice ``rates``; now, of DDP's buckets
    slices: tuple[bytes, ...] = ()  #: digests of all slices with buffers, in a meeting

    def holds(self, other: Standing) -> bool:
        """Whether both are the same to the bit, buffers included."""
        return self.state == other.state and self.slices == other.slices

    def pack(self, meeting: int = 0) -> bytes:
        """As bytes."""
        flags = self.sound * _SOUND | self.well * _WELL
        return _HEAD.pack(_HERE, meeting, flags, self.state, self.form) + b"".join(self.slices)


def live(communicator: Communicator, *silent: int) -> set[int]:
    """The peers that answer, as far as is known; ``silent``: steps after which a suspect does not (``Membership``)."""
    job = communicator.job
    return set(job.membership.alive(job.steps.own, *silent)) - {communicator.config.rank}


def most_held(held: Mapping[int, Hashable], step: int, ranks: int) -> int:
    """The rank that holds what most hold: of equals the first in an order that begins with another rank by ``step``."""
    counts = Counter(held.values())
    order = sorted(held, key=lambda rank: (rank - step) % ranks)
    return max(order, key=lambda rank: counts[held[rank]])  # of equals, max takes the first


def reference(standings: Mapping[int, Standing], step: int, ranks: int) -> int:
    """The rank whose state the others take in a meeting."""
    sound = {rank: standing.state for rank, standing in standings.items() if standing.sound}
    held = sound or {rank: standing.state for rank, standing in standings.items()}
    state = held[most_held(held, step, ranks)]
    return min(rank for rank in held if held[rank] == state)


@dataclass
class _Meeting:
    """This rank's part in a meeting after ``step``: a standing by round, and the ranks that heard the last one."""

    step: int
    number: int
    standings: list[Standing] = field(default_factory=list)
    members: set[int] = field(default_factory=set)
    heard_by: set[int] = field(default_factory=set)
    left_at: float | None = None

    def standing(self, number: int) -> Standing | None:
        """That of a round; after the end the last one stands for all later rounds."""
        if number < len(self.standings):
            return self.standings[number]
        return self.standings[-1] if self.left_at is not None else None


class Standings:
    """Asks other ranks for their standings, and answers them.

    ``own``: gives the present standing; ``of_slice``: that of a slice, from its step, number, seconds to wait, and the
    asker's digest.
    """

    def __init__(
        self,
        communicator: Communicator,
        moment: Moment,
        own: Callable[[], Standing],
        of_slice: Callable[[int, int, float, bytes], Standing],
    ) -> None:
        self._communicator, self._moment, self._own, self._of_slice = communicator, moment, own, of_slice
        self._reliable, self._rank = communicator.reliable, communicator.config.rank
        self.unreachable: set[int] = set()  #: peers of which no process of the job was there when they were asked last
        self._changed = threading.Condition()
        self._meetings: list[_Meeting] = []
        self._begun = 0
        self._numbers: dict[int, int] = {}  # of the present meeting at its members
        self._over = False
        self._reliable.serve(_NAME, of_form(_ASK, self._answer))
        self._reliable.before_close(self._see_off)

    def now(self, ranks: Collection[int]) -> dict[int, Standing]:
        """The present standings of ``ranks``, as far as they answer at once."""
        return ask_each(ranks, lambda rank: self._pull(rank, _NOW, 0, 0, _SAY)[2], "tailbound-standing")

    def slices(self, ranks: Collection[int], step: int, which: int, own: bytes) -> dict[int, Standing]:
        """Those of slice ``which`` after ``step``, of the sound ones of ``ranks`` that stand there; ``own``: digest."""
        wait = _SLICE_WAIT
        return ask_each(ranks, lambda rank: self._pull(rank, _SLICE, step, which, wait, own=own)[2], "tailbound-slice")

    def publish(self, step: int, number: int, standing: Standing) -> None:
        """The own standing in round ``number`` of the meeting after ``step``; round 0 begins a meeting."""
        with self._changed:
            if number == 0:
                self._begun = self._begun % 0xFFFF + 1
                self._meetings = [*self._meetings[1 - _MEETINGS :], _Meeting(step, self._begun)]
                self._numbers = {}
            self._meetings[-1].standings.append(standing)
            self._meetings[-1].heard_by.clear()
            self._changed.notify_all()

    def gather(self, step: int, number: int, members: Collection[int], until: float) -> dict[int, Standing]:
        """The standings of ``members`` in a round, as far as they come until ``until`` (monotonic seconds)."""
        heard = ask_each(sorted(members), lambda rank: self._meet(rank, step, number, until), "tailbound-meeting")
        with self._changed:
            self._meetings[-1].members |= heard.keys()
        return heard

    def leave(self) -> None:
        """The meeting is over here: the last standing is final."""
        with self._changed:
            self._meetings[-1].left_at = time.monotonic()
            self._changed.notify_all()

    def _meet(self, rank: int, step: int, number: int, until: float) -> Standing | None:
        while (left := until - time.monotonic()) > 0 and not self._over:
            try:
                what, meeting, standing = self._pull(rank, _ROUND, step, number, left, self._numbers.get(rank, 0))
            except TransportError as error:
                absent = isinstance(error, Refusal | Unreachable)  # who refuses is about to register, or outside
                (self.unreachable.add if absent else self.unreachable.discard)(rank)
                if absent and rank not in live(self._communicator):
                    return None
                time.sleep(min(_LOOK, left))
                continue
            self.unreachable.discard(rank)
            if what == _ELSEWHERE:
                return None
            if what == _HERE:
                self._numbers[rank] = meeting
                return standing
        return None

    def _pull(
        self, rank: int, topic: int, step: int, number: int, seconds: float, meeting: int = 0, own: bytes = b""
    ) -> tuple[int, int, Standing]:
        """Kind of answer, number of the meeting, and the standing."""
        wait = min(_POLL, int(seconds * 1000))
        request = _ASK.pack(self._rank, topic, step, number, wait, meeting, own)
        timeout = seconds if topic == _NOW else wait / 1000 + 1
        body = bytes(self._reliable.pull(rank, _NAME, request, timeout, _ANSWER_MOST))
        if len(body) < _HEAD.size or (len(body) - _HEAD.size) % DIGEST:
            raise TransportError(f"rank {rank} answers {len(body)} bytes as its standing: run one version on all ranks")
        what, meeting, flags, state, form = _HEAD.unpack_from(body)
        slices = tuple(body[at : at + DIGEST] for at in range(_HEAD.size, len(body), DIGEST))
        return what, meeting, Standing(bool(flags & _SOUND), bool(flags & _WELL), state, form, slices)

    # -- answering, in threads of the reliable path

    def _answer(
        self, asker: int, topic: int, step: int, number: int, wait: int, meeting: int, theirs: bytes
    ) -> list[bytes]:
        if self._communicator.part == Part.OUTSIDE:
            raise Refusal("this process has no part in the job yet")
        seconds = min(wait, _POLL) / 1000
        if topic != _ROUND:
            return [(self._own() if topic == _NOW else self._of_slice(step, number, seconds, theirs)).pack()]
        until = time.monotonic() + seconds
        with self._changed:
            while not self._over and not self._past(step):
                if (answer := self._of_round(asker, step, number, meeting)) is not None:
                    return [answer]
                if (left := until - time.monotonic()) <= 0:
                    return [_HEAD.pack(_NOT_YET, 0, 0, b"", b"")]
                self._changed.wait(min(left, _LOOK))
        return [_HEAD.pack(_ELSEWHERE, 0, 0, b"", b"")]

    def _of_round(self, asker: int, step: int, number: int, which: int) -> bytes | None:
        found = (m for m in reversed(self._meetings) if m.step == step and which in (0, m.number))
        meeting = next(found, None)
        standing = meeting.standing(number) if meeting is not None else None
        if meeting is None or standing is None or (not which and asker in meeting.heard_by):
            return None
        if number >= len(meeting.standings) - 1:  # by number: two rounds may show one and the same standing
            meeting.heard_by.add(asker)
            self._changed.notify_all()
        return standing.pack(meeting.number)

    def _past(self, step: int) -> bool:
        now = self._moment.step
        met = any(meeting.step == step for meeting in self._meetings)
        return now is not None and step_distance(now, step) > 0 and not met

    def _see_off(self) -> None:
        """Before the path is closed: lets those who met this rank lately hear its last standing."""
        with self._changed:
            last = self._meetings[-1] if self._meetings else None
            members = self._communicator.job.membership
            if last is not None and last.left_at is not None:
                self._changed.wait_for(
                    lambda: not last.members - last.heard_by - members.gone,  # a suspect may have met, too
                    max(0.0, last.left_at + LINGER - time.monotonic()),
                )
            self._over = True
            self._changed.notify_all()
