"""The Transpose AllReduce (TAR): a background thread that carries ops from launch to result.

TAR is the two-hop all-reduce of OptiReduce (NSDI'25, section 3.2): every rank owns an equal share of the rows, all
send it theirs, it averages and sends the result to everybody. Here the summing happens below, in the
datapath, also for ops that the training thread of this rank has not launched yet.

One thread, one loop: take what has come, move every op on, sleep until something arrives or the earliest deadline.
It never spins, and never waits for anything without a time at which it stops waiting.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from tailbound.collective.alerts import LOOK_EVERY, fault_of
from tailbound.collective.averages import Averages
from tailbound.collective.contribute import advance, plain, prepare
from tailbound.collective.execute import SAME_MODEL, finish, seal
from tailbound.collective.holding import Holding
from tailbound.collective.inbox import Inbox
from tailbound.collective.job import Job, log
from tailbound.collective.maps import Maps
from tailbound.collective.op import Launch, Op, Outcome
from tailbound.collective.timing import forgive
from tailbound.collective.waiter import Sleep
from tailbound.collective.window import Window
from tailbound.errors import LayoutError, TransportError
from tailbound.forks import keep_from_children
from tailbound.kernel.core import core
from tailbound.transport.sequence import Position
from tailbound.transport.steps import step_distance, step_of
from tailbound.wire.schema import POKED, SERVE_AFTER, Found, PacketType, Phase, Ready, Woken, serial_distance

#: The thread wakes up this often even when nothing arrives, and takes a turn then (an event is a hint, not a promise).
_LONGEST_SLEEP = 100_000_000
#: Without ops it takes one only this often: a turn costs who computes beside it more than its own time, since it takes
#: the caches from them.
_IDLE_SLEEP = 1_000_000_000
#: If the thread has not woken up for so long, the process did not run (stopped, or starved): it suspects nobody then.
_STOPPED = 350_000_000

#: Seconds after which a thread that runs Python hands the GIL over where another one waits for it. By default these are
#: 5 ms, which this thread would wait for several times in every op.
_HAND_OVER = 0.0005

#: Who closes while others go on answers them for so long at most, and ``Config.insist`` longer.
_LINGER = 500_000_000
#: What to do when the transport thread has ended by an error.
_FAILED = "; close the state and register the hook anew. The log has the traceback: report it"

T = TypeVar("T")


def _raise(error: BaseException) -> None:
    raise error


def _taken(queue: deque[T]) -> Iterator[T]:
    """Takes everything out of ``queue``, which another thread may do at the same time."""
    while queue:
        try:
            one = queue.popleft()
        except IndexError:  # the other thread was quicker
            return
        yield one


class Transpose:
    """Runs the ops of one job in a thread of its own.

    Args:
        job: an activated job.
        on_thread: called once in the new thread (to set its affinity or torch's thread count).
        early: control packets that have come already.
        owners_least, outside: of ``Maps``.
    """

    def __init__(
        self,
        job: Job,
        on_thread: Callable[[], None] | None = None,
        early: Iterable[bytes] = (),
        *,
        owners_least: int = 1,
        outside: bool = False,
    ) -> None:
        self.job = job
        self.maps = Maps(job, owners_least, outside=outside)
        self._inbox = Inbox(job, self.maps, job.channels, job.paths)
        self._watched = -LOOK_EVERY  # when a fault was last looked for
        self._averages = Averages(job, job.sequence, job.paths.trying)
        self._window = Window(job, job.queue, self._inbox.adopt)
        self._ops = self._window.ops
        self._new: deque[Launch] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing, self._farewell = False, True
        self._ended = False
        self._error: BaseException | None = None
        self._on_thread = on_thread
        for data in early:
            self._inbox.receive(data, self._ops)
        self._commands: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._holding = Holding(job)
        self._newest = job.marks.contributed  # op that was launched here
        self._standing = False  # a rank held in the last turn.
        self._unsettled = False  # news for all ops came while they were looked at.
        job.threads.meanwhile = self._meanwhile
        self._handing = threading.Lock()  # held while something is handed to the thread, and while it closes
        self._turn = threading.Lock()  # held by who places ops: the thread in a turn, or who launches
        self._resting = False  # an op is over, and whether it was the last one has still to be said
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="tailbound", daemon=True)

    def start(self) -> Transpose:
        """Starts the thread; returns this."""
        keep_from_children(self)
        sys.setswitchinterval(min(sys.getswitchinterval(), _HAND_OVER))
        self._thread.start()
        return self

    def launch(self, launch: Launch) -> None:
        """Hands an op to the thread; ops are numbered in the order of these calls.

        Raises:
            TransportError: the thread has ended.
            LayoutError: ranks disagree on the layout of an earlier op.
        """
        if self._error is not None:
            if isinstance(self._error, LayoutError | TransportError):
                raise self._error
            raise TransportError(
                f"rank {self.job.rank}: the transport has failed: {self._error}{_FAILED}"
            ) from self._error
        if self._closing:
            raise self._closed()
        with self._handing:
            self._idle.clear()
            self._new.append(launch)
        self._poke(1 if self._place(launch) else POKED)
        if self._ended:  # the thread ended in between and may not have seen it
            self._refuse(self._closed())
            self._idle.set()

    def _place(self, launch: Launch) -> bool:
        """Places what was just launched in the thread that launches, if the library then needs no turn."""
        job, window = self.job, self._window
        if not self._turn.acquire(blocking=False):
            return False
        try:
            alone = len(self._new) == 1 and not (window.waiting or self._holding.again or self._closing)
            if not (alone and plain(job, launch) and job.sequence.expects(launch.layout)):
                return False
            self._admit()
        except BaseException as error:  # of what was begun here the thread lets go
            self._commands.append((Future(), partial(_raise, error)))
            if not isinstance(error, Exception):  # Ctrl-C, say
                self._poke()
                raise
            return False
        finally:
            self._turn.release()
        return True

    def call(self, what: Callable[[], T]) -> Future[T]:
        """Runs ``what`` in the transport thread between two turns; only there the sequence and the window may change.

        Raises:
            TransportError: the thread has ended.
        """
        if not self._thread.is_alive():
            raise self._closed()
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(what())
            except BaseException as error:
                future.set_exception(error)

        self._commands.append((future, command))
        self._poke()
        if self._ended:  # in between, and may not have seen it
            self._forget()
        return future

    def _forget(self) -> None:
        """Fails what ``call`` was given and nobody will run any more."""
        for future, _ in _taken(self._commands):
            if future.set_running_or_notify_cancel():
                future.set_exception(self._closed())

    def ask(self, what: Callable[[], T], timeout: float = 10.0) -> T:
        """As ``call``, and waits for the result; what has not been begun within ``timeout`` seconds never will be.

        Raises:
            TransportError: the thread has ended, or this rank is about to leave, or it has no time.
        """
        if self._closing:
            raise self._closed()
        future = self.call(what)
        if wait([future], timeout).not_done and (future.cancel() or wait([future], timeout).not_done):
            raise TransportError(
                f"rank {self.job.rank}: the transport thread has not answered within {timeout:g} s: give this process "
                "more processor time, then try again"
            )
        return future.result()

    def hold(self, on: bool) -> None:
        """Tells the others, from now on or no longer, that this rank is alive but between steps (clock-16)."""
        self.ask(self._holding.start if on else self._holding.resume)

    def position(self) -> Position:
        """Where a rank that is lost can join: the step that is under way here, or begins next. For ``call``.

        Raises:
            TransportError: this rank is behind, or lost itself.
        """
        if behind := self.job.steps.behind:
            raise TransportError(f"rank {self.job.rank} is {behind} steps behind: ask another one")
        return self.job.sequence.position()

    def jump(self, to: Position) -> int:
        """Leaves everything before ``to`` behind; for ``call``, with nothing launched. Returns the steps skipped.

        A rank in step that does not know where rows go (``adrift``) skips none, and knows it again.

        Args:
            to: where to go on.

        Raises:
            TransportError: ops are in flight.
        """
        job = self.job
        if self._in_flight:
            raise TransportError(f"rank {job.rank}: call jump() between two steps, not with ops in flight")
        skipped = step_distance(to.step, step_of(job.sequence.upcoming))
        if skipped < 0 or not (skipped or job.sequence.adrift):
            return 0
        self._window.jump(to)
        self.maps.adopt(to, self._window)
        job.membership.woke(to.step)
        job.counters["jumps"] += 1
        return skipped

    def enter(self, to: Position, away: Collection[int] = ()) -> None:
        """Takes part from ``to`` on, as a new process (``comeback``), and counts no ranks that are ``away``.

        For ``call``, with nothing launched.
        """
        job = self.job
        if self._in_flight:
            raise TransportError(f"rank {job.rank}: a rank enters between two steps: call it with no ops in flight")
        self._window.jump(to)
        self.maps.adopt(to, self._window)
        for rank in set(away) - {job.rank}:
            job.membership.died(rank, job.sequence.upcoming)
        job.publish_live()
        job.membership.woke(to.step)
        job.counters["entered"] += 1

    def ask_after(self, rank: int) -> int:
        """Asks ``rank`` for a word (``answered``); for ``call``. Returns the time, ns."""
        job = self.job
        job.tell(rank, job.header(PacketType.REPAIR, job.marks.contributed, 0))
        return job.now()

    def answered(self, rank: int, since: int) -> bool:
        """Whether a word of ``rank`` has come since then (ns), so that its process lives; for ``call``."""
        return self.job.spoke(rank) > since

    def died(self, rank: int) -> None:
        """The process of ``rank`` has ended without a farewell; for ``call``."""
        members, label = self.job.membership, self.job.sequence.upcoming
        if rank not in members.gone and members.died(rank, label):
            self._told_of_suspect()
            step = step_of(label)
            text = f"the process of rank {rank} has ended (step {step}), without close(); look at its log"
            self.job.events.emit("rank_died", text, died=rank, step=step)

    def suspect(self, rank: int) -> bool:
        """Waits for ``rank`` no more until its next rows come; for ``call``. Returns whether it was waited for."""
        members, label = self.job.membership, self.job.sequence.upcoming
        if rank in members.gone or not members.contribution.accuse(rank, label) | members.result.accuse(rank, label):
            return False
        self._told_of_suspect()
        return True

    def _told_of_suspect(self) -> None:
        self.job.publish_live()
        self._unsettled = True

    def welcome(self, rank: int, step: int) -> tuple[int, int]:
        """``rank`` is back and takes part from ``step`` on; for ``call``. Returns ``Speaker.stamps`` (auth-5).

        Raises:
            TransportError: this process is outside itself, and is to ask ``rank`` when it enters.
        """
        job = self.job
        if self.maps.outside:
            raise TransportError(f"rank {job.rank} is outside itself: ask again once it has come back")
        job.membership.back(rank, step)
        job.hear(rank, job.now())
        job.publish_live()
        self._unsettled = True
        text = f"rank {rank} has come back and takes part from step {step} on"
        job.events.emit("rank_back", text, level=logging.INFO, back=rank, step=step)
        return job.stamps(rank)

    def welcomed(self, rank: int, stamp: int, own: int = 0) -> None:
        """``rank`` has taken this one in, and all that it says from now on has a later stamp; for ``call``.

        ``own``: the newest stamp of this rank that it knows; since then the clock may have been set back.
        """
        job = self.job
        job.voice.stamp = max(job.voice.stamp, own)
        job.present(rank, stamp)
        if rank in job.membership.ended:  # as the donor said, but it has come back at the same time
            job.membership.back(rank, step_of(job.sequence.upcoming))
            job.publish_live()
        self._unsettled = True

    @property
    def window(self) -> Window:
        """The ops in flight, and the results that are kept; for ``call``."""
        return self._window

    def drain(self, timeout: float) -> bool:
        """Waits until all launched ops are over, at most ``timeout`` seconds; returns whether they are."""
        return self._idle.wait(timeout)

    def close(self, timeout: float = 10.0, *, farewell: bool = True) -> None:
        """Says goodbye, ends the thread and closes the datapath; unfinished ops end with what they have.

        Without ``farewell`` it ends at once, as if the process had been killed.
        """
        self._farewell = farewell
        self._closing = True
        self._poke()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._thread.is_alive():
            log.error("rank %d: the transport did not end within %g s and is left behind", self.job.rank, timeout)
        elif self._wake >= 0:
            with self._handing:
                wake, self._wake = self._wake, -1
                os.close(wake)
            self.job.channels.close()
            self.job.threads.close()
            self.job.datapath.close()

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        return [self._wake] if self._wake >= 0 else []

    @property
    def _in_flight(self) -> bool:
        """Whether something that was launched here is not over."""
        return bool(self._new or self._window.waiting or self._window.launched)

    def _poke(self, what: int = POKED) -> None:
        """Wakes the thread up, for a turn or for what was handed over."""
        with self._handing:
            if self._wake >= 0:
                os.eventfd_write(self._wake, what)

    def _run(self) -> None:
        rest = None
        self._turn.acquire()
        try:
            if self._on_thread is not None:
                self._on_thread()
            self._rest = rest = self._made([self._wake, *self.job.datapath.fds()])
            rest.appoint()
            self.job.threads.rest = rest.pointer
            while not self._closing or (self._farewell and self._in_flight):
                again = self._poll(self.job.now())
                self._sleep(again)
            if self._farewell:
                sent = self.job.marks.contributed
                self.job.farewell(self._newest if serial_distance(self._newest, sent) > 0 else sent)
                self._linger()
            else:
                self._end_launched(self._closed())
        except BaseException as error:
            log.exception("rank %d: the transport thread ended", self.job.rank)
            self._fail(error)
        finally:
            self._holding.stop()
            if rest is not None:
                rest.dismiss()
            self._window.close()
            self._ended = True
            self._forget()
            self._refuse(self._closed())
            self._idle.set()

    def _made(self, fds: Sequence[int]) -> Sleep:
        """What the thread sleeps by."""
        job = self.job
        return Sleep(
            fds, job.datapath.source, job.queue, job.terms.pointer, ctypes.addressof(job.voice),
            ctypes.addressof(job.owner), longest=_LONGEST_SLEEP, stopped=_STOPPED,
        )  # fmt: skip

    def _linger(self) -> None:
        """Answers requests for rows until all others have said goodbye too, in bounded time (clock-15).

        Of the last op others miss results until their deadline, and then ask for them for ``insist``.
        """
        job, config = self.job, self.job.config
        until = job.now() + min(_LINGER, config.deadline_1 + config.deadline_2 or _LINGER) + config.insist
        while (now := job.now()) < until:
            self._obey()
            job.queue.poll(now)
            job.terms.listen = self._rest.soon = self._rest.count = 0  # nothing begins here any more
            self._serve(now)
            if not job.membership.owners:
                break
            self._sleep(until)

    def _obey(self) -> None:
        """Runs what ``call`` was given."""
        for _, command in _taken(self._commands):
            command()

    def _closed(self) -> TransportError:
        return TransportError(f"rank {self.job.rank}: the transport is closed: call register anew to go on")

    def _sleep(self, again: int) -> None:
        """Sleeps until a turn is due, ``again`` (monotonic ns) at the latest; sends, answers and looks out meanwhile.

        That takes a small part of a turn, and a rank that waits for one that computes does nothing else.
        """
        job, rest = self.job, self._rest
        now = self._until(again)
        awaited = bool(self._ops) and not self._holding.again  # else no rank waits for this one
        while True:
            found = rest.wait(now, self._turn)
            self._woke(awaited)
            if self._attend(found):
                return
            now = job.now()

    def _until(self, again: int) -> int:
        """Notes when the next turn is due at the latest; the time, ns."""
        now = self.job.now()
        longest = now + (_LONGEST_SLEEP if self._ops else _IDLE_SLEEP)
        self._rest.end = min(again or longest, longest)
        return now

    def _woke(self, awaited: bool) -> None:
        """The library has woken this thread up, which has waited for the GIL since."""
        rest, overtime, now = self._rest, self.job.overtime, self.job.now()
        if awaited:
            overtime.held_up += now - rest.woken
        if not rest.ready:
            overtime.woke(now - rest.asked)

    def _attend(self, found: int) -> bool:
        """Does what the library cannot do (``Woken``); returns whether a turn is due."""
        job, queue = self.job, self.job.queue
        if found & Woken.TURN:
            return True
        if found & Woken.SERVE:
            now = job.now()
            due = self._serve(now)
            self._unsettled |= job.follow()  # the library listens by that
            if due:
                return True
            if 0 < job.terms.listen <= now:
                core().fast.tb_ask_others(ctypes.addressof(job.voice), now)
        if found & Woken.SEND:
            queue.pump(job.now())
        return self._stirred()

    def _serve(self, now: int) -> bool:
        """Takes in what others say and ask for, and answers; returns whether a turn is due by what they say."""
        due = bool(core().fast.tb_serve(ctypes.addressof(self.job.voice), now) & Woken.TURN)
        for data in self.job.letters():
            due |= self._inbox.receive(data, self._ops)
        return due

    def _stirred(self) -> bool:
        """Whether another turn is due: something has changed of an op, all of its rows have left, say."""
        return bool(self._rest.due or core().fast.tb_stirred(self.job.terms.pointer))

    def _meanwhile(self, found: int = 0) -> int:
        """Between two pieces of an op: answers, and sends, which would else wait until all of it is coded.

        Args:
            found: what the library has found (``Woken``).

        Returns:
            The time, ns.
        """
        rest, now = self._rest, self.job.now()
        self._runs(now)
        if not found and now - rest.served < SERVE_AFTER:
            return now
        rest.served = now
        rest.due |= found & Woken.TURN
        if found & Woken.SERVE or rest.peek() & Ready.CONTROLS:
            rest.due |= self._serve(now)
        queue = self.job.queue
        if queue.full or 0 < queue.again <= now:
            queue.pump(now)
        return self.job.now()

    def _poll(self, now: int) -> int:
        """One turn (kernel-22): take in, move on, let go; returns the earliest time to look again (0: none)."""
        job, window, ops = self.job, self._window, self._ops
        members, holding = job.membership, self._holding
        self._runs(now)
        if found := self._rest.found:  # by the library, of an op that what follows may drop
            self._rest.found = 0
            _DO[found](self, ops[self._rest.label], now)
            now = job.now()
        if self._commands:
            self._obey()
        looks = [holding.poll(now)] if holding.again else []
        for label in self._rest.taken():
            window.foresee(label)
        if self._rest.ready & Ready.CONTROLS or job.voice.again or job.voice.letters:
            self._serve(now)  # before the queue is pumped, which may take milliseconds
        for rank in members.suspects:
            if (named := job.records.newest(rank)) is not None:
                members.heard(rank, step_of(named))
        if job.paths.tried or job.sender.refused or job.sender.plain:
            looks.append(job.paths.poll(now))
        looks.append(self.maps.poll(now, window))
        if self._new or window.waiting:
            self._admit()
        if members.left:
            self._tell_of_left()
        if now - self._watched >= LOOK_EVERY and self._error is None:
            self._watched = now
            if error := fault_of(job, job.datapath) or job.paths.error:
                self._give_up(error)
        job.queue.poll(now)
        held = holding.again or (members.holds and members.holding(now))
        stood, self._standing = self._standing, bool(held)
        if held or stood:
            for op in ops.values():
                if not op.finished:  # once more when the hold is over: the last turn in it may be long ago
                    core().fast.tb_stand_still(ctypes.addressof(op), now)
        if held and ops:
            looks.append(held)
        if members.suspects:
            forgive(job, chain(((op.label, op.start) for op in ops.values()), window.recent))
        self._rest.served = now = job.now()
        self._move(now, everything=self._unsettled | bool(held or stood), holds=bool(held))
        while window.release():
            self._resting = True
            placed = window.foresee()
            if not (placed or window.waiting or (self._unsettled and ops)):
                break
            self._admit()
            self._move(job.now(), everything=self._unsettled, holds=bool(held))
        core().fast.tb_ask_others(ctypes.addressof(job.voice), job.now())
        if self._stirred():
            self._rest.due = 0
            looks.append(job.now())
        # where something is just handed over, the poke after it brings another turn; it is not waited for here
        if self._resting and not self._in_flight and self._handing.acquire(blocking=False):
            if not self._new:
                self._idle.set()
                self._resting = False
            self._handing.release()
        return min(filter(None, looks), default=0)

    def _runs(self, now: int) -> None:
        """This thread runs, and notices where it did not for a while; that a turn codes many large ops is no stop."""
        rest = self._rest
        if rest.awake and now - rest.awake > _STOPPED:
            self.job.membership.woke(step_of(self.job.sequence.upcoming), now)
            self.job.counters["stops_noticed"] += 1
        rest.awake = now

    def _move(self, now: int, *, everything: bool, holds: bool) -> None:
        """Moves ops on as far as they go; notes when to look again (``Sleep.soon``).

        Args:
            now: the time, ns.
            everything: all are to be looked at, with news or without.
            holds: somebody does, so that no clock starts.
        """
        job, terms, next_op = self.job, self.job.terms, core().fast.tb_next_op
        core().fast.tb_begin_turn(terms.pointer, job.follow() or everything, holds)
        self._unsettled = False
        while found := next_op(terms.pointer, now):
            op = self._ops[terms.label]
            if _DO[found](self, op, now):
                op.asked = min(op.asked, 1)
                terms.everything = 1  # others may stand otherwise by it
                self._unsettled |= job.follow()  # those before it have not been looked at since
                now = self._meanwhile()
        self._rest.soon = terms.due

    def _send_own(self, op: Op, now: int) -> bool:
        job = self.job
        alone, sent, begun = self._before(op)
        if alone and begun:
            prepare(job, op)
        if not (alone and sent):
            return False
        if op.code:
            self._launch(now)
        moved, look = (True, 0) if op.encoded else advance(job, op, now)
        op.due = min(filter(None, (op.due, look)), default=0)
        return moved

    def _launch(self, now: int) -> None:
        """Codes and sends what the library can."""
        job = self.job
        job.threads.through(core().waits.tb_launch, ctypes.addressof(job.owner), job.threads.rest, now)
        if 0 < job.queue.again <= (now := job.now()):
            job.queue.pump(now)

    def _seal(self, op: Op, now: int) -> bool:
        seal(self.job, op)
        return True

    def _finish(self, op: Op, now: int) -> bool:
        if op.unnoted:  # the library has found this by itself, before anything was learned from the first half
            self._seal(op, now)
        finish(self.job, op)
        self._deliver(op)
        return True

    def _before(self, op: Op) -> tuple[bool, bool, bool]:
        """Whether a switch's scales of the key's previous op are known; and how far the ops before are.

        Returns:
            That; whether the last of them has sent its rows; whether devices have all of them in hand, or have had.
        """
        sent = begun = True
        for other in self._ops.values():
            if other is op:
                break
            if op.switched and not other.finished and other.key[:3] == op.key[:3]:  # with other bits, too
                return False, False, False
            sent = other.encoded
            begun = begun and (sent or other.begun > 0)
        return True, sent, begun

    def _give_up(self, error: TransportError) -> None:
        """Lets what is launched end as it can, with ``error``, and refuses what comes after."""
        log.error("%s", error)
        self._error = error
        for op in self._ops.values():
            if op.launch is not None and not op.delivered:
                op.outcome.error = op.outcome.error or error

    def _admit(self) -> None:
        while self._new:
            self._window.waiting.append(self._new.popleft())
        for op in self._window.admit():
            self._newest = op.label
            if op.place.layout.last:
                self._holding.launched()

    def _tell_of_left(self) -> None:
        """Warns of ranks that have said goodbye where this one goes on, once; at the end of a job nobody does."""
        left, step = self.job.membership.left, step_of(self._newest)
        for rank, op in list(left.items()):
            last = step_of(op)
            if step_distance(step, last) > 0:
                del left[rank]
                text = (
                    f"rank {rank} has left the job after step {last}, and this one goes on (step {step}): its data are "
                    "missing from now on. Look at its log, and let all ranks make as many steps"
                )
                self.job.events.emit("rank_left", text, left=rank, step=last)

    def _name_mismatch(self, op: Op, now: int) -> bool:
        record, tag = self.job.records.of(op.label), op.place.tag
        if record is None:
            return False
        key, own, other = op.place.layout.key, self.job.rank, int(record["first_sender"])
        op.outcome.error = LayoutError(
            f"rank {own} and rank {other} disagree on op {op.name}: rank {own} has bucket "
            f"{key[0]} of {key[1]} entries (layout tag {tag:#06x}), rank {other} has tag {int(record['layout']):#06x}. "
            f"{SAME_MODEL}"
        )
        return False

    def _deliver(self, op: Op) -> None:
        """Gives the result to the training thread, once."""
        launch = op.launch
        if launch is None or op.delivered:
            return
        op.second.phase = Phase.DONE
        job, outcome = self.job, op.outcome
        outcome.error = outcome.error or self._averages.check(op, self._ops.values())
        if outcome.error is not None and self._error is None:
            log.error("%s", outcome.error)
            self._error = outcome.error
        outcome.nanoseconds = job.now() - launch.launched
        job.overtime.ended()
        for entry in (job.accounts.delivered, self.maps.learn):
            self._note(op, entry)
        self._window.learned()
        try:
            launch.done(outcome)
        except Exception:  # somebody else's code (a cancelled future, say) must not end the transport
            text = f"the callback of op {op.name} failed\n{traceback.format_exc()}"
            job.events.emit("callback_failed", text, level=logging.ERROR, op=op.name)

    def _note(self, op: Op, entry: Callable[[Op], object]) -> None:
        """Enters an op in what is counted or learned; whatever fails there must not cost its future."""
        try:
            entry(op)
        except Exception:
            text = f"nothing is learned from op {op.name}, since that failed: report it\n{traceback.format_exc()}"
            self.job.events.emit("learning_failed", text, level=logging.ERROR, op=op.name)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._end_launched(TransportError(f"rank {self.job.rank}: transport failed: {error}{_FAILED}"))

    def _end_launched(self, error: TransportError) -> None:
        """Ends every launched op with its own data, if it still has that: a future always completes."""
        for op in self._ops.values():
            if op.launch is not None and not op.delivered:
                for work in (op.buffers.encodes, op.buffers.decodes):
                    self.job.threads.stop(work)
                self._window.waiting.append(op.launch)
        self._refuse(error)

    def _refuse(self, error: TransportError) -> None:
        """Completes what nobody will work on any more; called by the thread at its end, and by who comes after it."""
        for queue in (self._window.waiting, self._new):
            for launch in _taken(queue):
                try:
                    launch.coder.keep(launch.data, launch.out)
                except Exception:  # a device that has failed, say: the future must complete all the same
                    log.exception("rank %d: a bucket could not be handed back", self.job.rank)
                try:
                    launch.done(Outcome(error=error))
                except Exception:
                    log.exception("rank %d: a callback failed", self.job.rank)


#: Does what is found of an op (``Found``); returns whether a phase has ended by it.
_DO: dict[int, Callable[[Transpose, Op, int], bool]] = {
    Found.MISMATCH: Transpose._name_mismatch,
    Found.SEND: Transpose._send_own,
    Found.SEAL: Transpose._seal,
    Found.FINISH: Transpose._finish,
}
