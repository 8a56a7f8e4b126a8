"""How a rank that has come back takes over what the others hold, between two steps of one of them (clock-32).

The new process first makes a step or two by itself: DDP makes its buckets anew after the first, compilers compile, and
what its optimizers keep takes shape. When its buckets are those of the others it asks one of them, its *donor*. The
donor stops at the end of a step, and holds, so that the others wait for it as for a rank that evaluates; the new one
takes the state slice by slice, has all ranks take it in again, and both go on with the same step.

What is taken: parameters, persistent buffers and what optimizers keep, with the settings of their groups
(``replica``); the loss scale; and the ``state_dict`` of whatever ``register`` was given as ``also``. Frozen parameters
and large buffers are sent where they differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tailbound.collective.comeback import Part
from tailbound.collective.communicator import Communicator
from tailbound.errors import ConfigError, LayoutError, TransportError
from tailbound.torch.also import Stateful, decode, encode, load
from tailbound.torch.finished import Layout
from tailbound.torch.resync import RATE, Resync
from tailbound.torch.scaler import GradScaler
from tailbound.transport.reliable import Refusal
from tailbound.transport.requests import AT_ONCE, ask_each, of_form
from tailbound.transport.steps import STEP_MASK

log = logging.getLogger("tailbound")

#: Requests on the reliable path: who could be a donor, to be let in, a slice, a piece of ``also``, and that it is over.
_ABOUT, _ENTER, _SLICE, _ALSO, _ENTERED = "about", "enter", "entry", "also", "entered"
_ASK = struct.Struct("!HI")
#: Asks for a slice: rank, which, digest of what the asker holds.
_PART = struct.Struct("!HI32s")
#: Of an answer to who asks to be let in: come in (step, lineage, and lengths), or never, with a text.
_COME, _NEVER = 1, 0
_HEAD = struct.Struct("!BIQIIQ")
#: Bytes of ``also`` that go in one answer.
_PIECE = 1 << 24
#: Steps that a new process makes by itself at most: DDP settles its buckets in one, or two with ``static_graph``.
_ALONE_MOST = 4
#: Seconds: for a peer to say what it holds, and for a donor to hear of who takes its state, per request of a slice.
_PEER, _SILENCE = 3.0, 10.0
#: Seconds between two questions to be let in.
_AGAIN = 0.05
#: Milliseconds that a donor lets the new rank wait for the end of its step before it has to ask again.
_POLL = 2000
#: Seconds that a new rank waits for the end of a step of one donor before it asks another one.
_TURN = 10.0


class _About(NamedTuple):
    """What a rank says before anything is taken."""

    rank: int
    sound: bool
    buckets: str
    also: int  # bytes, as far as is known


class Entrance:
    """Both sides: a live rank lets others in, a rank outside enters.

    Args:
        communicator: of the job.
        resync: of the replica.
        layout: of DDP's buckets.
        also: what else has a state, by name.
        scaler: gives the scaler, if there is one.
    """

    def __init__(
        self,
        communicator: Communicator,
        resync: Resync,
        layout: Layout,
        also: Mapping[str, Stateful],
        scaler: Callable[[], GradScaler | None],
    ) -> None:
        self._communicator, self._resync, self._layout = communicator, resync, layout
        self._also, self._scaler = dict(also), scaler
        self._rank = communicator.config.rank
        self._changed = threading.Condition()
        self._guests: set[int] = set()
        self._open = self._over = False
        self._until = 0.0  # monotonic seconds: so long a guest may be silent
        self._telling, self._told = threading.Lock(), b""
        self._also_bytes = 0  # of what is told of ``also``, at most until now: encoding and loading it takes time
        with contextlib.suppress(ConfigError):  # who asks for it is told so
            self._also_bytes = len(encode(self._also))
        #: steps that this process has made by itself
        self.alone = 0
        self.counters: Counter[str] = Counter()
        reliable = communicator.reliable
        reliable.serve(_ABOUT, self._answer_about)
        reliable.serve(_ENTER, of_form(_ASK, self._answer_enter))
        reliable.serve(_SLICE, of_form(_PART, self._answer_slice))
        reliable.serve(_ALSO, of_form(_ASK, self._answer_also))
        reliable.serve(_ENTERED, of_form(_ASK, self._answer_entered))
        reliable.before_close(self._close)

    @property
    def outside(self) -> bool:
        """Whether this process is new in a job under way, and has not entered yet."""
        return self._communicator.part == Part.OUTSIDE

    def _peers(self) -> list[int]:
        return self._communicator.job.peers

    # -- a live rank, in the training thread and in those of the reliable path

    def admit(self, *, held: bool) -> None:
        """Between two steps: lets in who asks, and holds meanwhile; ``held``: this rank holds in any case."""
        with self._changed:
            if not self._guests or self._over:
                return
        begun = time.monotonic()
        self._communicator.hold(True)
        try:
            with self._telling:  # what was told of an earlier step
                self._told = b""
            with self._changed:
                self._open, self._until = True, time.monotonic() + _SILENCE
                self._changed.notify_all()
                while self._guests and not self._over and (left := self._until - time.monotonic()) > 0:
                    self._changed.wait(left)
                self._open = False
                self._guests.clear()
        finally:
            self._communicator.hold(held)
        self.counters["admitted"] += 1
        log.info("rank %d: held for %.2f s while its state was taken", self._rank, time.monotonic() - begun)

    def _answer_about(self, _: bytes) -> list[bytes]:
        if self._communicator.part != Part.INSIDE:
            raise Refusal("this rank is not in the job itself yet")
        about = {"sound": self._resync.sound, "buckets": self._buckets()}
        return [json.dumps(about | {"also": self._also_bytes}).encode()]

    def _answer_enter(self, rank: int, milliseconds: int) -> list[bytes | memoryview]:
        resync = self._resync
        with self._changed:
            self._guests.add(rank)
            if not self._changed.wait_for(lambda: self._open or self._over, min(milliseconds, _POLL) / 1000):
                self._guests.discard(rank)
                raise Refusal("no step has ended here yet")
            if self._over:
                raise Refusal("this rank is closing")
            self._allow(_silence(self._also_bytes))  # it is encoded now
        try:
            step = resync.moment.step
            where, told = self._communicator.entrance(), resync.replica.describe()
            if step is None or self._communicator.step != step + 1 & STEP_MASK:
                raise Refusal("no step has ended here yet")
            also = self._tell_also()
        except ConfigError as error:  # asking again does not help
            self._forget(rank)
            log.warning("rank %d: rank %d cannot be let in: %s", self._rank, rank, error)
            return [bytes([_NEVER]), str(error).encode()]
        except Exception as error:
            self._forget(rank)
            raise Refusal(f"{type(error).__name__}: {error}") from error
        with self._changed:
            self._allow(_SILENCE)
        return [_HEAD.pack(_COME, step, resync.lineage, len(where), len(told), len(also)), where, told]

    def _answer_slice(self, rank: int, which: int, held: bytes) -> list[memoryview]:
        replica = self._resync.replica
        if which >= replica.slices:
            raise Refusal(f"there are {replica.slices} slices here, not {which + 1}")
        with self._changed:
            self._must_wait_for(rank)
            last = which == replica.slices - 1  # then the guest loads ``also``, and asks all ranks to take it in
            asks = 2 * _PEER * -(-len(self._peers()) // AT_ONCE)
            self._allow(_silence(replica.size(which) + last * self._also_bytes) + last * asks)
        equal = which >= replica.trained and replica.digest(which) == held  # trained parameters hardly ever are
        return [] if equal else replica.copy(which)

    def _answer_also(self, rank: int, piece: int) -> list[memoryview]:
        with self._changed:
            self._must_wait_for(rank)
            self._allow(_silence(max(_PIECE, self._also_bytes)))  # after the last one the guest decodes them
        return [memoryview(self._tell_also())[piece * _PIECE : (piece + 1) * _PIECE]]

    def _must_wait_for(self, rank: int) -> None:
        if rank not in self._guests or not self._open:
            raise Refusal("this rank waits no longer")

    def _allow(self, seconds: float) -> None:
        self._until = max(self._until, time.monotonic() + seconds)

    def _answer_entered(self, rank: int, _: int) -> list[bytes]:
        self._forget(rank)
        return []

    def _forget(self, rank: int) -> None:
        with self._changed:
            self._guests.discard(rank)
            self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _tell_also(self) -> bytes:
        """What ``also`` holds after this step, the same bytes for all who ask."""
        with self._telling:
            if not self._told:
                scaler = self._scaler()
                self._told = encode(self._also, scaler.epoch if scaler is not None else None)
                self._also_bytes = max(self._also_bytes, len(self._told))
            return self._told

    # -- what is compared before

    def _buckets(self) -> str:
        """Digest of what DDP's buckets are made of; empty while they are not known."""
        told = [[b.index, b.numel, str(b.dtype), b.last, b.parts] for b in self._layout.step()]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest() if told else ""

    # -- a rank outside, in the training thread

    def enter(self, timeout: float) -> bool:
        """Between two steps that this process has made by itself: enters the job, if its buckets have settled.

        Returns:
            Whether it is inside now; if not, it is to make one more step by itself.

        Raises:
            LayoutError: its buckets, or names in ``also``, are not those of the others.
            ConfigError: a state cannot go from one rank to another, by name.
            TransportError: nobody has given its state for ``timeout`` seconds.
        """
        self.alone += 1
        until, reason = time.monotonic() + timeout, "no rank of the job is inside it"
        while True:
            donors, own, alike = self._donors(), self._buckets(), []
            if any(not donor.buckets for donor in donors):
                reason = "their buckets have not settled"
            elif donors and not (alike := [donor for donor in donors if donor.buckets == own]):
                if self.alone < _ALONE_MOST:
                    return False
                raise LayoutError(
                    f"rank {self._rank}: DDP has made other buckets here than on rank {donors[0].rank}, after "
                    f"{self.alone} steps: give DistributedDataParallel the same options on every rank, and use "
                    "parameters in the same order on every rank: DDP fills buckets as gradients become ready"
                )
            else:
                for donor in alike:
                    try:
                        self._take(donor, until)
                    except TransportError as error:
                        reason = str(error)
                        log.info("rank %d: not inside yet: %s", self._rank, error)
                    else:
                        return True
            if time.monotonic() >= until:
                raise TransportError(
                    f"rank {self._rank}: could not come back within {timeout:g} s: {reason}: restart it, or all "
                    "ranks from a checkpoint"
                )
            self._pause()

    def _donors(self) -> list[_About]:
        """Who could give its state, sound ranks first."""

        def ask(rank: int) -> _About | None:
            try:
                return _About(rank, **json.loads(self._communicator.reliable.pull(rank, _ABOUT, b"", _PEER, 1 << 12)))
            except (ValueError, TypeError):  # of another version
                return None

        return sorted(ask_each(self._peers(), ask, "tailbound-about").values(), key=lambda about: not about.sound)

    def _take(self, donor: _About, until: float) -> None:
        """Takes over what ``donor`` holds and goes on with its next step.

        Raises:
            TransportError: it did not come to the end of a step, or not all of it came.
        """
        pull, rank = self._communicator.reliable.pull, donor.rank
        begun = time.monotonic()
        try:
            body = self._ask_in(rank, min(until, begun + _TURN), donor.also)
            _, step, lineage, *sizes, length = _HEAD.unpack_from(body)
            where, description = (bytes(body[at : at + size]) for at, size in zip(_starts(sizes), sizes, strict=True))
            stopped = time.monotonic()
            states, scale = decode(self._pull_also(rank, length))
            replica = self._resync.replica

            def pull_slice(which: int) -> bytearray:
                held = replica.digest(which) if which >= replica.trained else b""
                return pull(rank, _SLICE, _PART.pack(self._rank, which, held), _silence(replica.size(which)))

            self._resync.take_over(step, description, pull_slice, lineage)
            load(self._also, states)
            if (scaler := self._scaler()) is not None and scale is not None:
                scaler.take_over(scale, step + 1 & STEP_MASK)
            here = self._communicator.enter(where)
            self._communicator.hold(True)  # until its first step with the others is launched: it may look for its data
        finally:
            self._tell_over(rank, _ASK.pack(self._rank, 0))
        log.info(
            "rank %d: has come back before step %d with the state of rank %d (%.1f MB in %.2f s, after %.2f s for the "
            "end of its step); ranks %s know of it",
            self._rank,
            step + 1 & STEP_MASK,
            rank,
            self._resync.counters["bytes_taken"] / 1e6,
            time.monotonic() - stopped,
            stopped - begun,
            sorted(here),
        )

    def _ask_in(self, rank: int, until: float, also: int) -> bytearray:
        ask, patience = _ASK.pack(self._rank, _POLL), _POLL / 1000 + _silence(also)
        while True:
            try:
                body = self._communicator.reliable.pull(rank, _ENTER, ask, patience)
            except Refusal:
                if time.monotonic() >= until:
                    raise
                self._pause()
                continue
            if body[0] == _NEVER:
                raise ConfigError(
                    f"rank {self._rank}: rank {rank} cannot let it in: {body[1:].decode()}; then restart it"
                )
            return body

    def _tell_over(self, rank: int, me: bytes) -> None:
        try:
            self._communicator.reliable.pull(rank, _ENTERED, me, _PEER, 0)
        except TransportError as error:  # it goes on by itself after a while
            log.info("rank %d: %s", self._rank, error)

    def _pull_also(self, rank: int, size: int) -> bytearray:
        body = bytearray()
        while len(body) < size:
            piece = _ASK.pack(self._rank, len(body) // _PIECE)
            got = self._communicator.reliable.pull(rank, _ALSO, piece, _silence(_PIECE), _PIECE)
            if not got:
                raise TransportError(f"rank {rank} has {len(body)} bytes of also instead of {size}: ask it again")
            body += got
        return body

    def _pause(self) -> None:
        """Between two questions."""
        with self._changed:
            if self._changed.wait_for(lambda: self._over, _AGAIN):
                raise TransportError(f"rank {self._rank}: is closing before it has come back: restart it")


def _starts(sizes: list[int]) -> list[int]:
    """Where parts of ``sizes`` bytes begin that follow a head."""
    return [_HEAD.size + sum(sizes[:number]) for number in range(len(sizes))]


def _silence(size: int) -> float:
    """Seconds that an answer of ``size`` bytes may take, and each of encoding, decoding and loading them."""
    return _SILENCE + size / RATE
