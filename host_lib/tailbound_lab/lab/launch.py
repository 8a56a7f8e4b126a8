"""Start one command in every worker, show its output, and end together.

A command ends with the worst of its ranks' exit statuses. When a rank fails, the others are stopped
unless ``keep_going``; Ctrl-C goes to all ranks, and whoever ignores it is terminated, then killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rich.console import Console

from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.ranks import Ranks

__all__ = ["Outcome", "launch"]

#: How often ended processes are looked for while nobody writes.
_POLL_SECONDS = 0.05
#: Python holds back what it writes to a pipe, and lines would come long after they were printed.
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
#: A pipe may outlive its process in a grandchild; do not wait for it longer than this.
_DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        statuses: by rank, as a shell has them (128 + signal).
        first_failure: the rank that failed first, None if none did by itself.
        interrupted: number of the signal that ended the run, or None.
    """

    statuses: tuple[int, ...]
    first_failure: int | None
    interrupted: int | None

    @property
    def status(self) -> int:
        """The worst; 128 + signal after an interruption."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        if self.first_failure is not None:
            # ranks that were stopped because of it are not the worst news
            return max(self.statuses[self.first_failure], 1)
        return max(self.statuses)


class _Interrupts:
    """Notes SIGINT, SIGTERM and SIGHUP instead of being torn out of the loop by them."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1

    def __enter__(self) -> _Interrupts:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Stopper:
    """Escalates: the given signal, SIGTERM after ``grace`` seconds, SIGKILL after as many again."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
        self._processes, self._grace = processes, grace
        self._steps: list[signal.Signals] = []
        self._due = 0.0

    @property
    def active(self) -> bool:
        return bool(self._steps)

    def begin(self, first: int) -> None:
        self._steps = [signal.Signals(first), signal.SIGTERM, signal.SIGKILL]
        if first == signal.SIGTERM:
            del self._steps[0]
        self._due = 0.0
        self.step()

    def kill(self) -> None:
        self._steps, self._due = [signal.SIGKILL], 0.0
        self.step()

    def step(self) -> None:
        """Send what is due: one rung at a time, so that a late call takes nothing from the ranks' grace.

        The last rung stays, for children that a rank leaves behind.
        """
        if self._steps and self._due <= time.monotonic():
            number = self._steps[0]
            for process in self._processes:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                        os.killpg(process.pid, signal.SIGCONT)  # a stopped process takes no signal but this
            if len(self._steps) == 1:
                self._due = float("inf")
            else:
                del self._steps[0]
                self._due = time.monotonic() + self._grace


def _status(process: subprocess.Popen[bytes]) -> int:
    code = process.returncode
    return code if code >= 0 else 128 - code


def launch(
    lab: Cluster,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    out: Console | None = None,
    err: Console | None = None,
    keep_going: bool = False,
    grace: float = 5.0,
) -> Outcome:
    """Run ``command`` in every worker of a built lab until all have ended. Call it from the main thread.

    Args:
        lab: entered.
        command: the same for every rank.
        env: variables on top of those of ``lab.environment(rank)``.
        out, err: where lines go; standard output and standard error by default.
        keep_going: let the other ranks run when one fails.
        grace: seconds between SIGINT, SIGTERM and SIGKILL.
    """
    out, err = out or Console(), err or Console(stderr=True)
    with _Interrupts() as interrupts, Ranks(lab, out, err) as ranks:
        for _ in range(lab.spec.workers):
            ranks.start(command, {**_UNBUFFERED, **(env or {})}, stdin=subprocess.DEVNULL)
        first = _wait(ranks, interrupts, _Stopper(ranks.processes, grace), keep_going, err)
    return Outcome(tuple(_status(process) for process in ranks.processes), first, interrupts.first)


def _wait(ranks: Ranks, interrupts: _Interrupts, stopper: _Stopper, keep_going: bool, err: Console) -> int | None:
    """Until all have ended; the rank that failed first."""
    processes, streams = ranks.processes, ranks.streams
    first: int | None = None
    running = set(range(len(processes)))
    signals_seen = 0
    while running:
        streams.pump(_POLL_SECONDS)
        if interrupts.count > signals_seen:
            signals_seen = interrupts.count
            if stopper.active and signals_seen > 1:
                stopper.kill()
            else:
                stopper.begin(interrupts.first or signal.SIGTERM)
        stopper.step()
        for rank in sorted(running):
            if processes[rank].poll() is None:
                continue
            running.discard(rank)
            status = _status(processes[rank])
            if status != 0 and first is None and not stopper.active:
                first = rank
                err.print(f"rank {rank} failed first, with status {status}", style="bold red", highlight=False)
                if not keep_going and running:
                    err.print("stopping the other ranks (--keep-going lets them run)", highlight=False)
                    stopper.begin(signal.SIGTERM)
    end = time.monotonic() + _DRAIN_SECONDS
    while streams.open and time.monotonic() < end:
        streams.pump(_POLL_SECONDS)
    return first
