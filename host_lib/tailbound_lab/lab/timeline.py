"""Changes at given times while a lab runs: links that slow down or break and come back, ranks that stop or die.

::

    timeline = Timeline(lab)
    timeline.rate(1.0, 2, 50_000_000, seconds=2.0)     # worker 2's links at 50 Mbit/s from 1 s to 3 s
    timeline.cut(4.0, 1, seconds=0.5)                  # worker 1 unreachable for half a second
    timeline.stop(5.0, process, seconds=1.0)           # SIGSTOP, and SIGCONT a second later
    with timeline:
        ...

Leaving the ``with`` block ends it: what was stopped goes on, links and rates that were to come back come back, and
the first error is raised.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tailbound_lab.lab.faults import Fault, Way
from tailbound_lab.lab.topology import Link

if TYPE_CHECKING:
    from tailbound_lab.lab.cluster import Cluster

__all__ = ["Timeline"]


class Timeline:
    """Changes of one lab; add them, then enter it.

    Args:
        lab: a built lab; None where only ``call``, ``stop`` and ``kill`` are used.
    """

    def __init__(self, lab: Cluster | None = None) -> None:
        self._lab = lab
        # (seconds, order, what, whether it undoes something and must happen in any case)
        self._changes: list[tuple[float, int, Callable[[], None], bool]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lab-timeline", daemon=True)
        self._error: BaseException | None = None
        #: seconds after the start at which each change so far was through
        self.done: list[float] = []

    def call(self, at: float, what: Callable[[], None], *, always: bool = False) -> Timeline:
        """``what()`` at ``at`` seconds after the start; ``always``: also if the timeline ends before."""
        if at < 0 or self._thread.ident is not None:
            raise ValueError("changes are at 0 s or later and are added before the timeline begins")
        self._changes.append((at, len(self._changes), what, always))
        return self

    def rate(
        self, at: float, rank: int, rate: int | None, *, seconds: float | None = None, link: Link | None = None
    ) -> Timeline:
        """``rank``'s links at ``rate`` bit/s; after ``seconds`` at the lab's own rate again."""
        lab = self._built()
        self.call(at, lambda: lab.set_rate(rank, rate, link))
        if seconds is not None:
            self.call(at + seconds, lambda: lab.set_rate(rank, lab.spec.rate, link), always=True)
        return self

    def cut(self, at: float, rank: int, *, seconds: float | None = None, link: Link | None = None) -> Timeline:
        """``rank`` unreachable; mended after ``seconds``."""
        lab = self._built()
        self.call(at, lambda: lab.set_link(rank, False, link))
        if seconds is not None:
            self.call(at + seconds, lambda: lab.set_link(rank, True, link), always=True)
        return self

    def faults(
        self,
        at: float,
        fault: Fault,
        rank: int | None = None,
        *,
        seconds: float | None = None,
        link: Link | None = None,
        way: Way | None = None,
    ) -> Timeline:
        """``Cluster.set_faults``; after ``seconds`` the lab's own faults again."""
        lab = self._built()
        self.call(at, lambda: lab.set_faults(fault, rank, link, way))
        if seconds is not None:
            own = Fault.of(lab.spec)
            self.call(at + seconds, lambda: lab.set_faults(own, rank, link), always=True)
        return self

    def stop(self, at: float, process: subprocess.Popen[Any], *, seconds: float) -> Timeline:
        """The process group of ``process`` stands still for ``seconds`` (SIGSTOP, SIGCONT)."""
        self.call(at, lambda: _signal(process, signal.SIGSTOP))
        return self.call(at + seconds, lambda: _signal(process, signal.SIGCONT), always=True)

    def kill(self, at: float, process: subprocess.Popen[Any]) -> Timeline:
        """SIGKILL to the process group of ``process``."""
        return self.call(at, lambda: _signal(process, signal.SIGKILL))

    def __enter__(self) -> Timeline:
        self._changes.sort(key=lambda change: change[:2])
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def wait(self, timeout: float) -> bool:
        """Waits until all changes are made; whether they are."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _built(self) -> Cluster:
        if self._lab is None:
            raise ValueError("this timeline has no lab to change")
        return self._lab

    def _run(self) -> None:
        begin = time.monotonic()
        for at, _, what, always in self._changes:
            if self._ended.wait(max(0.0, begin + at - time.monotonic())) and not always:
                continue
            try:
                what()
            except BaseException as error:
                self._error = self._error or error
            self.done.append(time.monotonic() - begin)


def _signal(process: subprocess.Popen[Any], number: int) -> None:
    """To its group; none if it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
