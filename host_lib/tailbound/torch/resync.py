"""A replica that has come apart from the others' is made equal again, point to point (clock-21, codec-13).

Lost results are fetched before they part replicas (``collective.fetch``). What remains is rare: a fetch that failed, a
rank that stood still, an owner that died. A rank that has missed nothing since it was last equal to the others is
*sound*: it compares digests now and then (``digests``), and gives. A rank that is not has *stale* slices, all of them,
and takes one a step from a sound rank:

- It is the next stale one after the one tried last, as it is after the same step on both. It is sent where it differs.
  The receiver waits for it for a small part of a step; what does not come is taken in the next turn of slices.
- Who has gone through all slices, found all of them equal or taken all after one step, and has missed nothing meanwhile
  is sound. A result that is lost makes all of them stale. Where slices had to be taken, another turn compares all of
  them: in between, an optimizer that mixes entries carries what is stale into what was taken. So it may for ever, and
  after two such turns the rank takes the whole state.
- Where no rank is sound, the lowest live one becomes the reference: it is sound because the others take its state. From
  then on there is another *lineage*. Slices of two lineages do not make a replica. Where sound ranks follow two, since
  one was away meanwhile, one of them gives way (``lineages``).
- A rank that was lost, or whose optimizer keeps things of other shapes, takes the whole state at once. To lost ranks
  a rank gives it one after the other: each time it keeps a copy.
- Nothing is collective, nobody waits for more than one peer, and every wait ends by itself.
"""

from __future__ import annotations

import logging
import statistics
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tailbound.errors import ConfigError, TransportError
from tailbound.torch.also import Stateful, decode, encode, load
from tailbound.torch.digests import Check, Digests
from tailbound.torch.lineages import Lineages
from tailbound.torch.meeting import Meetings, Standing, reference
from tailbound.torch.moment import Moment
from tailbound.torch.replica import Replica, digest_of
from tailbound.transport.reliable import Ended, Refusal, Reliable
from tailbound.transport.requests import of_form
from tailbound.transport.steps import step_distance

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("tailbound")

#: Asks for a slice: step, which, whether of a sound rank only, ms to wait for the end of the step, own layout, digest.
_SLICE = struct.Struct("!IHBH8s32s")
#: Its answer: lineage (0: the rank is not sound), and what follows.
_GIVEN = struct.Struct("!QB")
_SAME, _OTHER, _UNLIKE, _UNSOUND = range(4)
#: Asks for the whole state after a step, or after a later one, with ``Replica.rest`` of the asker.
_ASK = struct.Struct("!IB16s")
#: The answer: step, lineage, whether the rest is in it, lengths of a description and of ``also``.
_WHOLE = struct.Struct("!IQBII")
#: A whole state may be so many times what is held here, since an optimizer that has not stepped yet keeps nothing, and
#: so many bytes in any case.
_WHOLE_TIMES, _WHOLE_LEAST = 16, 1 << 34
#: Bytes a second that the giver of a whole state copies at least, before it sends any, and that the network carries.
_COPIED, RATE = 1e9, 10e6
#: Seconds that who gives the whole state waits for its own step to end, then refuses; in steps if these are long.
_PATIENCE, _PATIENT_STEPS = 5.0, 4
#: The words of a rank that is giving its whole state, and seconds after which it is asked again; what stands for them.
_TAKEN, _AGAIN, _BUSY = "gives its state to another rank", 0.05, -1
#: A receiver waits for a slice at least this long, in seconds: steps may be shorter than a round trip.
_LEAST_WAIT = 0.002
#: After a slice that did not come the next one is waited for twice as long, up to so many times.
_STRETCH_MOST = 4
#: Turns of slices of which none came, after which a rank warns, and turns that left it unequal, after which it takes
#: the whole state.
_TURNS_MOST = 2
#: Rounds of a meeting, the last one is for verdicts: what one of them leaves unequal, the next takes.
_ROUNDS = 9
#: The lineage of the beginning; others are later, and larger (``_led``, ``_met``).
_FIRST = 1


