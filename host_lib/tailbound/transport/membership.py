"""Who takes part: suspects, dead ranks, those who said goodbye, and those who hold.

The rules are clock-1, clock-8 and clock-14 to clock-16. Pure state with the time passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set

from tailbound.transport.config import MS
from tailbound.transport.steps import OLD, STEP_MASK, step_distance, step_of
from tailbound.wire.schema import op_label, serial_distance


def majority(voters: int) -> int:
    """How many of ``voters`` (ranks, self included) start a stage clock: more than half (clock-1)."""
    return voters // 2 + 1


class Suspicion:
    """Counts consecutive misses of every rank in one kind of stage.

    One counter for both lost rows of live but slow ranks in simulation, two separate ones none: a rank whose
    contributions come late may well publish in time, and the other way round.

    Args:
        ranks, own: number of ranks and own rank.
        after: consecutive misses that make a suspect.
        changed: called when a rank has missed enough, or no longer; it is to call ``judge``.

    Attributes:
        suspects: ranks suspected now. A plain attribute, since it is read a hundred times an op.
        first_missed: label of the op that a suspect was absent from first in the present row of misses, by rank.
    """

    def __init__(self, ranks: int, own: int, after: int, changed: Callable[[], None]) -> None:
        self._misses, self.first_missed = [0] * ranks, [0] * ranks
        self._own, self._after, self._changed = own, after, changed
        self.suspects: frozenset[int] = frozenset()

    @property
    def counting(self) -> bool:
        """Whether a rank has missed something since its last row in time."""
        return any(self._misses)

    def judge(self, voters: Set[int]) -> None:
        """Suspects ranks that have missed enough; but no voter where the others would be no quorum (clock-14)."""
        silent = {rank for rank in range(len(self._misses)) if self.suspected(rank)}
        needed = len(voters - silent) < majority(len(voters))
        self.suspects = frozenset(silent - voters if needed else silent)

    def suspected(self, rank: int) -> bool:
        """Whether ``rank`` has missed enough, though it may be needed for a quorum."""
        return self._misses[rank] >= self._after

    def age(self, step: int) -> None:
        """Dates what is old in ``step`` back (``OLD``), before it would seem to be still to come."""
        oldest = op_label(step - OLD & STEP_MASK, 0)
        self.first_missed = [op if step_distance(step, step_of(op)) <= OLD else oldest for op in self.first_missed]

    def absent(self, absent: Iterable[int], op: int = 0, idle: Collection[int] = ()) -> set[int]:
        """Takes the ranks absent from one stage of ``op``, in which all others were present or ``idle``.

        Returns:
            Ranks that have become suspect by this.
        """
        gone, new = set(absent), set[int]()
        for rank in range(len(self._misses)):
            known = self.suspected(rank)
            if rank in gone and rank != self._own:
                if not self._misses[rank]:
                    self.first_missed[rank] = op
                self._misses[rank] += 1
                if self.suspected(rank) and not known:
                    new.add(rank)
            elif rank not in idle and (not known or serial_distance(op, self.first_missed[rank]) >= 0):
                self.clear(rank)  # else it died after it had sent to this op
        if new:
            self._changed()
        return new

    def accuse(self, rank: int, op: int, *, anew: bool = False) -> bool:
        """Suspects ``rank`` at once, from ``op`` on; returns whether it was not suspected before.

        Args:
            anew: who was suspected before is so from ``op`` on, too: rows of ops before it do not clear it.
        """
        known = self.suspected(rank)
        if not known or anew:
            self._misses[rank], self.first_missed[rank] = self._after, op
        if not known:
            self._changed()
        return not known

    def clear(self, rank: int) -> None:
        """A row of ``rank`` met its deadline."""
        known, self._misses[rank] = self.suspected(rank), 0
        if known:
            self._changed()


#: A hold lasts this long after its last packet (clock-16: silence ends it), and is repeated four times as often.
HOLD_SILENCE = 200 * MS
HOLD_EVERY = HOLD_SILENCE // 4
#: Steps without a sign of life after which a suspect counts as dead (clock-15).
_DEAD_AFTER = 2
#: A time that no op is launched after, ns.
_NEVER = 1 << 63


class Membership:
    """What this rank knows about the others' part in the job.

    Args:
        ranks, rank: number of ranks and own rank.
        after: consecutive misses that make a suspect (clock-14).
        hold_max: ns for which a hold is respected at most (clock-16).

    Attributes: plain ones, worked out when they change.
        gone: ranks that have said goodbye.
        ended: ranks whose processes are known to have ended without one, until they are back.
        voters: all other ranks, of which a majority is a quorum (clock-38).
        here: peers that have not said goodbye.
        suspects: ranks suspected in one half or both.
        live: peers that are neither suspect nor gone: a seal waits for their contributions (clock-1, clock-8).
        owners: peers whose results a receiver waits for.
        holds: since when a rank holds, and when it said so last, by rank.
    """

    def __init__(self, ranks: int, rank: int, after: int = 3, hold_max: int = 60_000 * MS) -> None:
        self.rank, self.ranks = rank, ranks
        self.peers = [(rank + i) % ranks for i in range(1, ranks)]
        self.gone: set[int] = set()
        self.ended: set[int] = set()
        self.voters = set(range(ranks))
        self.contribution, self.result = (Suspicion(ranks, rank, after, self._sort) for _ in range(2))
        #: the last op of those who have gone, until that is told
        self.left: dict[int, int] = {}
        #: counts changes of who takes part
        self.changes = 0
        self._hold_max = hold_max
        self._heard_step: dict[int, int] = {}
        self._before: dict[int, int] = {}  # the op before the first one of a rank's process, if it has come back
        self.holds: dict[int, tuple[int, int]] = {}
        self._back: int | None = None  # the step in which this rank was away last; since when it runs, ns
        self._awake = _NEVER
        self.here: list[int] = []
        self._sort()

    def _sort(self) -> None:
        self.changes += 1
        halves = self.contribution, self.result
        self.ended = {r for r in self.ended if all(half.suspected(r) for half in halves)}
        self.voters = set(range(self.ranks)) - self.gone - self.ended
        for half in halves:
            half.judge(self.voters)
        first, second = self.contribution.suspects, self.result.suspects
        here = [p for p in self.peers if p not in self.gone]
        if here != self.here:
            self.here = here  # whoever has followed it knows it again
        self.suspects = first | second
        self.live = [p for p in here if p not in first]
        self.owners = [p for p in here if p not in second]

    def dead(self, step: int, after: int = _DEAD_AFTER) -> set[int]:
        """Ranks suspect in a half that have not been heard for so many steps before ``step`` (clock-15).

        One half is enough: a rank without rows has no contributions to miss, and no rank misses results of its own.
        This rank may have missed words while it was away itself, so that silence counts from its return on.
        """
        heard, most = self._heard_step, step if self._back is None else step_distance(step, self._back)
        silent = {r: min(most, step_distance(step, heard[r])) if r in heard else most for r in self.suspects}
        return {r for r, steps in silent.items() if steps >= after}

    def alive(self, step: int, after: int = _DEAD_AFTER) -> list[int]:
        """Peers that are neither dead nor gone: those that answer, as far as is known in ``step``; see ``dead``."""
        dead = self.dead(step, after)
        return [p for p in self.here if p not in dead]

    def heard(self, rank: int, step: int) -> None:
        """The newest op that a packet of ``rank`` has named is of ``step``; to be called again and again."""
        before = self._heard_step.get(rank)
        if before is None or (step != before and step_distance(step, before) > 0):
            self._heard_step[rank] = step

    def age(self, step: int) -> None:
        """Dates what is old in ``step`` back (``OLD``), before it would seem to be still to come."""
        for rank, heard in self._heard_step.items():
            if step_distance(step, heard) > OLD:
                self._heard_step[rank] = step - OLD & STEP_MASK
        if self._back is not None and step_distance(step, self._back) > OLD:
            self._back = None
        self.left = {r: op for r, op in self.left.items() if step_distance(step, step_of(op)) <= OLD}
        self._before = {r: op for r, op in self._before.items() if step_distance(step, step_of(op)) <= OLD}
        for half in (self.contribution, self.result):
            half.age(step)

    def died(self, rank: int, op: int) -> bool:
        """The process of ``rank`` has ended, as of ``op``; returns whether it was not suspected before.

        Rows that it had sent ahead may still come, and must not bring it back: those count that are of two steps later
        than all it has named.
        """
        self.holds.pop(rank, None)
        step = step_of(op)
        last = max((step, self._heard_step.get(rank, step)), key=lambda one: step_distance(one, step))
        from_ = op_label(last + _DEAD_AFTER & STEP_MASK, 0)
        new = self.contribution.accuse(rank, from_, anew=True) | self.result.accuse(rank, from_, anew=True)
        self.ended.add(rank)
        self._sort()
        return new

    @property
    def majority(self) -> int:
        """How many voters are a quorum, at least."""
        return majority(len(self.voters))

    def quorum(self, ranks: Collection[int]) -> bool:
        """Whether ``ranks`` are a majority of the voters (clock-38)."""
        return len(self.voters.intersection(ranks)) >= self.majority

    def bye(self, rank: int, op: int) -> None:
        """``rank`` has said goodbye, after ``op``: no rank waits for it any more."""
        if serial_distance(op, self._before.get(rank, op)) < 0:
            return  # it is of the process before the present one
        if rank not in self.gone:
            self.left[rank] = op
        self.gone.add(rank)
        self._sort()
        self.holds.pop(rank, None)

    def back(self, rank: int, step: int) -> None:
        """``rank`` takes part again from ``step`` on, as a new process: nothing of the old one counts."""
        self.present(rank)
        self.contribution.clear(rank)
        self.result.clear(rank)
        self._heard_step[rank] = step
        self._before[rank] = (op_label(step, 0) - 1) & 0xFFFFFFFF

    def present(self, rank: int) -> None:
        """``rank`` has just answered: it has not said goodbye, nor does it hold, whatever was heard of it."""
        self.holds.pop(rank, None)
        if rank in self.gone:
            self.gone.discard(rank)
            self.left.pop(rank, None)
            self._sort()

    def woke(self, step: int, now: int = _NEVER) -> None:
        """This rank was away: it blames none by ops of ``step`` that it launched by ``now``, ns (clock-14)."""
        self._back, self._awake = step, now

    def blames(self, step: int, launched: int = 0) -> bool:
        """Whether ranks absent from an op of ``step`` count, ``launched`` then (ns; 0: not yet) (clock-14)."""
        return self._back is None or step_distance(step, self._back) > 0 or launched > self._awake

    def hold(self, rank: int, now: int, *, again: bool = False) -> None:
        """``rank`` is alive and between steps: it is waited for, ``hold_max`` in all (clock-16).

        Args:
            again: the same word came before; it prolongs a hold and begins none, since anybody may have repeated it.
        """
        since, last = self.holds.get(rank, (now, now))
        if not again or rank in self.holds:
            self.holds[rank] = since if again or now - last <= HOLD_SILENCE else now, now

    def unhold(self, rank: int) -> None:
        """``rank`` goes on."""
        self.holds.pop(rank, None)

    def holding(self, now: int) -> int:
        """Until when the hold of a rank lasts that is waited for; 0 if none of them holds."""
        held = (times for rank, times in self.holds.items() if rank not in self.gone and rank not in self.suspects)
        until = max((min(last + HOLD_SILENCE, since + self._hold_max) for since, last in held), default=0)
        return until if until > now else 0
