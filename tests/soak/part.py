"""A part of a soak: processes that try one thing again and again for as long as they are told, and what they tell."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

#: ``tell("found", text)``: something is wrong; ``tell(name, number)``: so many more; or a dictionary of such.
Tell = Callable[[str, Any], None]
#: Seconds between two lines that say how far it is.
EVERY = 10.0
#: Seconds that processes have to tell what they have found when their time is over.
GRACE = 30.0
#: Between the seeds of two processes of a part.
STRIDE = 1_000_000


class Over(KeyboardInterrupt):
    """Time is over, whatever is being done."""


#: Signals that have said so; what a process is interrupted in may then fail in any way.
_told: list[object] = []


def over(*signals: object) -> None:
    """A signal's handler: time is over."""
    _told.extend(signals)
    raise Over


def is_over() -> bool:
    """Whether this process has been told to end."""
    return bool(_told)


def _child(name: str, number: int, seed: int, seconds: float, pipe: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when
    signal.signal(signal.SIGTERM, over)

    def tell(what: str, value: Any) -> None:
        pipe.send((what, value))

    try:
        importlib.import_module(f"soak.{name}").work(number, seed, time.monotonic() + seconds, tell)
    except BaseException:
        if not is_over():
            tell("found", f"process {number} with seed {seed}:\n{traceback.format_exc()}")


class Part:
    """One part, running.

    Attributes:
        counts: what processes have told, added up.
        found: what is wrong, in words.
    """

    def __init__(self, name: str, seed: int, seconds: float, processes: int) -> None:
        self._module = importlib.import_module(f"soak.{name}")
        self.name, self.seconds = name, seconds
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []
        self._began = self._said = time.monotonic()
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: dict[connection.Connection, int] = {}
        try:
            for number in range(min(processes, getattr(self._module, "PROCESSES", processes))):
                here, there = context.Pipe(duplex=False)
                arguments = (name, number, seed + number * STRIDE, seconds, there)
                self._processes.append(context.Process(target=_child, args=arguments))
                self._processes[-1].start()
                self._pipes[here] = number
                there.close()
        except BaseException:
            self._end(0.0)
            raise

    def run(self) -> None:
        """Until all is over; ends all processes, by Ctrl-C too."""
        try:
            while self._pipes and (left := self._began + self.seconds - time.monotonic()) > 0:
                self._hear(min(1.0, left))
                if time.monotonic() - self._said >= EVERY:
                    self._say()
        finally:
            self._end(GRACE)
            self._say()

    def _hear(self, seconds: float) -> None:
        for pipe in connection.wait(list(self._pipes), seconds):
            try:
                what, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                number = self._pipes.pop(pipe)  # type: ignore[call-overload]
                self._processes[number].join()
                if code := self._processes[number].exitcode:
                    self._complain(f"process {number} ended with {code}, unheard")
                continue
            if what == "found":
                self._complain(value)
            elif isinstance(value, dict):
                self.counts.update(value)
            else:
                self.counts[what] += value

    def _complain(self, words: str) -> None:
        self.found.append(words)
        print(f"{self.name}: FOUND {words}", flush=True)

    def _say(self) -> None:
        self._said = time.monotonic()
        took = self._said - self._began
        print(f"{self.name:9} {took:5.0f} of {self.seconds:.0f} s: {self._module.said(self.counts)}", flush=True)

    def _end(self, grace: float) -> None:
        """Ends the processes, and hears what they still have to tell."""
        until = time.monotonic() + grace
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        while self._pipes and time.monotonic() < until:
            self._hear(0.2)
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        sys.stdout.flush()
