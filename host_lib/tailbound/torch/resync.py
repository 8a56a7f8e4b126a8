"""A replica that has come apart from the others' is made equal again, point to point (clock-21, codec-13).

A rank that has missed nothing since it was last equal to the others is *sound* (``docs/torch/failures.md`` has the
transitions). There is one question, "what is your state" (``standing``), and one transfer, ``take_state``. Nothing is
collective: a rank waits for one peer at a time, and every wait ends by itself.
"""

from __future__ import annotations

import logging
import queue
import statistics
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntFlag
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tailbound.collective.communicator import Communicator
from tailbound.errors import ConfigError, TransportError
from tailbound.torch.finished import Layout
from tailbound.torch.kept import Stateful, canonical, decode, encode, load
from tailbound.torch.moment import Moment
from tailbound.torch.replica import DIGEST, Replica, digest_of
from tailbound.torch.standing import Standing, Standings, live, most_held, reference
from tailbound.transport.reliable import Ended, Refusal

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tailbound.torch.scaler import GradScaler, TailboundState

log = logging.getLogger("tailbound")

_NAME = "state"
#: Asks for a state: step, ``Wanted``, ms to wait for the end of that step, bytes of slices at most (0: all), layout.
#: Digests of all slices follow.
_ASK = struct.Struct("!IBHQ16s")
#: The answer: step, whether it is sound, number of slices, whether more differ, bytes of the form. Numbers of slices,
#: the form and slices follow.
_STATE = struct.Struct("!I?H?I")
#: A state may be so many times what is held here, since an optimizer that has not stepped yet keeps nothing, and so
#: many bytes in any case.
_WHOLE_TIMES, _WHOLE_LEAST = 16, 1 << 34
#: Bytes a second that the giver of a state copies at least, before it sends any, and that the network carries.
_COPIED, RATE = 1e9, 10e6
#: Bytes a second that a rank decodes and loads at least.
LOADED = 1e8
#: Seconds that a rank waits for the end of a giver's step, where it is lost; in steps if these are long.
_PATIENCE, _PATIENT_STEPS = 5.0, 4
#: Seconds that an unsound rank waits for a giver's step, and takes slices, at least; as a rule one median step.
_LEAST_WAIT = 0.05
#: Steps of silence after which another rank becomes the reference: who goes on then knows that it was left behind.
_SILENT = 4
#: Takes in a row that got no further, after which a rank takes all slices at once: its optimizer mixes entries.
_PARTS_MOST = 16
#: Bytes of slices that a rank takes at least: twice as many after each take within a step, else half as many.
_PART = 1 << 20
#: The words of a rank that is giving its state to a lost one, and seconds after which it is asked again.
_BUSY, _AGAIN = "gives its state to another rank", 0.05
#: The words of a rank that can never give its state.
NEVER = "cannot give its state"
#: Rounds of a meeting, the last one is for verdicts: what one of them leaves unequal, the next takes.
_ROUNDS = 9


class Wanted(IntFlag):
    """What a rank asks for; nothing: slices that differ in more than buffers, of a sound rank after the same step."""

    LATER = 1  #: the state after a later step will do
    WHOLE = 2  #: all slices of trained parameters, and ``FORM``
    BUFFERS = 4  #: slices that differ in buffers, too; the giver need not be sound
    FORM = 8  #: what no slice carries (``Resync.tell_form``)


