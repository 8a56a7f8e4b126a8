"""Where the transport thread's processor time goes: stamps around compiled code and system calls.

They are put in the place of the functions while a profile measures, and taken out again: the engine knows nothing of
them. All times are processor time of the thread (CLOCK_THREAD_CPUTIME_ID), so that waiting, for packets or for a
processor, is in none of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from numba.core.dispatcher import Dispatcher

from tailbound.collective import waiter
from tailbound.collective.communicator import Communicator
from tailbound.datapath.xdp import XdpDatapath
from tailbound.kernel import barrier, net, syscalls
from tailbound.transport import sockets
from tailbound.transport.cores import RunQueue

COMPILED, CALLS = 0, 1
#: Tailbound with stamps, as experiments call it.
STAMPED = "stamped"
#: System calls of the transport: where they are looked up, and under which name.
_CALLS: tuple[tuple[Any, str], ...] = (
    (sockets.UdpSocket, "send_many"),
    (sockets.UdpSocket, "send_one"),
    (sockets.UdpSocket, "sendto"),
    (sockets.UdpSocket, "recv"),
    (waiter.Waiter, "wait"),
    (syscalls, "_bpf"),
    (barrier, "full"),
    (os, "eventfd_read"),
    (os, "eventfd_write"),
)


class Reading(NamedTuple):
    """The clocks at one moment, ns: ``begin`` is read first and ``end`` last.

    Attributes:
        thread: processor time of the transport thread; in it ``codec`` and ``calls``.
        own: of the thread that reads.
        process: of all threads.
    """

    begin: int
    thread: int
    codec: int
    calls: int
    own: int
    process: int
    end: int


class Stopwatch:
    """Of one process, whose transport thread calls ``here`` at its start."""

    def __init__(self) -> None:
        self._thread = self._clock = 0
        self._run_queue: RunQueue | None = None
        # replaced as one, since another thread reads it: ns in codec and in calls, what it is in now, and since when
        self._state: tuple[int, int, int | None, int] = (0, 0, None, 0)
        self._program = -1
        self.forget()

    def forget(self) -> None:
        """Drop all that was kept: ``functions``, ns and calls by name, and ``ops``, ns of each clock of each op."""
        self.functions: dict[str, list[int]] = {}
        self.ops: list[dict[str, int | None]] = []

    def here(self) -> None:
        """The calling thread is the one to watch."""
        self._thread, self._run_queue = threading.get_ident(), RunQueue()
        self._clock = time.pthread_getcpuclockid(self._thread)

    def count(self, ours: Communicator) -> None:
        """Look at the time of the XDP program on this rank's interface, too, if there is one."""
        datapath = ours.job.datapath
        if isinstance(datapath, XdpDatapath) and (there := net.xdp_below(datapath.interface)) is not None:
            self._program = syscalls.prog_by_id(there.prog_id)

    def close(self) -> None:
        """Close what ``count`` has opened."""
        if self._program >= 0:
            os.close(self._program)

    def op(self, average: Callable[[], None]) -> None:
        """Do one op with stamps, and keep what it took of each clock."""
        with self.installed():
            waited, run = self.waited(), self._run_ns()
            begin = self.read()
            average()
            end = self.read()
            waited, run_now = self.waited() - waited, self._run_ns()
        thread, own = end.thread - begin.thread, end.own - begin.own
        self.ops.append(
            {
                "wall": end.end - begin.begin,
                "thread": thread,
                "codec": end.codec - begin.codec,
                "calls": end.calls - begin.calls,
                "own": own,
                "others": max(0, end.process - begin.process - thread - own),
                "waited": waited,
                "program": None if run is None or run_now is None else run_now - run,
            }
        )

    def _run_ns(self) -> int | None:
        return None if self._program < 0 else syscalls.prog_info(self._program).run_ns

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stamps around everything, within the block."""
        inherited = Dispatcher.__call__

        def compiled(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
            return self._timed(COMPILED, dispatcher.__name__, inherited, dispatcher, *args, **kwargs)

        before = [(place, name, place.__dict__.get(name)) for place, name in _CALLS]
        Dispatcher.__call__ = compiled  # type: ignore[method-assign,assignment]
        for place, name in _CALLS:
            setattr(place, name, self.around(CALLS, name, getattr(place, name)))
        try:
            yield
        finally:
            del Dispatcher.__call__
            for place, name, own in before:
                if own is None:
                    delattr(place, name)  # inherited from a class of the system
                else:
                    setattr(place, name, own)

    def around(self, part: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` between two stamps."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._timed(part, name, function, *args, **kwargs)

        return call

    def _timed(self, part: int, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        codec, calls, within, _ = self._state
        if within is not None or threading.get_ident() != self._thread:  # the outermost counts
            return function(*args, **kwargs)
        begin = time.thread_time_ns()
        self._state = codec, calls, part, begin
        try:
            return function(*args, **kwargs)
        finally:
            spent = time.thread_time_ns() - begin
            self._state = codec + spent * (part == COMPILED), calls + spent * (part == CALLS), None, 0
            known = self.functions.setdefault(name, [0, 0])
            known[0] += spent
            known[1] += 1

    def read(self) -> Reading:
        """All clocks; may be called by any thread of the process."""
        begin = time.perf_counter_ns()
        thread = time.clock_gettime_ns(self._clock)
        codec, calls, within, since = self._state
        if within is not None:  # what it is in now has begun before
            under_way = max(0, thread - since)
            codec, calls = codec + under_way * (within == COMPILED), calls + under_way * (within == CALLS)
        own, process = time.thread_time_ns(), time.process_time_ns()
        return Reading(begin, thread, codec, calls, own, process, time.perf_counter_ns())

    def waited(self) -> int:
        """ns that the transport thread was ready to run and had no processor; 0 where the kernel does not count."""
        return (self._run_queue.waited() or 0) if self._run_queue is not None else 0
