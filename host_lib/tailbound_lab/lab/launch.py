"""Start one command in every worker, show its output, and end together.

When a rank fails, the others are stopped unless ``keep_going``. A signal that ends this process goes to all ranks
first; one that ignores it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from rich.console import Console

from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.ranks import Ranks
from tailbound_lab.lab.signals import held

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
    """

    statuses: tuple[int, ...]
    first_failure: int | None

    @property
    def status(self) -> int:
        """That of the rank that failed first; ranks that were stopped because of it are not the worst news."""
        return 0 if self.first_failure is None else self.statuses[self.first_failure]


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
        grace: seconds that ranks have to end before they are killed.

    Raises:
        SystemExit: a signal ended the run; 128 + its number.
    """
    out, err = out or Console(), err or Console(stderr=True)
    with closing(Ranks(lab, out, err)) as ranks:
        for _ in range(lab.spec.workers):
            ranks.start(command, {**_UNBUFFERED, **(env or {})})
        try:
            first = _wait(ranks, keep_going, err)
        except (KeyboardInterrupt, SystemExit) as error:
            number = int(error.code or 0) - 128 if isinstance(error, SystemExit) else signal.SIGINT
            _stop(ranks, number, grace)
            raise SystemExit(128 + number) from None
        if first is not None:
            _stop(ranks, signal.SIGTERM, grace)
        _pump(ranks, _DRAIN_SECONDS, lambda: not ranks.streams.open)
    return Outcome(tuple(_status(process) for process in ranks.processes), first)


def _wait(ranks: Ranks, keep_going: bool, err: Console) -> int | None:
    """Until all have ended, or one has failed; the rank that failed first."""
    first: int | None = None
    running = dict(enumerate(ranks.processes))
    while running:
        with held():  # no line is torn
            ranks.streams.pump(_POLL_SECONDS)
        for rank in [rank for rank, process in running.items() if process.poll() is not None]:
            if (status := _status(running.pop(rank))) == 0 or first is not None:
                continue
            first = rank
            err.print(f"rank {rank} failed first, with status {status}", style="bold red", highlight=False)
            if not keep_going:
                if running:
                    err.print("stopping the other ranks (--keep-going lets them run)", highlight=False)
                return first
    return first


def _stop(ranks: Ranks, number: int, grace: float) -> None:
    """Sends a signal to all ranks, and waits until they have ended or ``grace`` seconds are over."""
    for process in ranks.processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
                os.killpg(process.pid, signal.SIGCONT)  # a stopped process takes no signal but this
    _pump(ranks, grace, lambda: all(process.poll() is not None for process in ranks.processes))


def _pump(ranks: Ranks, seconds: float, over: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not over() and time.monotonic() < end:
        ranks.streams.pump(_POLL_SECONDS)
