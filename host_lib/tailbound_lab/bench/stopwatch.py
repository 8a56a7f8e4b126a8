"""Where the transport thread's processor time goes: stamps around compiled code and system calls.

They are put in the place of the functions while an op is measured, and taken out again: the engine knows nothing of
them. A system call that sends over veth has the receiver's XDP program in it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.dispatcher import Dispatcher

from tailbound.collective import waiter
from tailbound.kernel import barrier, syscalls
from tailbound.transport import queue, sockets
from tailbound.transport.cores import RunQueue

COMPILED, CALLS = 0, 1
#: System calls of the transport: where they are looked up, and under which name.
_CALLS: tuple[tuple[Any, str], ...] = (
    (queue.SendQueue, "_send"),
    (sockets.UdpSocket, "send_one"),
    (sockets.UdpSocket, "sendto"),
    (sockets.UdpSocket, "recv"),
    (waiter.Waiter, "wait"),
    (syscalls, "_bpf"),
    (barrier, "full"),
    (os, "eventfd_read"),
    (os, "eventfd_write"),
)


class Stopwatch:
    """Of one process, whose transport thread calls ``here`` at its start.

    Attributes:
        ops: ms of each op by part: ``codec`` and ``system_calls`` are processor time of the transport thread,
            ``interpreter`` is what that and the calling thread spent besides, ``no_processor`` the time for which the
            transport thread could run and had none.
    """

    def __init__(self) -> None:
        self._thread = self._clock = 0
        self._run_queue: RunQueue | None = None
        self._within = False
        self.spent = [0, 0]  # ns in compiled code, and in system calls
        self.ops: list[dict[str, float]] = []

    def here(self) -> None:
        """The calling thread is the one to watch."""
        self._thread, self._run_queue = threading.get_ident(), RunQueue()
        self._clock = time.pthread_getcpuclockid(self._thread)

    def op(self, average: Callable[[], None]) -> None:
        """Do one op with stamps, and keep its parts."""
        with self.installed():
            begin = self._read()
            average()
            found = [(end - start) / 1e6 for start, end in zip(begin, self._read(), strict=True)]
        thread, codec, calls, waited = found
        parts = {"codec": codec, "system_calls": calls, "interpreter": thread - codec - calls, "no_processor": waited}
        self.ops.append(parts)

    def _read(self) -> tuple[int, ...]:
        """Processor time of both threads, in compiled code and in calls of one; time without a processor; ns."""
        both = time.clock_gettime_ns(self._clock) + time.thread_time_ns()
        waited = self._run_queue.waited() if self._run_queue is not None else None
        return both, *self.spent, waited or 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stamps around everything, within the block."""
        inherited = Dispatcher.__call__

        def compiled(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
            return self._timed(COMPILED, inherited, dispatcher, *args, **kwargs)

        before = [(place, name, place.__dict__.get(name)) for place, name in _CALLS]
        Dispatcher.__call__ = compiled  # type: ignore[method-assign,assignment]
        for place, name in _CALLS:
            setattr(place, name, self.around(CALLS, getattr(place, name)))
        try:
            yield
        finally:
            del Dispatcher.__call__
            for place, name, own in before:
                if own is None:
                    delattr(place, name)  # inherited from a class of the system
                else:
                    setattr(place, name, own)

    def around(self, part: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` between two stamps."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._timed(part, function, *args, **kwargs)

        return call

    def _timed(self, part: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._within or threading.get_ident() != self._thread:  # the outermost counts
            return function(*args, **kwargs)
        self._within, begin = True, time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            self.spent[part] += time.thread_time_ns() - begin
            self._within = False