class _Limits(NamedTuple):
    """Of a whole state: seconds until it begins to come, bytes, and bytes a second then (0: ``wait`` is all)."""

    wait: float
    most: int
    rate: float


def _limits(held: int, timeout: float, *, bounded: bool) -> _Limits:
    """What another's whole state may take.

    Args:
        held: bytes of this rank's own.
        timeout: seconds; what its size costs comes on top of them.
        bounded: nothing does.
    """
    most = max(_WHOLE_LEAST, _WHOLE_TIMES * held)
    timeout = max(0.05, timeout)
    return _Limits(timeout, most, 0.0) if bounded else _Limits(timeout + held / _COPIED, most, RATE)


def _led(step: int, rank: int) -> int:
    """The lineage of what ``rank`` holds after ``step``, in which it became the reference."""
    return (step + 1) << 40 | rank


def _met(step: int, state: bytes) -> int:
    """The lineage of those who met after ``step`` and hold ``state``: others may meet elsewhere, over another state."""
    return (step + 1) << 40 | 1 << 39 | int.from_bytes(state[:5], "big") >> 1


class Resync:
    """Keeps one replica equal to the others', until the reliable path is closed.

    Args:
        reliable: the path to the other ranks.
        replica: the state.
        rank, ranks: of the job.
        live: gives the peers that answer, as far as is known.
        period: steps between two comparisons of digests; 0: none.
        share: of a median step: so long a receiver waits for a slice; 0: it takes none.
        compare: compare digests while sound; False where another rank of this host does so for it.
        also: what goes with the whole state, by name.
        closed: gives the peers that have said goodbye.
        inside: whether this process takes part in the job.
    """

    def __init__(
        self,
        reliable: Reliable,
        replica: Replica,
        rank: int,
        ranks: int,
        live: Callable[[], Sequence[int]],
        *,
        period: int = 200,
        share: float = 0.05,
        compare: bool = True,
        also: Mapping[str, Stateful] | None = None,
        closed: Callable[[], Collection[int]] = frozenset,
        inside: Callable[[], bool] = lambda: True,
    ) -> None:
        self.replica, self.moment = replica, Moment()
        self._reliable, self._rank, self._ranks, self._live = reliable, rank, ranks, live
        self._period, self._share, self._compare, self._closed = period, share, compare, closed
        self._also = dict(also or {})
        self.counters: Counter[str] = Counter()
        self._stale: set[int] = set()  # replaced as a whole by whatever thread notes a loss
        self._lineage = self._following = _FIRST  # own, while sound; that of the slices that are not stale
        self._tried = -1  # the slice that was asked for last
        self._turns = 0  # of slices, since all were stale, that have left this replica unequal
        self._turn_at = -1  # the step after which the first slice of this turn was looked at
        self._taken = False  # slices of this turn had to be taken
        self._donor = self._giver = -1  # who is asked at the next boundary, and who gave the last slice
        self._giving = threading.Lock()  # held while the whole state goes to a lost rank
        self._meeting = False  # in ``synchronise``, where ranks come to another lineage one by one
        self._unsound_peers: set[int] = set()  # that have said so since a sound one was last heard of
        self._whole_at: int | None = None  # the step in which the whole state was last taken for its shapes
        self._warned = -1  # the window of the last warning of other digests
        self._stretch = 1
        self._missed = 0  # slices since one came
        self._durations: deque[float] = deque(maxlen=32)
        self._boundary_at = 0.0
        replica.warm_up()
        reliable.before_close(self.moment.close)
        self._meetings = Meetings(reliable, rank, live, self.moment, inside)
        self._lineages = Lineages(reliable, rank, live, lambda: self.lineage, lambda: self._meeting, self._give_way)
        self._digests = Digests(
            reliable,
            replica,
            self.moment,
            rank,
            ranks,
            live,
            lambda: self.lineage,
            self._compared,
            self._lineages.doubt,
        )
        reliable.serve("slice", of_form(_SLICE, self._answer_slice))
        reliable.serve("whole", of_form(_ASK, self._answer_whole))

    @property
    def sound(self) -> bool:
        """Whether this replica has missed nothing since it was last equal to the others."""
        return not self._stale

    @property
    def lineage(self) -> int:
        """Which of the states that ranks have followed this one's is; 0: of none, it is not sound."""
        return self._lineage if self.sound else 0

    @property
    def about_to_take(self) -> bool:
        """Whether the next boundary may change this replica; from one boundary to the next."""
        return self._donor >= 0

    def note_missing(self, rows: int) -> None:
        """An op has ended here without ``rows`` of its result rows."""
        if rows:
            self.unsound()

    def unsound(self) -> None:
        """The state is not what the others have (after a jump, say)."""
        self._turns = 0
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn_at, self._taken = -1, False
        self._stale = set(range(self.replica.slices))

    def _give_way(self) -> None:
        """Others follow another lineage."""
        self.counters["gave_way"] += 1
        self.unsound()

    def _sound_again(self, lineage: int) -> None:
        self._lineage, self._stale = lineage, set()
        self._stretch, self._missed = 1, 0

    def boundary(self, step: int, *, still: bool = True) -> None:
        """``step`` has ended: parameters stand still from now on until ``moment.disturb``. In the training thread.

        Args:
            still: nothing uses them now, so that a slice may be taken.
        """
        now = time.monotonic()
        if self._boundary_at:
            self._durations.append(now - self._boundary_at)
        self._boundary_at = now
        self.replica.freeze()
        if self._donor >= 0 and still and not self.sound:
            self._refresh(step, self._donor)
            self._lead(step)
        self.moment.settle(step)
        self._plan(step + 1)

    def tell_also(self) -> bytes:
        """The states that go with the whole one.

        Raises:
            ConfigError: one cannot be given, by name.
        """
        return encode(self._also)

    def take_also(self, told: bytes) -> None:
        """Takes over what ``tell_also`` of another rank told.

        Raises:
            LayoutError, ConfigError: see ``also.load``.
        """
        load(self._also, decode(told)[0])

    def stats(self) -> dict[str, Any]:
        """Whether it is sound, slices, those of them that may differ from the others', and counters, in plain types."""
        return {
            "sound": self.sound,
            "slices": self.replica.slices,
            "stale": len(self._stale),
            "counters": dict(sorted(self.counters.items())),
        }

    # -- a slice a step, in the training thread

    def _plan(self, step: int) -> None:
        """Who is asked for a slice after ``step``, or for its digest."""
        self._donor = -1
        peers = [(step + i) % self._ranks for i in range(self._ranks)]  # another one first in every step
        live = set(self._live()) - {self._rank}
        peers = [rank for rank in peers if rank in live]
        self._lineages.look(live)
        if not peers:
            return
        if not self.sound:
            self._donor = (self._giver if self._giver in live else peers[0]) if self._share else -1
        elif self._compare and self._due(step // self.replica.slices):
            self._digests.ask(Check(step, step % self.replica.slices, peers[0], self._patience))

    def _due(self, window: int) -> bool:
        slices, period = self.replica.slices, self._period
        return period > 0 and (window * slices) // period != ((window - 1) * slices) // period

    @property
    def step_time(self) -> float:
        """Seconds of a median step."""
        return statistics.median(self._durations) if self._durations else 0.0

    @property
    def _patience(self) -> float:
        return max(_PATIENCE, _PATIENT_STEPS * max(self._durations, default=0.0))

    def _refresh(self, step: int, donor: int) -> None:
        """Makes a slice equal to that of ``donor``; after a first turn, as many as there is time to compare."""
        wait = max(_LEAST_WAIT, self._share * self._stretch * self.step_time)
        until = time.monotonic() + wait
        while self._take_slice(step, donor, wait) and self._turns and not self.sound:
            if (wait := until - time.monotonic()) <= 0:
                break

    def _take_slice(self, step: int, donor: int, wait: float) -> bool:
        """Makes a slice equal to that of ``donor``, if it is sound; both stand after ``step``. Whether it is."""
        replica, counters = self.replica, self.counters
        # not by the step's number: nothing is taken in steps after which the optimizer does not step
        which = min(self._stale, key=lambda one: (one - self._tried - 1) % replica.slices)
        self._tried = which
        self._turn_at = step if self._turn_at < 0 else self._turn_at
        self.moment.disturb()
        try:
            lineage, what, body = self._pull_slice(donor, step, which, wait, only_sound=True)
            if what == _OTHER:
                before = replica.digest(which, buffers=False)
                replica.write(which, body)
                self._taken |= replica.digest(which, buffers=False) != before
        except TransportError as error:
            log.debug("%s", error)
            counters["slices_missed"] += 1
            self._giver, self._stretch = -1, min(2 * self._stretch, _STRETCH_MOST)
            self._missed += 1
            if self._missed == _TURNS_MOST * replica.slices:
                log.warning(
                    "rank %d: this replica has missed results and is still not equal to the others: of %d slices that "
                    "it asked for none came within %.1f ms; give a larger resync_share, or call synchronise()",
                    self._rank,
                    self._missed,
                    wait * 1000,
                )
            return False
        if what == _UNSOUND:
            self._giver = -1
            self._unsound_peers.add(donor)
            return False
        self._giver, self._missed = donor, 0
        self._unsound_peers.clear()
        if what == _UNLIKE:  # slices do not carry that
            counters["slices_unlike"] += 1
            if self._whole_at is None or step_distance(step, self._whole_at) >= replica.slices:
                self._whole_at = step
                self._adopt(donor, step, self._patience)
            return False
        counters["slices_taken" if what == _OTHER else "slices_equal"] += 1
        counters["bytes_taken"] += len(body)
        if lineage != self._following:
            self.unsound()
            self._following = lineage
        stale = self._stale
        stale.discard(which)
        if not stale and stale is self._stale:  # else a result was lost just now
            self._end_turn(step, donor, lineage)
        return True

    def _end_turn(self, step: int, donor: int, lineage: int) -> None:
        """All slices have been equal to those of ``donor``, each after some step."""
        if not self._taken or self._turn_at == step:
            self._sound_again(lineage)
            return
        self._turns += 1
        turns = self._turns
        self._begin_turn()
        if turns >= _TURNS_MOST:
            self.counters["slices_in_vain"] += 1
            log.info(
                "rank %d: slices do not make this replica equal after step %d, since its optimizer mixes entries; it "
                "takes the whole state of rank %d",
                self._rank,
                step,
                donor,
            )
            self._turns = 0
            self._adopt(donor, step, self._patience)

    def _pull_slice(
        self, rank: int, step: int, which: int, timeout: float, *, only_sound: bool
    ) -> tuple[int, int, memoryview]:
        """Asks for a slice; lineage, what the answer is, and its contents if they are other ones than here."""
        wait = min(int(timeout * 1000), 0xFFFF)
        own = self.replica.layout(which), self.replica.digest(which)
        body = self._reliable.pull(rank, "slice", _SLICE.pack(step, which, only_sound, wait, *own), timeout)
        if len(body) < _GIVEN.size:
            raise TransportError(f"rank {rank} answers {len(body)} bytes for a slice: run one version on all ranks")
        return *_GIVEN.unpack_from(body), memoryview(body)[_GIVEN.size :]

    def _lead(self, step: int) -> None:
        """Becomes the reference if no live rank is sound, and none is lower."""
        live = set(self._live()) - {self._rank}
        if self.sound or not live or min(live) < self._rank or not live <= self._unsound_peers:
            return
        self._unsound_peers.clear()
        said = self._lineages.ask(live)
        if any(said.get(rank, True) for rank in live):
            return
        self._sound_again(_led(step, self._rank))
        self.counters["led"] += 1
        log.info("rank %d: no rank is sound after step %d; the others take the state of this one", self._rank, step)

    # -- on demand, in the training thread

    def synchronise(self, timeout: float) -> bool:
        """Meets the others that call it after the same step, and takes what most of the sound ones hold.

        Raises:
            ConfigError: an optimizer keeps something that cannot be compared, by name.

        Returns:
            Whether all ranks that have not died have answered, are a majority, and hold the same to the bit. False
            after ``timeout`` seconds at most, and as soon as a rank is known to have gone on without synchronising.
        """
        step = self.moment.step
        if step is None:
            return False
        self._meeting = True
        try:
            return self._synchronise(step, timeout)
        finally:
            self._meeting = False

    def _synchronise(self, step: int, timeout: float) -> bool:
        self.replica.freeze()  # buffers as they are now, and a step that was not the end of anything
        self.moment.settle(step)
        begun = time.monotonic()
        until, patience = begun + timeout, begun + timeout / 2  # half of it is for taking what those hold who came
        peers = set(range(self._ranks)) - {self._rank}
        members, alike, well = peers, False, False
        own = self.standing()
        for number in range(_ROUNDS):
            self._meetings.publish(step, number, own)
            heard = self._meetings.gather(step, number, members, until if number else patience)
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
            chosen = reference(standings, step, self._ranks)
            self._name_differences(standings, chosen)
            if not own.holds(standings[chosen]):
                givers = [rank for rank in sorted(heard) if heard[rank].holds(standings[chosen])]
                self._take_all(givers[self._rank % len(givers)], step, own, standings[chosen], until)
                own = self.standing()
        self._meetings.leave()
        if alike and members and (own.well or any(standing.sound for standing in standings.values())):
            self._sound_again(_met(step, own.state))
            self._lineages.doubt(set(self._live()) - members)  # who did not come follows an older one
        self.counters["meetings"] += 1
        self.counters["meetings_alike"] += well
        self._say_who_met(step, members, peers - members, alike, well)
        return well

    def _complete(self, absent: set[int]) -> bool:
        """Whether the ranks that are not ``absent`` are a majority, and all others have died."""
        return 2 * len(absent) < self._ranks and absent <= self._died()

    def _died(self) -> set[int]:
        """Peers that are known as dead, and take no connection: a process that is stopped takes one."""
        return self._meetings.unreachable - set(self._live()) - set(self._closed())

    def _say_who_met(self, step: int, members: set[int], absent: set[int], alike: bool, well: bool) -> None:
        died, closed = absent & self._died(), absent & set(self._closed())
        told = {
            "hold something else": set() if alike else members,
            "have closed": closed,
            "have died": died,
            "did not synchronise after it": absent - closed - died,
        }
        said = "".join(f"; rank(s) {sorted(ranks)} {what}" for what, ranks in told.items() if ranks)
        if 2 * len(absent) >= self._ranks:
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
        """What this rank holds now.

        Raises:
            ConfigError: an optimizer keeps something that cannot be compared, by name.
        """
        replica, slices = self.replica, range(self.replica.slices)
        form = replica.describe(places=False)
        marks = [replica.mark(which) for which in slices]
        bare = [replica.mark(k, buffers=False) if replica.has_buffers(k) else marks[k] for k in slices]
        return Standing(self.sound, digest_of(form, *bare), digest_of(form), tuple(marks))

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
            self._adopt(rank, step, until - time.monotonic(), bounded=True)
            return
        self.unsound()  # until all of it is here
        self.moment.disturb()
        lineage, unlike = 0, False
        try:
            for which, (mine, other) in enumerate(zip(own.slices, theirs.slices, strict=True)):
                if mine == other:
                    continue
                left = max(0.05, until - time.monotonic())
                lineage, what, body = self._pull_slice(rank, step, which, left, only_sound=False)
                if unlike := what == _UNLIKE:
                    break
                if what == _OTHER:  # else it has become equal
                    self.replica.write(which, body)
                self.counters["slices_taken" if what == _OTHER else "slices_equal"] += 1
                self.counters["bytes_taken"] += len(body)
        except TransportError as error:
            log.info("rank %d: not synchronised: %s", self._rank, error)
            self.counters["whole_failed"] += 1
        else:
            if theirs.sound and lineage and not unlike:
                self._sound_again(lineage)
        finally:
            self.replica.freeze()
            self.moment.settle(step)
        if unlike:  # slices do not carry that
            self._adopt(rank, step, until - time.monotonic(), bounded=True)

    # -- the whole state, in the training thread

    def _adopt(
        self, rank: int, step: int, timeout: float, *, or_later: bool = False, bounded: bool = False
    ) -> int | None:
        """Takes the whole state of ``rank`` as it is after ``step``; returns the step, None if it was not possible, or
        ``_BUSY`` if another rank takes it.

        Args:
            rank, step: whose, and after which step.
            timeout, bounded: see ``_limits``.
            or_later: any later step will do, too.
        """
        self.moment.disturb()
        try:
            replica = self.replica
            held = sum(map(replica.size, range(replica.slices)))
            wait, most, rate = _limits(held, timeout, bounded=bounded)
            ask = _ASK.pack(step, or_later, replica.rest())
            body = memoryview(self._reliable.pull(rank, "whole", ask, wait, most, rate))
            stands, lineage, rest, length, more = _WHOLE.unpack_from(body)
            self.unsound()  # until all of it is written
            replica.arrange(bytes(body[_WHOLE.size : _WHOLE.size + length]))
            at = _WHOLE.size + length
            sizes = [replica.size(which) for which in range(replica.slices if rest else replica.trained)]
            if at + sum(sizes) + more != len(body):
                raise TransportError(
                    f"rank {rank} has {len(body) - at - more} bytes of state, this one {sum(sizes)}: train the same "
                    "model with the same optimizer on every rank"
                )
            for which, size in enumerate(sizes):
                replica.write(which, body[at : at + size])
                at += size
            self.take_also(bytes(body[at:]))
        except TransportError as error:
            if isinstance(error, Refusal) and str(error).endswith(_TAKEN):
                return _BUSY
            log.info("rank %d: not synchronised: %s", self._rank, error)
            self.counters["whole_failed"] += 1
            return None
        finally:
            self.replica.freeze()
            if self.moment.step is not None:
                self.moment.settle(self.moment.step)
        self.moment.settle(stands)
        self.counters["whole_taken"] += 1
        self.counters["bytes_taken"] += len(body)
        if lineage:
            self._sound_again(lineage)
        return int(stands)

    def take_over(
        self, stands: int, description: bytes, pull: Callable[[int], bytes | bytearray], lineage: int
    ) -> None:
        """Takes another rank's state after step ``stands``, slice by slice.

        Args:
            stands: step.
            description: of what its optimizers keep (``Replica.describe``).
            pull: gives the bytes of a slice; none where a slice that is not of trained parameters is equal.
            lineage: of that rank; 0 if it is not sound.

        Raises:
            TransportError: a slice did not come, or is of another size; this rank is not sound then.
        """
        self.unsound()
        self.moment.disturb()
        self.replica.arrange(description)
        for which in range(self.replica.slices):
            body = pull(which)
            if body or which < self.replica.trained:
                self.replica.write(which, memoryview(body))
            self.counters["bytes_taken"] += len(body)
        self.counters["whole_taken"] += 1
        self.replica.freeze()
        self.moment.settle(stands)
        if lineage:
            self._sound_again(lineage)

    def adopt_any(self, step: int, timeout: float) -> int | None:
        """Takes the state after ``step`` or a later one from any live rank, sound ones first.

        For a rank that has jumped. Returns the step; None if nobody gave it. In ``timeout`` seconds it has to begin to
        come; its size gives it more (``_limits``). Who is giving it to another rank is asked again meanwhile.
        """
        until = time.monotonic() + timeout
        live = sorted(set(self._live()) - {self._rank})
        said = self._lineages.ask(live)
        for sound in (True, False):
            asked = [rank for rank in live if bool(said.get(rank, 0)) == sound]
            first = (step + self._rank) % max(1, len(asked))  # ranks that are lost together begin with different ones
            asked = asked[first:] + asked[:first]
            while asked:
                busy = []
                for rank in asked:
                    left = until - time.monotonic()
                    if left <= 0:
                        return None
                    stands = self._adopt(rank, step, left, or_later=True)
                    if stands == _BUSY:
                        busy.append(rank)
                    elif stands is not None:
                        return stands
                if asked := busy:
                    time.sleep(_AGAIN)
        return None

    # -- in the thread that compares digests

    def _compared(self, check: Check, unlike: list[int] | None) -> None:
        """What it has found."""
        self.counters["digests_compared"] += 1
        if unlike == []:
            return
        self.counters["digests_unlike"] += 1
        if unlike is None:  # not what most hold: as a rank that has missed something
            self.unsound()
        how = "" if self._digests.rates_unlike else f" in slice {check.which} of {self.replica.slices}"
        why = (
            'their learning rates are not the same: move schedulers on alike, give register also={"scheduler": ...}, '
            "or batches(step=, on_skip=)"
            if self._digests.rates_unlike
            else "look for memory errors, operations that are not deterministic, and weights that one rank changes"
        )
        window = check.step // self.replica.slices
        if window == self._warned:  # its other slices are likely to differ, too: once is enough
            return
        self._warned = window
        log.warning(
            "rank %d: %s after step %d%s, without a lost result: %s",
            self._rank,
            "this rank differs from the others" if unlike is None else f"rank(s) {unlike} differ from this one",
            check.step,
            how,
            why,
        )

    # -- answering, in threads of the reliable path

    def _answer_slice(
        self, step: int, which: int, only_sound: int, wait: int, layout: bytes, digest: bytes
    ) -> list[bytes | memoryview]:
        if which >= self.replica.slices:
            raise Refusal(f"there are {self.replica.slices} slices here, not {which + 1}")
        if only_sound and not self.sound:
            return [_GIVEN.pack(0, _UNSOUND)]
        with self.moment.reading(step, wait / 1000):
            lineage = self.lineage
            if only_sound and not lineage:
                return [_GIVEN.pack(0, _UNSOUND)]
            if self.replica.layout(which) != layout:
                return [_GIVEN.pack(lineage, _UNLIKE)]
            if self.replica.digest(which) == digest:
                return [_GIVEN.pack(lineage, _SAME)]
            parts = self.replica.copy(which)
        self.counters["slices_given"] += 1
        return [_GIVEN.pack(lineage, _OTHER), *parts]

    def _answer_whole(self, step: int, or_later: int, rest: bytes) -> list[Buffer]:
        if not or_later:  # who synchronises has a few rounds only
            return self._copy(step, or_later, rest)
        if not self._giving.acquire(blocking=False):
            raise Refusal(_TAKEN)
        try:
            return Ended(self._copy(step, or_later, rest), self._giving.release)
        except BaseException:
            self._giving.release()
            raise

    def _copy(self, step: int, or_later: int, rest: bytes) -> list[Buffer]:
        replica = self.replica
        with self.moment.reading(step, self._patience, or_later=bool(or_later)) as stands:
            try:
                told, also, lineage = replica.describe(), self.tell_also(), self.lineage
            except ConfigError as error:
                raise Refusal(str(error)) from None
            alike = replica.rest() == rest
            slices = range(replica.trained if alike else replica.slices)
            parts = [part for which in slices for part in replica.copy(which)]
        self.counters["whole_given"] += 1
        return [_WHOLE.pack(stands, lineage, not alike, len(told), len(also)), told, *parts, also]