class Resync:
    """Keeps one replica equal to the others', until the reliable path is closed.

    Args:
        communicator, replica, layout, state: of the job and the model; the state for as long as there is one.
        period: steps between two comparisons of digests; 0: none.
        share: of its time that an unsound rank spends on taking a state; 0: it takes none by itself.
        compare: compare digests while sound; False where another rank of this host does so for it.
        extra_state: states that go with the whole one, by name.
    """

    def __init__(
        self,
        communicator: Communicator,
        replica: Replica,
        layout: Layout,
        state: Callable[[], TailboundState | None],
        period: int = 200,
        share: float = 0.05,
        *,
        compare: bool = True,
        extra_state: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.replica, self.moment = replica, Moment()
        self._communicator, self._layout, self._state = communicator, layout, state
        self._reliable, self._members = communicator.reliable, communicator.job.membership
        self._rank, self._ranks = communicator.config.rank, communicator.config.ranks
        self._period, self._share, self._compares = period, share, compare
        self._extra_state = dict(extra_state or {})
        self.counters: Counter[str] = Counter()
        self.sound = True  #: whether this replica has missed nothing since it was last equal to the others
        self._donor = -1  # the rank whose state is taken at the next boundary
        self._next = 0.0  # monotonic seconds: before that none is taken
        self._most = _PART  # bytes of slices that come within a step, as far as is known
        self._parts = 0  # takes in a row that left this rank unsound, and no further than the one before
        self._front = 0  # the first slice that differed at the last take
        self._heard: dict[int, Standing] | None = None  # what all live ranks said when this one was unsound
        self._parted = 0  # how often steps were left behind
        self._seen: set[int] | None = None  # peers that were live at the last boundary
        self._unseen = set[int]()  # slices that are compared once, until a peer has answered
        #: answers on their way that carry a state, and bytes of the last one
        self.giving, self.given = set[object](), 0
        self._copying = threading.Lock()  # held while the state goes to a lost rank: each time it is copied
        self._warned = -1  # the window of the last warning of other digests
        self._durations: deque[float] = deque(maxlen=32)
        self._boundary_at = 0.0
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        replica.warm_up()
        self._reliable.before_close(self.moment.close)
        self.standings = Standings(communicator, self.moment, self._now, self._answer_slice)
        self._reliable.serve(_NAME, self._answer)
        self._reliable.before_close(lambda: self._tasks.put(None))
        self._reliable.runs(self._work, "tailbound-resync")

    def _live(self) -> set[int]:
        return live(self._communicator)

    @property
    def _scaler(self) -> GradScaler | None:
        return state.scaler if (state := self._state()) is not None else None

    @property
    def about_to_take(self) -> bool:
        """Whether the next boundary may change this replica."""
        return self._donor >= 0

    def unsound(self) -> None:
        """The state is not what the others have (after a lost result or a jump, say)."""
        self.sound = False

    def part(self) -> None:
        """This rank has left steps behind: others may follow another state since they said that they are not sound."""
        self.unsound()
        self._parted += 1
        self._heard = None

    def _sound_again(self) -> None:
        self.sound, self._heard, self._donor = True, None, -1

    def boundary(self, step: int, *, still: bool = True) -> None:
        """``step`` has ended: parameters stand still until ``moment.disturb``; ``still``: a state may be taken now."""
        now = time.monotonic()
        if self._boundary_at:
            self._durations.append(now - self._boundary_at)
        self._boundary_at = now
        self.replica.freeze()
        if still and self._donor >= 0:
            donor, self._donor = self._donor, -1
            self._repair(donor, step, max(_LEAST_WAIT, self.step_time))
            self._next = (ended := time.monotonic()) + (ended - now) / self._share
        self.moment.settle(step)
        self._plan(step)

    def _repair(self, donor: int, step: int, seconds: float) -> None:
        """Takes what differs, or as much of it as comes in a step: more would make this rank late again."""
        begun, size, front = time.monotonic(), self._size(), self._front
        most = max(self._most, size // self.replica.slices)
        if self._try(donor, step, seconds, most=0 if self._parts >= _PARTS_MOST else most) is not None:
            self._parts = 0 if self.sound or self._front > front else self._parts + 1
            within = time.monotonic() - begun < seconds + size / _COPIED
            self._most = 2 * most if within else max(_PART, most // 2)

    def tell_form(self, *, places: bool = True) -> bytes:
        """What no slice carries: ``Replica.describe``, ``extra_state``, and the loss scale."""
        scaler = self._scaler
        rest = self.replica.describe(places=places), scaler.state_dict() if scaler is not None else None
        return encode(self._extra_state, rest)

    def take_form(self, told: bytes | memoryview) -> None:
        """Takes over what ``tell_form`` of another rank told."""
        states, (description, scale) = decode(told)
        self.replica.arrange(description)
        load(self._extra_state, states)
        if (scaler := self._scaler) is not None and scale is not None:
            scaler.load_state_dict(scale)

    def stats(self) -> dict[str, Any]:
        """Whether it is sound, its number of slices, and counters, in plain types."""
        return {"sound": self.sound, "slices": self.replica.slices, "counters": dict(sorted(self.counters.items()))}

    def _size(self) -> int:
        return sum(map(self.replica.size, range(self.replica.slices)))

    @property
    def step_time(self) -> float:
        """Seconds of a median step."""
        return statistics.median(self._durations) if self._durations else 0.0

    # -- what to do at the next boundary, in the training thread

    def _plan(self, step: int) -> None:
        here = self._live()
        if self._seen is not None and here - self._seen:
            self._look_through()
        self._seen = here
        peers = [rank for i in range(self._ranks) if (rank := (step + i) % self._ranks) in here]  # others each step
        if peers and not self.sound:
            self._seek(step)
        elif peers and self._compares:
            which, begun, period = step % self.replica.slices, step - step % self.replica.slices, self._period
            due = period and begun // period != (begun - self.replica.slices) // period
            if which in self._unseen or due:
                self._aside(partial(self._compare_slice, step, which, peers))

    def _look_through(self) -> None:
        """All slices are compared once, from now on."""
        self._unseen = set(range(self.replica.slices))

    def _seek(self, step: int) -> None:
        """Chooses a sound rank to take from; where there is none, the lowest becomes the reference."""
        if not self._share or self._donor >= 0 or time.monotonic() < self._next:
            return
        heard, self._heard = self._heard, None
        others = live(self._communicator, _SILENT)
        if heard is None:
            self._aside(partial(self._ask_all, self._parted))
        elif sound := [rank for rank in others & heard.keys() if heard[rank].sound]:
            self._donor = min(sound, key=lambda rank: (rank - step) % self._ranks)  # others each step
        elif self._rank < min(others, default=-1) and heard.keys() >= others:
            self._sound_again()
            self._look_through()
            self.counters["led"] += 1
            log.info("rank %d: no rank is sound after step %d; the others take the state of this one", self._rank, step)

    # -- aside, in a thread of its own

    def _aside(self, task: Callable[[], object]) -> None:
        """Does ``task`` in the background; left out while an earlier one waits."""
        if self._tasks.empty():
            self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except TransportError as error:
                log.debug("%s", error)
            except Exception:
                log.exception("rank %d: comparing replicas", self._rank)

    def _now(self) -> Standing:
        return Standing(self.sound, form=self._layout.digest() if self._communicator.elastic else bytes(DIGEST))

    def _ask_all(self, parted: int) -> None:
        heard = self.standings.now(live(self._communicator, _SILENT))
        self._heard = heard if parted == self._parted else None

    def _of_slice(self, step: int, which: int, wait: float = 0.0) -> Standing:
        """What this rank holds of a slice after ``step``; refused where it does not stand there, or is not sound."""
        with self.moment.reading(step, wait):
            if not self.sound:
                raise Refusal("this rank is not sound")
            rates, mark = self.replica.rates(), self.replica.mark(which, buffers=False)
        return Standing(True, state=digest_of(rates, mark), form=rates)

    def _answer_slice(self, step: int, which: int, wait: float, theirs: bytes) -> Standing:
        own = self._of_slice(step, which % self.replica.slices, wait)
        if own.state != theirs:
            self._look_through()
        return own

    def _compare_slice(self, step: int, which: int, peers: Sequence[int]) -> None:
        """Compares a digest with a peer, and with all others where they differ (clock-33)."""
        unseen, own = self._unseen, self._of_slice(step, which)
        held = {self._rank: own} | self.standings.slices(peers[:1], step, which, own.state)
        self.counters["digests_compared"] += len(held) - 1
        if len(held) > 1:
            unseen.discard(which)
        if all(one.state == own.state for one in held.values()):
            return
        held |= self.standings.slices(peers[1:], step, which, own.state)
        states = {rank: one.state for rank, one in held.items()}
        self.counters["digests_unlike"] += 1
        self._look_through()
        who = f"rank(s) {sorted(rank for rank in states if states[rank] != own.state)} differ from this one"
        if states[most_held(states, step, self._ranks)] != own.state:  # as a rank that has missed something
            self.unsound()
            who = "this rank differs from the others"
        window = step // self.replica.slices
        if window == self._warned:  # other slices are likely to differ, too
            return
        self._warned = window
        where = f" in slice {which} of {self.replica.slices}"
        why = (
            "ranks that were apart may have followed two states; if none was away, look for memory errors, "
            "operations that are not deterministic, and weights that one rank changes: load checkpoints on all ranks"
        )
        if len({one.form for one in held.values()}) > 1:
            where = ""
            why = (
                "their learning rates or loss scales are not the same: move schedulers on alike, give register "
                "extra_state={'scheduler': ...}, or batches(step=, on_skip=)"
            )
        log.warning("rank %d: %s after step %d%s, without a lost result: %s", self._rank, who, step, where, why)

    # -- on demand, in the training thread

    def synchronize(self, timeout: float) -> bool:
        """Meets the others that call it after the same step, and takes what most of the sound ones hold.

        Returns:
            Whether all ranks that have not died have answered, are a quorum, and hold the same to the bit. False
            after ``timeout`` seconds at most, and as soon as a rank is known to have gone on without synchronizing.
        """
        step = self.moment.step
        if step is None:
            return False
        self.replica.freeze()  # buffers as they are now, and a step that was not the end of anything
        self.moment.settle(step)
        begun = time.monotonic()
        until, patience = begun + timeout, begun + timeout / 2  # half of it is for taking what those hold who came
        peers = set(range(self._ranks)) - {self._rank}
        members, alike, well = peers, False, False
        own = self.standing()
        for number in range(_ROUNDS):
            self.standings.publish(step, number, own)
            heard = self.standings.gather(step, number, members, until if number else patience)
            members = set(heard)
            standings = {**heard, self._rank: own}
            if alike:  # in the round before: these are the verdicts
                well = own.well and self._complete(peers - members) and all(one.well for one in heard.values())
                break
            alike = all(own.holds(other) for other in heard.values())
            if alike:
                own = own._replace(well=self._complete(peers - members))
                continue
            if time.monotonic() >= until:
                break
            theirs = standings[self._reference(standings, step)]
            if not own.holds(theirs):
                givers = [rank for rank in sorted(heard) if heard[rank].holds(theirs)]
                wanted = Wanted.BUFFERS | (Wanted.FORM if own.form != theirs.form else 0)
                self._try(givers[self._rank % len(givers)], step, until - time.monotonic(), wanted, bounded=True)
                own = self.standing()
        self.standings.leave()
        if alike and members and (own.well or any(standing.sound for standing in standings.values())):
            self._sound_again()
            self._unseen.clear()
            if self._live() - members:
                self._look_through()
        self._say_who_met(step, members, peers - members, alike, well)
        return well

    def _complete(self, absent: set[int]) -> bool:
        """Whether the ranks that are not ``absent`` are a quorum, and all others have died."""
        return self._members.quorum(set(range(self._ranks)) - absent) and absent <= self._died()

    def _died(self) -> set[int]:
        """Peers that are known as dead, and take no connection: a process that is stopped takes one."""
        return self.standings.unreachable - self._live() - self._members.gone

    def _say_who_met(self, step: int, members: set[int], absent: set[int], alike: bool, well: bool) -> None:
        died, closed = absent & self._died(), absent & self._members.gone
        told = {
            "hold something else": set() if alike else members,
            "have closed": closed,
            "have died": died,
            "did not synchronize after it": absent - closed - died,
        }
        said = "".join(f"; rank(s) {sorted(ranks)} {what}" for what, ranks in told.items() if ranks)
        if not self._members.quorum(members | {self._rank}):
            said += f"; that is no majority of {self._ranks} ranks"
        log.log(
            logging.INFO if well else logging.WARNING,
            "rank %d: replicas are %s equal after step %d; compared with rank(s) %s%s",
            self._rank,
            "known to be" if well else "not known to be",
            step,
            sorted(members),
            said or ("" if well else "; others have not met all of them"),
        )

    def standing(self) -> Standing:
        """All that this rank holds now, with ``extra_state``: all ranks are at the same place of the program."""
        replica, slices = self.replica, range(self.replica.slices)
        form = canonical(decode(self.tell_form(places=False))).encode()
        marks = [replica.mark(which) for which in slices]
        bare = [replica.mark(k, buffers=False) if replica.has_buffers(k) else marks[k] for k in slices]
        return Standing(self.sound, state=digest_of(form, *bare), form=digest_of(form), slices=tuple(marks))

    def _reference(self, standings: Mapping[int, Standing], step: int) -> int:
        """The rank whose state the others take; of sound ranks that differ it warns, since no packet explains that."""
        chosen = reference(standings, step, self._ranks)
        other = [r for r, one in sorted(standings.items()) if one.sound and one.state != standings[chosen].state]
        if other and standings[chosen].sound:
            log.warning(
                "rank %d: parameters, optimizers or extra_state of rank(s) %s are not those of rank %d, though these "
                "ranks have missed no result: give all ranks the same options, schedules and starting values",
                self._rank,
                other,
                chosen,
            )
        return chosen

    # -- the transfer, in the training thread

    def take_state(
        self, rank: int, step: int, timeout: float, wanted: int = 0, *, bounded: bool = False, most: int = 0
    ) -> int:
        """Takes the state of ``rank`` as it is after ``step``, in place; returns the step after which it stands.

        Args:
            rank, step: whose, and after which step.
            timeout: seconds until it begins to come. What its size costs comes on top, unless it is ``bounded``.
            wanted: ``Wanted``.
            most: bytes of slices, but at least one slice; this rank stays unsound if more differ. 0: all.

        Raises:
            TransportError: that rank does not give it (``Refusal``), or it did not come or does not fit.
            LayoutError, ConfigError: see ``kept.load``.
        """
        replica, before = self.replica, self.moment.step
        if not self.moment.disturb():
            before = None  # the update of a later step is made already
        try:
            held = self._size()
            most_bytes = max(_WHOLE_LEAST, _WHOLE_TIMES * held)
            limits = max(0.05, timeout) + (0.0 if bounded else held / _COPIED), most_bytes, 0.0 if bounded else RATE
            patience = max(_PATIENCE, _PATIENT_STEPS * max(self._durations, default=0.0))
            patience = min(timeout, patience) if wanted & Wanted.LATER else timeout
            ask = _ASK.pack(step, wanted, max(0, min(int(patience * 1000), 0xFFFF)), most, replica.layouts())
            buffers, first = bool(wanted & Wanted.BUFFERS), replica.trained if wanted & Wanted.WHOLE else 0
            ask += bytes(DIGEST * first)  # of no slice
            ask += b"".join(replica.mark(which, buffers=buffers) for which in range(first, replica.slices))
            body = memoryview(self._reliable.pull(rank, _NAME, ask, *limits))
            before = stands = self._put(rank, body)
        finally:
            replica.freeze()
            if before is not None:
                self.moment.settle(before)
        return stands

    def _put(self, rank: int, body: memoryview) -> int:
        """Writes what ``rank`` has given in its place, and returns the step."""
        replica = self.replica
        try:
            stands, sound, number, left, told = _STATE.unpack_from(body)
            chosen = np.frombuffer(body, ">u2", number, _STATE.size).tolist()
        except (struct.error, ValueError) as error:
            raise TransportError(
                f"rank {rank} answers {len(body)} bytes as its state: run one version on all ranks"
            ) from error
        at = _STATE.size + 2 * number
        self.unsound()  # until all of it is written
        self._front = chosen[0] if chosen else replica.slices
        if told:
            self.take_form(body[at : at + told])
            at += told
        sizes = [replica.size(which) for which in chosen if which < replica.slices]
        if at + sum(sizes) != len(body) or len(sizes) != number:
            raise TransportError(
                f"rank {rank} has {len(body) - at} bytes of state, this one {sum(sizes)}: train the same model "
                "with the same optimizer on every rank"
            )
        for which, size in zip(chosen, sizes, strict=True):
            replica.write(which, body[at : at + size])
            at += size
        self.counters.update(
            {"whole_taken" if told else "states_taken": 1, "slices_taken": number, "bytes_taken": len(body)}
        )
        if sound and not left:
            self._sound_again()
            self._look_through()  # others may hold another state, and be sound
        return int(stands)

    def _try(self, *arguments: Any, **limits: Any) -> int | None:
        """As ``take_state``; None, and a line in the log, where that was not possible."""
        try:
            return self.take_state(*arguments, **limits)
        except TransportError as error:
            self._note_failed(error)
            return None

    def _note_failed(self, error: TransportError) -> None:
        log.info("rank %d: not synchronized: %s", self._rank, error)
        self.counters["takes_failed"] += 1

    def adopt_any(self, step: int, timeout: float) -> int | None:
        """Takes the whole state after ``step`` or a later one from any live rank, sound ones first.

        Returns the step; None if no rank gave it. ``timeout``: as of ``take_state``. A rank that is giving its state to
        another one is asked again.
        """
        until = time.monotonic() + timeout
        here = sorted(self._live())
        said = self.standings.now(here)
        for sound in (True, False):
            asked = [rank for rank in here if (rank in said and said[rank].sound) == sound]
            first = (step + self._rank) % max(1, len(asked))  # ranks that are lost together begin with different ones
            asked = asked[first:] + asked[:first]
            while asked:
                busy = []
                for rank in asked:
                    left = until - time.monotonic()
                    if left <= 0:
                        return None
                    try:
                        return self.take_state(rank, step, left, Wanted.LATER | Wanted.WHOLE | Wanted.BUFFERS)
                    except TransportError as error:
                        if isinstance(error, Refusal) and str(error).endswith(_BUSY):
                            busy.append(rank)
                        else:
                            self._note_failed(error)
                if asked := busy:
                    time.sleep(_AGAIN)
        return None

    # -- giving, in threads of the reliable path

    def _answer(self, request: bytes) -> list[Buffer]:
        if len(request) != _ASK.size + DIGEST * self.replica.slices:
            raise Refusal(f"a request of {len(request)} bytes for a state of {self.replica.slices} slices")
        step, wanted, wait, most, layouts = _ASK.unpack_from(request)
        marks = [request[at : at + DIGEST] for at in range(_ASK.size, len(request), DIGEST)]
        later = bool(wanted & Wanted.LATER)  # whoever synchronizes has a few rounds only, and need not queue
        if later and (state := self._state()) is not None and state.absence.abstaining:
            raise Refusal("this rank was away itself, and has no state yet")
        if later and not self._copying.acquire(blocking=False):
            raise Refusal(_BUSY)
        self.giving.add(one := object())

        def over() -> None:
            self.giving.discard(one)
            if later:
                self._copying.release()

        try:
            return Ended(self._copy(step, wanted, wait / 1000, most, layouts, marks), over)
        except BaseException:
            over()
            raise

    def _copy(
        self, step: int, wanted: int, wait: float, most: int, layouts: bytes, marks: Sequence[bytes]
    ) -> list[Buffer]:
        replica = self.replica
        with self.moment.reading(step, wait, or_later=bool(wanted & Wanted.LATER)) as stands:
            sound, told = self.sound, b""
            if not sound and not wanted:
                raise Refusal("this rank is not sound")
            if wanted & (Wanted.WHOLE | Wanted.FORM) or replica.layouts() != layouts:  # slices do not carry these
                try:
                    told, most = self.tell_form(), 0
                except ConfigError as error:
                    raise Refusal(f"{NEVER}: {error}") from None
            buffers = bool(told) or bool(wanted & Wanted.BUFFERS)
            chosen, parts, size, left = list[int](), list[memoryview](), 0, False
            for which, mark in enumerate(marks):
                if any(mark) and replica.mark(which, buffers=buffers) == mark:
                    continue
                size += replica.size(which)
                if left := bool(most and chosen and size > most):
                    break
                chosen.append(which)
                parts += replica.copy(which)
        self.counters["states_given"] += 1
        self.given = size + len(told)
        numbers = np.array(chosen, ">u2").tobytes()
        return [_STATE.pack(stands, sound, len(chosen), left, len(told)), numbers, told, *parts]
