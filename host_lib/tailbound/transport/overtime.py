"""A deadline that moves on, and what waiting past it may cost: a small share of the training time (clock-7c, clock-29).

A deadline follows what ops usually take. Where threads wait for a core, or a neighbour takes the processors away for a
moment, an op takes longer than that without anything being lost, and its rows are worth more than a short tail. So a
deadline moves on while rows come, or while a rank who is missed may still live, and every rank keeps a balance:
``SHARE`` of the time that passes is saved up, at most ``MOST``, and what ops have waited past their deadlines is taken
off. A link that stays slow, or a rank that is late in every step, uses it up once; then deadlines end ops as if there
were none of it.

Who lives is told by marks that rise and by words; who is missed is asked for one (``transport.recovery``). A rank
that waits for a core is as silent as one that was stopped, so how long a silence may last is learned from how long
ranks have left questions open, and from what the own thread has to wait for a core: where that is milliseconds, a rank
that was stopped costs half a deadline and no more. Questions are rare, and own waits are seen in every op; hosts of one
job are busy alike, as a rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tailbound.transport.config import FLOOR, MS

#: Part of the time that waiting past deadlines may take, what is saved up of it at most, and what there is to begin
#: with; with another floor of deadlines in proportion to that.
SHARE, MOST, FIRST = 0.1, 1000 * MS, 500 * MS
#: Of it what rows that are asked for again leave for ranks of which more is missing: a per cent of losses in every op
#: would use it up.
RESERVE = MOST // 2
#: Answers and ops of which the slowest counts, how many times as long a silence may be (what is rare is seen too late),
#: and how long either lasts at most: after more a rank was stopped, which says nothing about the next time.
_KEPT, _MARGIN, LONGEST = 64, 2, 400 * MS
#: Part of the wake-ups that ``late`` covers.
_COVER = 0.95


@dataclass(slots=True)
class Extension:
    """A deadline that moves on by a tenth if that will do, up to ``start + stage_max`` (clock-7c, clock-11).

    Moved on as long as rows come at all, it would let a link that foreign traffic leaves a tenth of hold up all ranks
    for seconds. So the last tenth must have brought as many rows as are still missing, or waiting on must be worth its
    time (``Overtime``).

    Attributes:
        due: when it ends the stage, as far as is known now.
        promised: and before it was ever moved on.
        length: from the start of the stage to ``promised``.
        limit: when it ends the stage whatever comes.
        over: when it ended the stage, but for rows that can still be had; 0: it has not.
        step: by how much it moves on.
        progress: as of the last look; -1: no rank has looked yet.
    """

    due: int = 0
    promised: int = 0
    length: int = 0
    limit: int = 0
    over: int = 0
    step: int = 1
    progress: int = -1

    def start(self, start: int, length: int, stage_max: int, least_step: int = 1) -> None:
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
        left: int,
        *,
        unwatched: bool = True,
        worth: Callable[[bool], bool] | None = None,
    ) -> bool:
        """Whether the deadline has passed, moving it on if ``progress`` rose by ``left`` since it was last looked at.

        ``unwatched`` is the answer where no rank looked in the last tenth: True, it is over (a launch that came too
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


class Overtime:
    """One rank's balance of waiting past deadlines, and how long ranks that live say nothing.

    Args:
        now: the time, ns; saving begins.
        floor: see ``Config``.

    Attributes:
        reserve: what rows that are asked for again leave of the balance, ns.
        waited: ns that ops have waited past their deadlines in all.
        lacked: ns that the own thread has waited for a core in all, as the kernel counts it.
        lack: and between two turns of one of the last ops at most: so long it may leave a question open.
        answer: how long the slowest of the last answers took, ns.
        held_up: ns that the own thread has waited for Python's interpreter lock (GIL) in all, with ops on their way.
    """

    def __init__(self, now: int, floor: int = FLOOR) -> None:
        self.waited = self.lacked = self.lack = self.answer = self.held_up = 0
        self._floor, self._most, self.reserve = floor, MOST * floor // FLOOR, RESERVE * floor // FLOOR
        self._saved, self._at = FIRST * floor / FLOOR, now
        self._until = 0
        self._asked: dict[int, int] = {}  # since when a rank has left a question open
        self._answers: deque[int] = deque(maxlen=_KEPT)
        self._late: deque[int] = deque(maxlen=_KEPT)
        self._lacks: deque[int] = deque(maxlen=_KEPT)
        self._latest = 0  # the longest wait since the last op

    # -- who lives ----------------------------------------------------------------------------------------------------

    def asked(self, rank: int, now: int, heard: int) -> None:
        """``rank``, last heard of at ``heard``, has been asked for a word."""
        if heard > self._asked.get(rank, heard):
            self.spoke(rank, heard)
        self._asked.setdefault(rank, now)

    def spoke(self, rank: int, now: int) -> None:
        """``rank`` said something at ``now``."""
        since = self._asked.pop(rank, None)
        if since is not None and now - since <= LONGEST:
            self._answers.append(now - since)
            self.answer = max(self._answers)

    def open_since(self, rank: int) -> int:
        """When ``rank`` was first asked what it has not answered yet, ns; 0: it was not."""
        return self._asked.get(rank, 0)

    def silence(self, clock: Extension) -> int:
        """How long a rank who is missed at the deadline of ``clock`` may well say nothing, ns."""
        return max(self._floor, clock.length // 2, min(LONGEST, _MARGIN * max(self.answer, self.lack)))

    # -- the balance --------------------------------------------------------------------------------------------------

    def left(self, now: int) -> int:
        """What may still be waited, ns; may be asked by any thread."""
        return int(min(self._most, self._saved + SHARE * max(0, now - self._at)))

    def worth(self, clock: Extension, now: int, heard: int, reserve: int = 0) -> bool:
        """Whether to wait one step past the deadline of ``clock``.

        Args:
            clock: the deadline.
            now: the time, ns.
            heard: when rows came last, or anything at all of a rank who is missed; 0: never.
            reserve: what is to be left of the balance.
        """
        if not heard or now - heard > self.silence(clock):
            return False
        return self.left(now) >= now - clock.promised + clock.step + reserve

    def charge(self, clock: Extension, now: int) -> None:
        """Takes off what a stage that ended at ``now`` has waited past its deadline, until this was over.

        Time is paid for once, however many ops wait in it.
        """
        now = clock.over or now
        if clock.promised and now > clock.promised:
            cost = max(0, now - max(clock.promised, self._until))
            self._saved, self._at = max(0.0, self.left(now) - cost), max(now, self._at)
            self._until = max(self._until, now)
            self.waited += cost

    # -- the own thread -----------------------------------------------------------------------------------------------

    def woke(self, late: int, held_up: int = 0) -> None:
        """The own thread woke up ``late`` ns after the time that it had asked for, ``held_up`` of these for the GIL."""
        self.held_up += held_up
        self._late.append(max(0, late))
        if late <= LONGEST:  # after more it was stopped
            self._latest = max(self._latest, late)

    def turned(self, run_queue: int | None) -> None:
        """A turn of the own thread begins, in which it answers.

        Args:
            run_queue: what it has waited for a core since it began, ns (``transport.cores``); None: the kernel does not
                tell, so that only late wake-ups do. A hypervisor's share is in these alone.
        """
        if run_queue is not None:
            self._latest = max(self._latest, run_queue - self.lacked)
            self.lacked = run_queue

    def ended(self) -> None:
        """An op has ended."""
        self._lacks.append(min(LONGEST, self._latest))
        self.lack, self._latest = max(self._lacks), 0

    @property
    def late(self) -> int:
        """How late the own thread wakes up: what nearly no wake-up of late exceeds, ns."""
        return sorted(self._late)[int(_COVER * (len(self._late) - 1))] if self._late else 0
