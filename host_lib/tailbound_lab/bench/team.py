"""One worker process a rank, from start to end: their output, their reports, and the first error among them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from rich.console import Console

from tailbound.errors import TransportError
from tailbound_lab.bench.channel import REPORT_FD
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.output import LineSplitter
from tailbound_lab.lab.ranks import Ranks

_POLL_SECONDS = 0.05
#: After the first sign of failure: time for the rank that failed first to say so itself.
_CONFESS_SECONDS = 0.5
_GOODBYE_SECONDS = 10.0


class Team:
    """Processes of ``python -m MODULE JOB``, one a rank, killed at the end of the ``with`` block.

    Args:
        lab: where they run, built.
        module: of the worker; its main calls ``channel.serve``.
        job: handed to every worker, plain types.
        console: what the workers print comes out here, with the rank in front.
        env: variables on top of the lab's own.
        silence: seconds without any report after which the run is given up.
    """

    def __init__(
        self,
        lab: Cluster,
        module: str,
        job: Mapping[str, Any],
        console: Console,
        *,
        env: Mapping[str, str] | None = None,
        silence: float = 180.0,
    ) -> None:
        self._lab, self._silence, self.ranks = lab, silence, lab.spec.workers
        self._argv = [sys.executable, "-m", module, json.dumps(job)]
        self._env = dict(env or {})
        self._started = Ranks(lab, console, console)
        self._pipes: dict[int, tuple[int, LineSplitter]] = {}
        self._messages: deque[tuple[int, dict[str, Any]]] = deque()
        self._errors: list[tuple[int, int, str]] = []

    def __enter__(self) -> Team:
        try:
            for rank in range(self.ranks):
                self._start(rank)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> tuple[subprocess.Popen[Any], ...]:
        """By rank."""
        return tuple(self._started.processes)

    def tell(self, order: str) -> None:
        """Gives an order to every rank."""
        for process in self._started.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is found out and told by ``next``
                process.stdin.write(f"{order}\n".encode())
                process.stdin.flush()

    def next(self, silence: float | None = None) -> tuple[int, dict[str, Any]]:
        """Waits for the next report of any rank, ``silence`` seconds or as long as the team does.

        Raises:
            TransportError: a rank has failed, or all were silent for too long.
        """
        patience = self._silence if silence is None else silence
        end = time.monotonic() + patience
        while not self._messages:
            self._pump(_POLL_SECONDS)
            self._check(ended_is_wrong=True)
            if time.monotonic() > end:
                raise TransportError(f"the workers have said nothing for {patience:.0f} s: given up")
        return self._messages.popleft()

    def gather(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Reports as they come, until every rank has sent one of ``kind``; those are among them."""
        missing = set(range(len(self._started.processes)))
        while missing:
            rank, message = self.next()
            if message["kind"] == kind:
                missing.discard(rank)
            yield rank, message

    def finish(self) -> None:
        """Waits until every worker has ended well.

        Raises:
            TransportError: one did not.
        """
        end = time.monotonic() + _GOODBYE_SECONDS
        while any(process.poll() is None for process in self._started.processes) and time.monotonic() < end:
            self._pump(_POLL_SECONDS)
        self._pump(0)
        self._check(ended_is_wrong=False)

    def close(self) -> None:
        """Kills what still runs; may be called twice."""
        self._started.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _start(self, rank: int) -> None:
        read, write = os.pipe()
        self._pipes[read] = (rank, LineSplitter())
        os.set_blocking(read, False)
        try:
            self._started.start(
                self._argv, {**self._env, REPORT_FD: str(write)}, stdin=subprocess.PIPE, pass_fds=(write,)
            )
        finally:
            os.close(write)

    def _pump(self, timeout: float) -> None:
        for fd in wait(list(self._pipes), timeout):
            assert isinstance(fd, int)
            rank, lines = self._pipes[fd]
            data = os.read(fd, 1 << 20)
            for line in lines.feed(data) if data else lines.finish():
                message = json.loads(line)
                if message["kind"] == "error":
                    self._errors.append((message["at"], rank, message["text"]))
                else:
                    self._messages.append((rank, message))
            if not data:
                os.close(fd)
                del self._pipes[fd]
        if self._started.streams.open:
            self._started.streams.pump(0)

    def _check(self, *, ended_is_wrong: bool) -> None:
        """Raises for the rank that failed first; the others' errors are mostly its echo."""
        ended = {r: code for r, p in enumerate(self._started.processes) if (code := p.poll()) is not None}
        bad = {r: code for r, code in ended.items() if code != 0 or ended_is_wrong}
        if self._messages and not self._errors:
            return
        if not bad and not self._errors:
            return
        end = time.monotonic() + _CONFESS_SECONDS
        while time.monotonic() < end:
            self._pump(_POLL_SECONDS)
        if self._errors:
            _, rank, text = min(self._errors)
            raise TransportError(f"rank {rank} failed: {text}; see its output above")
        if self._messages:
            return  # its last words were on their way
        rank, code = min(bad.items())
        how = f"was killed by signal {-code}" if code < 0 else f"ended too early with status {code}"
        raise TransportError(f"rank {rank} {how}; see its output above")
