"""A part of a soak: processes that try seed after seed for as long as they are told, and what they tell.

A part is a module with ``life``: of a seed and ``Tell``, it says what is wrong; or with ``trials``, a context of
such a function of a seed alone. ``lacking`` says why it cannot run here.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing import connection
from typing import Any

#: ``tell(name, number)``: so many more of what the part counts.
Tell = Callable[[str, float], None]
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


def _over(*signals: object) -> None:
    _told.extend(signals)
    raise Over


def is_over() -> bool:
    """Whether this process has been told to end."""
    return bool(_told)


def _child(name: str, number: int, seed: int, seconds: float, pipe: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when
    signal.signal(signal.SIGTERM, _over)
    logging.disable(logging.CRITICAL)
    until = time.monotonic() + seconds

    def tell(what: str, value: Any) -> None:
        pipe.send((what, value))

    try:
        module: Any = importlib.import_module(f"soak.{name}")
        here = hasattr(module, "trials")
        with module.trials(number, tell, until) if here else nullcontext(partial(module.life, tell=tell)) as trial:
            while time.monotonic() < until and not is_over():
                try:
                    wrong = trial(seed)
                except Exception:
                    wrong = traceback.format_exc()
                if wrong:
                    tell("found", f"seed {seed}: {wrong}")
                seed += 1
    except BaseException:
        if not is_over():
            tell("found", f"process {number} with seed {seed}:\n{traceback.format_exc()}")


def run(name: str, seed: int, seconds: float, processes: int, found: list[str]) -> None:
    """One part, for so many seconds; ends all processes, by Ctrl-C too. ``found`` gets what is wrong, in words."""
    module, began, counts = importlib.import_module(f"soak.{name}"), time.monotonic(), Counter[str]()
    running: dict[Any, Any] = {}

    def complain(words: str) -> None:
        found.append(words)
        print(f"{name}: FOUND {words}", flush=True)

    def hear(seconds: float) -> None:
        for pipe in connection.wait(list(running), seconds):
            try:
                what, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                child = running.pop(pipe)
                child.join()
                if child.exitcode not in (0, -signal.SIGTERM):
                    complain(f"{child.name} ended with {child.exitcode}, unheard")
                continue
            if what == "found":
                complain(value)
            else:
                counts[what] += value

    def say() -> float:
        told = ", ".join(f"{what} {count:,.0f}" for what, count in counts.items())
        print(f"{name:9} {time.monotonic() - began:5.0f} of {seconds:.0f} s: {told}", flush=True)
        return time.monotonic()

    context, said = multiprocessing.get_context("spawn"), began
    try:
        for number in range(min(processes, getattr(module, "PROCESSES", processes))):
            here, there = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(name, number, seed + number * STRIDE, seconds, there))
            child.start()
            running[here] = child
            there.close()
        while running and time.monotonic() < began + seconds:
            hear(1.0)
            said = say() if time.monotonic() - said >= EVERY else said
    finally:
        for child in running.values():
            child.terminate()
        until = time.monotonic() + GRACE
        while running and time.monotonic() < until:
            hear(0.2)
        for child in running.values():
            child.kill()
            child.join()
        say()
