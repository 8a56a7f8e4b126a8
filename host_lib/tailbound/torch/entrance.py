"""How a rank that has come back takes over what the others hold, between two steps of one of them (clock-32).

The new process first makes a step or two by itself, so that DDP settles its buckets and compilers compile. When its
buckets are those of the others it asks one of them, its *donor*.
"""

from __future__ import annotations

import logging
import struct
import threading
import time

from tailbound.collective.comeback import AT_ONCE, Part, of_form
from tailbound.collective.communicator import Communicator
from tailbound.errors import ConfigError, LayoutError, TransportError
from tailbound.torch.finished import Layout
from tailbound.torch.resync import LOADED, NEVER, Resync, Wanted
from tailbound.transport.reliable import Refusal
from tailbound.transport.steps import STEP_MASK

log = logging.getLogger("tailbound")

#: Requests on the reliable path: to be let in, and that it is over; the rank, and ms to wait.
_ENTER, _ENTERED, _ASK = "enter", "entered", struct.Struct("!HI")
#: The answer begins with the step; where it ends in the rings follows.
_STEP = struct.Struct("!I")
#: Steps that a new process makes by itself at most: DDP settles its buckets in one, or two with ``static_graph``.
_ALONE_MOST = 4
#: Seconds for a peer to answer, and those that a donor waits for a rank besides what its state takes.
_PEER, _SILENCE = 3.0, 10.0
#: Seconds between two questions to be let in.
_AGAIN = 0.05
#: Milliseconds that a donor lets the new rank wait for the end of its step before it has to ask again.
_POLL = 2000
#: Seconds that a new rank waits for the end of a step of one donor before it asks another one.
_TURN = 10.0


