"""A function in a process of its own inside a worker's namespace, forked from this process.

What this process has imported and compiled is there already, and its memory is shared: a rank as a command of its own
takes a second of a core before it begins, and as a fork a few milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn, Protocol

from tailbound_lab.lab import enter

__all__ = ["Forked", "Process"]

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Process(Protocol):
    """What is used of ``subprocess.Popen``."""

    pid: int
    returncode: int | None

    @property
    def stdin(self) -> IO[bytes] | None:
        """Its standard input, where it is a pipe."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """Its standard output, where it is a pipe."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """Its standard error, where it is a pipe."""

    def poll(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None while it runs."""

    def wait(self) -> int:
        """Waits for its end."""


class Forked:
    """A child that runs ``main``, with pipes for its standard streams and in a process group of its own.

    It has no other descriptor of this process, and dies with it where it is forked from the main thread (as
    ``Cluster.popen`` has it). Threads of this process are not there: whoever forks has none that hold locks.

    Args:
        namespace: where the network namespace is bound.
        hosts: lines for ``/etc/hosts``.
        main: what it does; returns its exit status.
        env: all of its variables.
        keep: descriptors that it keeps.
        parent: process to die with; None: nobody.

    Raises:
        OSError: no more descriptors or processes; nothing is left behind.
    """

    def __init__(
        self,
        namespace: str,
        hosts: str,
        main: Callable[[], int],
        env: Mapping[str, str],
        *,
        keep: Sequence[int] = (),
        parent: int | None = None,
    ) -> None:
        self.returncode: int | None = None
        with contextlib.ExitStack() as opened:
            pipes = []
            for _ in range(3):
                pipes.append(os.pipe())
                for fd in pipes[-1]:
                    opened.callback(os.close, fd)
            (read_in, write_in), (read_out, write_out), (read_err, write_err) = pipes
            sys.stdout.flush()
            sys.stderr.flush()
            # a signal that comes before the child has handlers of its own waits, or it would do there what it does here
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    self._run(namespace, hosts, main, env, (read_in, write_out, write_err), keep, parent)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            opened.pop_all()
        with contextlib.suppress(OSError):  # it does so itself, too: whoever is first
            os.setpgid(self.pid, self.pid)
        for fd in (read_in, write_out, write_err):
            os.close(fd)
        self.stdin: IO[bytes] = open(write_in, "wb")  # noqa: SIM115 - closed by whoever has forked
        self.stdout: IO[bytes] = open(read_out, "rb")  # noqa: SIM115
        self.stderr: IO[bytes] = open(read_err, "rb")  # noqa: SIM115

    @staticmethod
    def _run(
        namespace: str,
        hosts: str,
        main: Callable[[], int],
        env: Mapping[str, str],
        standard: Sequence[int],
        keep: Sequence[int],
        parent: int | None,
    ) -> NoReturn:
        status = enter.CANNOT_ENTER
        try:
            gc.freeze()  # nothing of the parent's is ever collected here, and its pages stay shared
            os.setpgid(0, 0)
            for ending in _ENDING:
                signal.signal(ending, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
            for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *keep}:
                with contextlib.suppress(OSError):  # the one that has listed them
                    os.close(fd)
            for number, mode, name in ((0, "r", "stdin"), (1, "w", "stdout"), (2, "w", "stderr")):
                setattr(sys, name, open(number, mode, buffering=1, closefd=False))  # noqa: SIM115
            if parent is not None:
                enter.die_with(parent)
            enter.enter_network(namespace)
            enter.private_mounts(hosts)
            os.environ.clear()
            os.environ.update(env)
            status = 1
            status = main()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Waits for its end; as ``poll``."""
        while (status := self._reap(0)) is None:
            pass
        return status

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
