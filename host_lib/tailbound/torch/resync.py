"""Replicas that have drifted apart come together again, slice by slice and point to point (clock-21, codec-13).

Results that are lost for good leave a rank with another average than the others'. A rank that has missed nothing since
it was last equal is *sound*: it compares digests now and then (``digests``), and answers. The others measure how far
they are from each other (1 KiB and one slice a step), and take slices from a sound rank or, where there is none, from
ranks in turn:

- Time is cut into windows of Q steps, Q being the number of slices; in step s of a round everybody takes slice s mod Q
  as it is after step s from the same donor, which keeps its own. A round is held in the first window after every
  ``period`` steps, and in the next window when the drift is above ``threshold`` here or at a rank that was asked.
- A slice is taken at the boundary after step s, when both replicas stand after the same step; the receiver waits for it
  for a small part of a step. What does not come is taken in another round, from another donor.
- A rank that got all slices of a round is sound again if the donors were either all sound, or none of the ranks was
  and all of them took part in the round, going by the same set of live ranks: who takes turns with others, or keeps
  slices that nobody takes, has other slices. There are as many slices as ranks at least, so that every rank is asked.
  Who was alone in a round tries again, and those who have noticed come, too.
- Nothing is collective, nobody waits for more than one peer, and every wait ends by itself.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import statistics
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import seed_of
from tailbound.errors import ConfigError, TransportError
from tailbound.torch.digests import Check, Digests
from tailbound.torch.drift import BINS, Drift
from tailbound.torch.meeting import DIGEST, Meetings, Standing, reference
from tailbound.torch.moment import Moment
from tailbound.torch.replica import Replica
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.steps import step_distance

log = logging.getLogger("tailbound")

_ASK = struct.Struct("!IHB")
_WHOLE = struct.Struct("!IIB")
_MARK = struct.Struct("!B8s8s32s")
_SOUND, _WANTS, _TURNS = 1, 2, 4
#: Seconds that a donor waits for its own step to end before it refuses, and in steps if these are long.
_PATIENCE, _PATIENT_STEPS = 5.0, 4
#: A receiver waits for a slice at least this long, in seconds: steps may be shorter than a round trip.
_LEAST_WAIT = 0.002
#: A round that got less than half of the slices lets the next one wait twice as long, up to so many times.
_STRETCH_MOST = 4
#: Rounds of a meeting: what one of them leaves unequal, the next takes.
_ROUNDS = 8


@dataclass
class _Slot:
    """What is asked for one step: a mark of slice ``which`` from ``donor``."""

    step: int
    which: int
    donor: int
    measure: bool
    ready: threading.Event = field(default_factory=threading.Event)
    digest: bytes | None = None
    layout: bytes = b""
    sound: bool = False
    turns: bool = False
    view: bytes = b""


class _Said(NamedTuple):
    """What a rank has said of itself in a step: whether it is sound."""

    step: int
    sound: bool


@dataclass
class _Round:
    """A round under way, in window ``window``.

    ``sound``: slices are taken from sound ranks only, else from all in turn. ``missed``: ops with missing results when
    it began. ``members``: who takes turns. ``counts``: every donor had the expected state, so that who has all
    slices is equal to the others. ``alone``: one that should take turns did not. ``equal``: slices that are equal now.
    ``unlike``: a donor whose optimizer keeps other tensors or plain values than the one here; -1: none.
    """

    window: int
    sound: bool
    missed: int
    members: frozenset[int]
    counts: bool = True
    alone: bool = False
    equal: set[int] = field(default_factory=set)
    unlike: int = -1


class Resync:
    """Keeps one replica equal to the others'.

    Args:
        reliable: the path to the other ranks.
        replica: the state.
        rank, ranks, cookie: of the job.
        live: gives the peers that answer, as far as is known.
        period: steps between two rounds; 0: none but for drift and on demand.
        threshold: relative drift at which a round is held in the next window.
        share: of a median step: so long a receiver waits for a slice.
        compare: compare digests while sound; False where another rank of this host does so for it.
    """

    def __init__(
        self,
        reliable: Reliable,
        replica: Replica,
        rank: int,
        ranks: int,
        cookie: int,
        live: Callable[[], Sequence[int]],
        *,
        period: int = 200,
        threshold: float = 0.01,
        share: float = 0.05,
        compare: bool = True,
    ) -> None:
        self.replica, self.moment, self.drift = replica, Moment(), Drift(replica.slices)
        self._reliable, self._rank, self._ranks, self._cookie, self._live = reliable, rank, ranks, cookie, live
        self._period, self._threshold, self._share, self._compare = period, threshold, share, compare
        self.counters: Counter[str] = Counter()
        self._missed = self._missed_before = 0  # ops with results that never came: now, and when last equal
        self._round: _Round | None = None
        self._ending: _Round | None = None
        self._slot: _Slot | None = None
        self._heard: list[_Said | None] = [None] * ranks  # by rank; written by the thread that asks
        self._told = self._again = False
        self._warned = -1  # the window of the last warning of other digests
        self._stretch = 1
        self._durations: deque[float] = deque(maxlen=32)
        self._boundary_at = 0.0
        self._tasks: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        replica.warm_up()
        reliable.before_close(self.moment.close)
        self._meetings = Meetings(reliable, rank, live, self.moment)
        self._digests = Digests(reliable, replica, self.moment, rank, ranks, live, lambda: self.sound, self._compared)
        reliable.serve("mark", self._answer_mark)
        reliable.serve("slice", self._answer_slice)
        reliable.serve("whole", self._answer_whole)
        self._thread = threading.Thread(target=self._run, name="tailbound-resync", daemon=True)
        self._thread.start()

    @property
    def sound(self) -> bool:
        """Whether this replica has missed nothing since it was last equal to the others."""
        return self._missed == self._missed_before

    @property
    def about_to_take(self) -> bool:
        """Whether the next boundary may change this replica; from one boundary to the next."""
        return self._ending is not None or (self._slot is not None and not self._slot.measure)

    def note_missing(self, rows: int) -> None:
        """An op has ended here without ``rows`` of its result rows."""
        if rows:
            self._missed += 1

    def unsound(self) -> None:
        """The state is not what the others have (after a jump, say)."""
        self._missed += 1

    def boundary(self, step: int, *, still: bool = True) -> None:
        """``step`` has ended: parameters stand still from now on until ``moment.disturb``. In the training thread.

        Args:
            still: nothing uses them now, so that a slice may be taken.
        """
        slot, self._slot = self._slot, None
        now = time.monotonic()
        if self._boundary_at:
            self._durations.append(now - self._boundary_at)
        self._boundary_at = now
        self.replica.freeze()
        if slot is not None and slot.step == step and not slot.measure and still:
            self._take(slot)
        if self._ending is not None:  # not before: to those who asked for its last slice this rank was not sound
            self._end_round(self._ending, step if still else None)
            self._ending = None
        self.moment.settle(step)
        if self._round is not None and (step + 1) % self.replica.slices == 0:
            self._ending, self._round = self._round, None
        self._plan(step + 1)

    def close(self) -> None:
        """Ends the thread and the reliable path that it may be waiting for; may be called twice.

        Others that are still synchronising with this rank are waited for, ``meeting.LINGER`` seconds at most.
        """
        self._tasks.put(None)
        self._reliable.close()
        self._digests.close(_PATIENCE)
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def stats(self) -> dict[str, Any]:
        """Counters and the estimated drift, in plain types."""
        return {
            "sound": self.sound,
            "drift": self.drift.relative,
            "slices": self.replica.slices,
            "in_round": self._round is not None,
            "counters": dict(sorted(self.counters.items())),
        }

    # -- rounds, in the training thread

    def _plan(self, step: int) -> None:
        slices = self.replica.slices
        which, window = step % slices, step // slices
        if which == 0 and not self.sound and (self._due(window) or self._told or self._again or self._drifted):
            self._begin_round(step, window)
        if self.sound:
            peer = self._rotated(step)[0]
            if self._compare and peer >= 0 and self._due(window):
                self._digests.ask(Check(step, which, peer, self._patience))
            return
        measure = self._round is None
        donor = self._rotated(step)[0] if self._round is None else self._donor(self._round, which + window, step)
        if donor == self._rank and self._round is not None:
            self._round.equal.add(which)  # the others take it from here
        if donor in (-1, self._rank) or (measure and not self._tasks.empty()):
            return
        slot = _Slot(step, which, donor, measure)
        self._slot = slot
        self._tasks.put(slot)

    @property
    def _drifted(self) -> bool:
        return not self.sound and self.drift.relative > self._threshold

    def _due(self, window: int) -> bool:
        slices, period = self.replica.slices, self._period
        return period > 0 and (window * slices) // period != ((window - 1) * slices) // period

    def _rotated(self, turn: int) -> list[int]:
        """Live peers in an order that all ranks share, beginning with another one each ``turn``; -1 if none."""
        live = set(self._live())
        order = [(turn + i) % self._ranks for i in range(self._ranks)]
        return [r for r in order if r in live and r != self._rank] or [-1]

    def _begin_round(self, step: int, window: int) -> None:
        """From sound ranks if one is known; else from all in turn, which counts only if all of them take part."""
        said, others = self._said(step), frozenset(self._live())
        sound = any(said[r].sound for r in others & said.keys())
        self._round = _Round(window, sound, self._missed, others | {self._rank})
        self._told = self._again = False
        self.counters["rounds"] += 1

    def _said(self, step: int) -> dict[int, _Said]:
        """What ranks have said lately."""
        fresh = 4 * max(self.replica.slices, self._ranks)
        heard = enumerate(self._heard)
        return {r: said for r, said in heard if said is not None and step_distance(step, said.step) < fresh}

    def _donor(self, held: _Round, turn: int, step: int) -> int:
        """Who gives a slice in this turn, maybe this rank itself; -1 if nobody can."""
        order = [(turn + i) % self._ranks for i in range(self._ranks)]
        if not held.sound:
            return next(r for r in order if r in held.members)
        said, live = self._said(step), set(self._live())
        return next((r for r in order if r in live and r in said and said[r].sound), -1)

    def _wait(self) -> float:
        step = statistics.median(self._durations) if self._durations else 0.0
        return max(_LEAST_WAIT, self._share * self._stretch * step)

    @property
    def _patience(self) -> float:
        return max(_PATIENCE, _PATIENT_STEPS * max(self._durations, default=0.0))

    def _take(self, slot: _Slot) -> None:
        """Makes slice ``slot.which`` equal to the donor's; both stand after ``slot.step``."""
        until = time.monotonic() + self._wait()
        which, counters = slot.which, self.counters
        if not slot.ready.wait(self._wait()) or slot.digest is None:
            counters["slices_missed"] += 1
            return
        held = self._round
        if held is not None and slot.sound != held.sound:
            held.counts = False
            if not slot.sound:
                return
        elif held is not None and not slot.sound:
            held.counts &= slot.turns and slot.view == _view(held.members)
            held.alone |= not slot.turns
        if self.replica.layout(which) != slot.layout:
            counters["slices_unlike"] += 1
            if held is not None:
                held.unlike = slot.donor
            return
        if self.replica.digest(which) != slot.digest:
            try:
                body = self._reliable.pull(
                    slot.donor, "slice", _ASK.pack(slot.step, which, 0), max(0.001, until - time.monotonic())
                )
                self.replica.write(which, memoryview(body))
            except TransportError as error:
                log.debug("%s", error)
                counters["slices_missed"] += 1
                return
            counters["slices_taken"] += 1
            counters["bytes_taken"] += len(body)
        else:
            counters["slices_equal"] += 1
        self.drift.equal(which)
        if held is not None:
            held.equal.add(which)

    def _end_round(self, held: _Round, step: int | None) -> None:
        """``step``: the one that has ended, if parameters may be changed now."""
        if held.counts and len(held.equal) == self.replica.slices:
            self._missed_before = held.missed  # sound if nothing was missed during the round
            self.counters["rounds_whole"] += 1
            self._stretch = 1
            self._told = False
            return
        if held.unlike >= 0 and step is not None:  # slices do not carry that
            self._adopt(held.unlike, step, self._patience)
        self._again = held.alone
        if len(held.equal) * 2 < self.replica.slices:
            self._stretch = min(2 * self._stretch, _STRETCH_MOST)

    # -- on demand, in the training thread

    def synchronise(self, timeout: float) -> bool:
        """Meets the others that call it after the same step, and takes what most of the sound ones hold.

        Raises:
            ConfigError: an optimizer keeps something that cannot be compared, by name.

        Returns:
            Whether all live ranks have answered and hold the same to the bit. False after ``timeout`` seconds at most,
            and as soon as a rank is known to have gone on without synchronising.
        """
        step = self.moment.step
        if step is None:
            return not self._live()
        self.replica.freeze()  # buffers as they are now, and a step that was not the end of anything
        self.moment.settle(step)
        begun = time.monotonic()
        until, patience = begun + timeout, begun + timeout / 2  # half of it is for taking what those hold who came
        members = set(self._live())
        everybody = alike = False
        own, missed = self.standing(), self._missed
        for number in range(_ROUNDS):
            self._meetings.publish(step, number, own)
            heard = self._meetings.gather(step, number, members, until if number else patience)
            everybody = (number == 0 or everybody) and not (members - heard.keys()).intersection(self._live())
            members = set(heard)
            standings = {**heard, self._rank: own}
            alike = all(own.holds(other) for other in heard.values())
            if alike or time.monotonic() >= until:
                break
            chosen = reference(standings, step, self._ranks)
            self._name_differences(standings, chosen)
            if not own.holds(standings[chosen]):
                givers = [rank for rank in sorted(heard) if heard[rank].holds(standings[chosen])]
                self._take_all(givers[self._rank % len(givers)], step, own, standings[chosen], until)
                own, missed = self.standing(), self._missed
        self._meetings.leave()
        if alike and (everybody or any(standing.sound for standing in standings.values())):
            self._missed_before, self._told = missed, False
            for which in range(self.replica.slices):
                self.drift.equal(which)
        self.counters["meetings"] += 1
        self.counters["meetings_alike"] += alike and everybody
        if not (alike and everybody):
            log.warning(
                "rank %d: replicas are not known to be equal after step %d: rank(s) %s %s",
                self._rank,
                step,
                sorted(members if everybody else set(self._live()) - members),
                "hold something else" if everybody else "did not synchronise after it",
            )
        return alike and everybody

    def standing(self) -> Standing:
        """What this rank holds now.

        Raises:
            ConfigError: an optimizer keeps something that cannot be compared, by name.
        """
        replica = self.replica
        form = replica.describe(places=False)
        marks = [_hash(replica.layout(which), replica.digest(which)) for which in range(replica.slices)]
        last = replica.digest(replica.slices - 1, buffers=False)
        return Standing(self.sound, _hash(form, *marks[:-1], last), _hash(form), tuple(marks))

    def _name_differences(self, standings: Mapping[int, Standing], chosen: int) -> None:
        """Sound ranks hold the same parameters; where they do not, something is wrong that no packet explains."""
        other = [r for r, one in sorted(standings.items()) if one.sound and one.state != standings[chosen].state]
        if other and standings[chosen].sound:
            self.counters["sound_unlike"] += 1
            log.warning(
                "rank %d: parameters or optimizers of rank(s) %s are not those of rank %d, though these ranks have "
                "missed no result: give all ranks the same options, schedules and starting values",
                self._rank,
                other,
                chosen,
            )

    def _take_all(self, rank: int, step: int, own: Standing, theirs: Standing, until: float) -> None:
        """Takes from ``rank`` what is other here: slices, or everything where optimizers keep other things."""
        if own.form != theirs.form or len(own.slices) != len(theirs.slices):
            self._adopt(rank, step, until - time.monotonic())
            return
        self._missed += 1  # until all of it is here
        missed = self._missed
        self.moment.disturb()
        try:
            for which, (mine, other) in enumerate(zip(own.slices, theirs.slices, strict=True)):
                if mine == other:
                    continue
                left = max(0.05, until - time.monotonic())
                body = self._reliable.pull(rank, "slice", _ASK.pack(step, which, 0), left)
                self.replica.write(which, memoryview(body))
                self.counters["slices_taken"] += 1
                self.counters["bytes_taken"] += len(body)
        except TransportError as error:
            log.info("rank %d: not synchronised: %s", self._rank, error)
            self.counters["whole_failed"] += 1
        else:
            if theirs.sound:
                self._missed_before = missed
        finally:
            self.replica.freeze()
            self.moment.settle(step)

    def _adopt(self, rank: int, step: int, timeout: float, *, or_later: bool = False) -> int | None:
        """Takes the whole state of ``rank`` as it is after ``step``; returns the step, None if it was not possible."""
        before = self._missed
        try:
            body = memoryview(self._reliable.pull(rank, "whole", _ASK.pack(step, 0, or_later), max(0.05, timeout)))
            stands, length, sound = _WHOLE.unpack_from(body)
            self.moment.disturb()
            self.replica.arrange(bytes(body[_WHOLE.size : _WHOLE.size + length]))
            at, sizes = _WHOLE.size + length, [self.replica.size(which) for which in range(self.replica.slices)]
            if at + sum(sizes) != len(body):
                raise TransportError(
                    f"rank {rank} has {len(body) - at} bytes of state, this one {sum(sizes)}: train the same model "
                    "with the same optimizer on every rank"
                )
            for which, size in enumerate(sizes):
                self.replica.write(which, body[at : at + size])
                at += size
        except TransportError as error:
            log.info("rank %d: not synchronised: %s", self._rank, error)
            self.counters["whole_failed"] += 1
            self._missed += 1  # a part may have been written
            return None
        finally:
            self.replica.freeze()
            if self.moment.step is not None:
                self.moment.settle(self.moment.step)
        self.moment.settle(stands)
        self.counters["whole_taken"] += 1
        self.counters["bytes_taken"] += len(body)
        if sound:
            self._missed_before = before
            for which in range(self.replica.slices):
                self.drift.equal(which)
        return int(stands)

    def take_over(
        self, stands: int, description: bytes, pull: Callable[[int], bytes | bytearray], *, sound: bool
    ) -> None:
        """Takes another rank's state after step ``stands``, slice by slice.

        Args:
            stands: step.
            description: of what its optimizers keep (``Replica.describe``).
            pull: gives the bytes of a slice.
            sound: whether that rank is.

        Raises:
            TransportError: a slice did not come, or is of another size; this rank is not sound then.
        """
        self._missed += 1
        self.moment.disturb()
        self.replica.arrange(description)
        for which in range(self.replica.slices):
            body = pull(which)
            self.replica.write(which, memoryview(body))
            self.counters["bytes_taken"] += len(body)
        self.counters["whole_taken"] += 1
        self.replica.freeze()
        self.moment.settle(stands)
        if sound:
            self._missed_before = self._missed
            for which in range(self.replica.slices):
                self.drift.equal(which)

    def adopt_any(self, step: int, timeout: float) -> int | None:
        """Takes the state after ``step`` or a later one from any live rank, those first that were sound.

        For a rank that has jumped. Returns the step; None if nobody gave it in time.
        """
        until = time.monotonic() + timeout
        peers = [r for r in self._rotated(step) if r >= 0]
        said = self._said(step)
        peers.sort(key=lambda r: r not in said or not said[r].sound)
        for rank in peers:
            left = until - time.monotonic()
            stands = self._adopt(rank, step, left, or_later=True) if left > 0 else None
            if stands is not None:
                return stands
        return None

    # -- asking, in a thread of its own

    def _run(self) -> None:
        while (slot := self._tasks.get()) is not None:
            try:
                self._fetch(slot)
            except TransportError as error:
                log.debug("%s", error)
                self.counters["unanswered"] += 1
            except Exception:
                log.exception("rank %d: measuring the drift of replicas", self._rank)
            finally:
                slot.ready.set()

    def _compared(self, check: Check, unlike: list[int] | None) -> None:
        """In the thread that compares digests: what it has found."""
        self.counters["digests_compared"] += 1
        if unlike == []:
            return
        self.counters["digests_unlike"] += 1
        if unlike is None:  # not what most hold: as a rank that has missed something, and not for long
            self._missed += 1
            self._again = True
        window = check.step // self.replica.slices
        if window == self._warned:  # its other slices are likely to differ, too: once is enough
            return
        self._warned = window
        log.warning(
            "rank %d: %s after step %d in slice %d of %d, without a lost result: look for memory errors, operations "
            "that are not deterministic, and weights that one rank changes",
            self._rank,
            "this rank differs from the others" if unlike is None else f"rank(s) {unlike} differ from this one",
            check.step,
            check.which,
            self.replica.slices,
        )

    def _fetch(self, slot: _Slot) -> None:
        now = self.moment.step
        if now is not None and step_distance(now, slot.step) > 0:  # an answer has taken too long
            self.counters["unanswered"] += 1
            return
        flags, slot.view, layout, digest, bins = self._ask_mark(
            slot.donor, slot.step, slot.which, slot.measure, self._patience
        )
        slot.sound, slot.turns = bool(flags & _SOUND), bool(flags & _TURNS)
        self._heard[slot.donor] = _Said(slot.step, slot.sound)
        if flags & _WANTS or (slot.turns and slot.measure):
            self._told = True
        slot.layout, slot.digest = layout, digest
        if bins is None:
            return
        with self.moment.reading(slot.step, self._patience):
            if self.replica.digest(slot.which) == digest:
                self.drift.equal(slot.which)
            else:
                own, norm = self.replica.sketch(slot.which, seed_of(self._cookie, slot.step))
                self.drift.observe(slot.which, own, bins, norm)
        self.counters["measured"] += 1

    def _ask_mark(
        self, rank: int, step: int, which: int, bins: bool, timeout: float
    ) -> tuple[int, bytes, bytes, bytes, NDArray[Any] | None]:
        most = _MARK.size + 4 * BINS
        body = self._reliable.pull(rank, "mark", _ASK.pack(step, which, bins), timeout, most)
        if len(body) not in (_MARK.size, most):
            raise TransportError(
                f"rank {self._rank}: rank {rank} answers {len(body)} bytes instead of a mark: run one version on all"
            )
        flags, view, layout, digest = _MARK.unpack_from(body)
        return flags, view, layout, digest, np.frombuffer(body, ">f4", offset=_MARK.size) if len(body) == most else None

    # -- answering, in threads of the reliable path

    def _asked(self, request: bytes) -> tuple[int, int, int]:
        if len(request) != _ASK.size:
            raise Refusal(f"a request of {len(request)} bytes")
        step, which, option = _ASK.unpack(request)
        if which >= self.replica.slices:
            raise Refusal(f"there are {self.replica.slices} slices here, not {which + 1}")
        return step, which, option

    def _answer_mark(self, request: bytes) -> list[bytes]:
        step, which, bins = self._asked(request)
        with self.moment.reading(step, self._patience):
            held = self._round_of(step)
            turns = held is not None and not held.sound
            flags = _SOUND * self.sound | _WANTS * (self._drifted or self._again) | _TURNS * turns
            view = _view(held.members if held is not None else {*self._live(), self._rank})
            parts = [_MARK.pack(flags, view, self.replica.layout(which), self.replica.digest(which))]
            if bins:
                sketch, _ = self.replica.sketch(which, seed_of(self._cookie, step))
                parts.append(sketch.astype(">f4").tobytes())
        self.counters["marks_given"] += 1
        return parts

    def _round_of(self, step: int) -> _Round | None:
        """The round to which ``step`` belongs here: behind a window's last step the next one may have begun."""
        window = step // self.replica.slices
        return next((r for r in (self._round, self._ending) if r is not None and r.window == window), None)

    def _answer_slice(self, request: bytes) -> list[memoryview]:
        step, which, _ = self._asked(request)
        with self.moment.reading(step, 0):
            parts = self.replica.copy(which)
        self.counters["slices_given"] += 1
        return parts

    def _answer_whole(self, request: bytes) -> list[bytes | memoryview]:
        step, _, or_later = self._asked(request)
        with self.moment.reading(step, self._patience, or_later=bool(or_later)) as stands:
            try:
                told, sound = self.replica.describe(), self.sound
            except ConfigError as error:
                raise Refusal(str(error)) from None
            slices = [part for which in range(self.replica.slices) for part in self.replica.copy(which)]
        self.counters["whole_given"] += 1
        return [_WHOLE.pack(stands, len(told), sound), told, *slices]


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST).digest()


def _view(members: Iterable[int]) -> bytes:
    """8 bytes that tell whether two ranks go by the same members."""
    return hashlib.blake2b(bytes(sorted(members)), digest_size=8).digest()