class Entrance:
    """Both sides: a live rank lets others in, a rank outside enters."""

    def __init__(self, communicator: Communicator, resync: Resync, layout: Layout) -> None:
        self._communicator, self._resync, self._layout = communicator, resync, layout
        self._rank = communicator.config.rank
        self._changed = threading.Condition()
        self._guests: set[int] = set()
        self._open = self._over = False
        self.alone = 0  #: steps that this process has made by itself
        reliable = communicator.reliable
        reliable.serve(_ENTER, of_form(_ASK, self._answer_enter))
        reliable.serve(_ENTERED, of_form(_ASK, self._forget))
        reliable.before_close(self._close)

    @property
    def outside(self) -> bool:
        """Whether this process is new in a job under way, and has not entered yet."""
        return self._communicator.part == Part.OUTSIDE

    # -- a live rank, in the training thread and in those of the reliable path

    def admit(self, *, held: bool) -> None:
        """Between two steps: lets in who asks, and holds meanwhile; ``held``: this rank holds in any case."""
        with self._changed:
            if not self._guests or self._over:
                return
        begun = time.monotonic()
        self._communicator.hold(True)
        try:
            with self._changed:
                self._open, until = True, begun + self._patience
                self._changed.notify_all()
                while self._guests and not self._over and time.monotonic() < until:
                    self._changed.wait(_AGAIN)
                    if self._resync.giving:  # on the way, for as long as TCP moves
                        until = time.monotonic() + self._patience
                self._open = False
                self._guests.clear()
        finally:
            self._communicator.hold(held)
        log.info("rank %d: held for %.2f s while its state was taken", self._rank, time.monotonic() - begun)

    @property
    def _patience(self) -> float:
        """Seconds that a guest may be silent: it loads what has come, and asks all ranks to take it in."""
        asks = 2 * _PEER * -(-len(self._communicator.job.peers) // AT_ONCE)
        return _SILENCE + self._resync.given / LOADED + asks

    def _answer_enter(self, rank: int, milliseconds: int) -> list[bytes]:
        try:
            with self._changed:
                self._guests.add(rank)
                self._changed.wait_for(lambda: self._open or self._over, min(milliseconds, _POLL) / 1000)
                if self._over:
                    raise Refusal("this rank is closing")
                step = self._resync.moment.step
                if not self._open or step is None or self._communicator.step != step + 1 & STEP_MASK:
                    raise Refusal("no step has ended here yet")
            return [_STEP.pack(step), self._communicator.entrance()]
        except Exception as error:
            self._forget(rank)
            if isinstance(error, Refusal):
                raise
            raise Refusal(f"{type(error).__name__}: {error}") from error

    def _forget(self, rank: int, _: int = 0) -> list[bytes]:
        with self._changed:
            self._guests.discard(rank)
            self._changed.notify_all()
        return []

    def _close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # -- a rank outside, in the training thread

    def enter(self, timeout: float) -> bool:
        """Between two steps that this process has made by itself: enters the job, if its buckets have settled.

        Returns:
            Whether it is inside now; if not, it is to make one more step by itself.

        Raises:
            LayoutError, ConfigError, TransportError: it cannot, or not within ``timeout`` seconds.
        """
        self.alone += 1
        until, reason = time.monotonic() + timeout, "no rank of the job is inside it"
        while True:
            found = self._resync.standings.now(self._communicator.job.peers)
            own = self._layout.digest()
            donors = sorted(found, key=lambda rank: not found[rank].sound)
            alike = [rank for rank in donors if found[rank].form == own]
            if any(not any(found[rank].form) for rank in donors):
                reason = "their buckets have not settled"
            elif donors and not alike:
                if self.alone < _ALONE_MOST:
                    return False
                raise LayoutError(
                    f"rank {self._rank}: DDP has made other buckets here than on rank {donors[0]}, after "
                    f"{self.alone} steps: give DistributedDataParallel the same options on every rank, and use "
                    "parameters in the same order on every rank: DDP fills buckets as gradients become ready"
                )
            else:
                for donor in alike:
                    try:
                        self._adopt(donor, until)
                    except TransportError as error:
                        reason = str(error)
                        if NEVER in reason:  # asking again does not help
                            raise ConfigError(f"rank {self._rank}: {reason}; then restart it") from error
                        log.info("rank %d: not inside yet: %s", self._rank, error)
                    else:
                        return True
            if time.monotonic() >= until:
                raise TransportError(
                    f"rank {self._rank}: could not come back within {timeout:g} s: {reason}: restart it, or all "
                    "ranks from a checkpoint"
                )
            self._pause()

    def _adopt(self, donor: int, until: float) -> None:
        """Takes over what ``donor`` holds and goes on with its next step."""
        begun = time.monotonic()
        try:
            body = self._ask_in(donor, min(until, begun + _TURN))
            (step,) = _STEP.unpack_from(body)
            stopped = time.monotonic()
            self._resync.take_state(donor, step, _SILENCE, Wanted.WHOLE | Wanted.BUFFERS)
            here = self._communicator.enter(bytes(body[_STEP.size :]))
            self._communicator.hold(True)  # until its first step with the others is launched: it may look for its data
        finally:
            try:
                self._communicator.reliable.pull(donor, _ENTERED, _ASK.pack(self._rank, 0), _PEER, 0)
            except TransportError as error:  # it goes on by itself after a while
                log.info("rank %d: %s", self._rank, error)
        log.info(
            "rank %d: has come back before step %d with the state of rank %d (%.1f MB in %.2f s, after %.2f s for the "
            "end of its step); ranks %s know of it",
            self._rank,
            step + 1 & STEP_MASK,
            donor,
            self._resync.counters["bytes_taken"] / 1e6,
            time.monotonic() - stopped,
            stopped - begun,
            sorted(here),
        )

    def _ask_in(self, rank: int, until: float) -> bytearray:
        ask = _ASK.pack(self._rank, _POLL)
        while True:
            try:
                return self._communicator.reliable.pull(rank, _ENTER, ask, _POLL / 1000 + _PEER)
            except Refusal:
                if time.monotonic() >= until:
                    raise
                self._pause()

    def _pause(self) -> None:
        """Between two questions."""
        with self._changed:
            if self._changed.wait_for(lambda: self._over, _AGAIN):
                raise TransportError(f"rank {self._rank}: is closing before it has come back: restart it")
