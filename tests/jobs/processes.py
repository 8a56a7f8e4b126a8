"""Jobs of real processes with a Gloo process group, for the tests of the PyTorch side.

Processes are forked from a server that has loaded already what all of them need (``preloaded``), so that one costs
little to start; each is a fresh one, and nothing of a job is left for the next.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

#: Seconds that a job may take on a loaded machine, all waits for it together: less than a test may take.
PATIENCE = 100.0
#: What the fixtures of ``tests/torch`` are: a job by its name, how many ranks, its arguments; what every rank returned.
Run = Callable[..., list[Any]]
#: Each job meets at a file of its own.
_jobs = itertools.count()


def _context() -> Any:
    """That of the server; it runs afterwards, and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    # Python 3.11 does not give the server this process's ``sys.path``; what it cannot import it leaves out in silence.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def ended(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Output and errors of a command that ends well in ``PATIENCE``; torchrun ends its workers where it does not."""
    command = ["timeout", "-k", "10", f"{PATIENCE:g}", *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def _child(
    pipe: Any,
    function: Callable[..., Any],
    backend: str,
    rank: int,
    ranks: int,
    store: str,
    patience: float,
    arguments: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(patience, exit=True)  # also where the test that waits for it is gone
    import torch
    import torch.distributed as dist

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    try:
        if backend == "elastic":
            from tailbound.torch import elastic

            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": store}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun sets it, which hosts the store
            elastic.init_process_group(60)
        else:
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
        pipe.send((True, function(rank, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()


def in_turn(rank: int, *jobs: str) -> None:
    """Jobs ``module.function`` one after the other, in the same processes; each checks itself."""
    import torch.distributed as dist

    for job in jobs:
        module, _, name = job.partition(".")
        getattr(importlib.import_module(module), name)(rank)
        dist.barrier()


def failing(rank: int, how: str) -> None:
    """Rank 1 does not end well, rank 0 not at all."""
    if rank == 0:
        threading.Event().wait()
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError(how)


class Job:
    """Processes that all run ``function(rank, *arguments)`` in one process group of ``backend``.

    ``backend``: ``elastic`` for one whose ranks may come back (``restart``); this process has its store then.
    ``patience``: seconds that it may take, all waits for it together.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        ranks: int,
        folder: Path,
        *arguments: Any,
        backend: str = "gloo",
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        self._until = time.monotonic() + patience
        self._context = _context()
        self._pipes: list[Any] = [None] * ranks
        self.processes: list[Any] = [None] * ranks
        self._store: Any = None
        store = str(folder / f"store-{next(_jobs)}")
        if backend == "elastic":
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
            store = str(self._store.port)
        # its own limit: what a test asks of it when it is late comes first
        self._what = lambda rank: (function, backend, rank, ranks, store, 2 * patience, arguments)
        try:
            for rank in range(ranks):
                self._start(rank)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, rank: int) -> None:
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(there, *self._what(rank)))
        process.start()
        there.close()
        self._pipes[rank], self.processes[rank] = here, process

    def restart(self, rank: int) -> None:
        """Starts a process of ``rank`` anew, which has ended."""
        self.processes[rank].join(self._left())
        self._pipes[rank].close()
        self._start(rank)

    def _left(self) -> float:
        """Seconds of the job's time."""
        return max(0.1, self._until - time.monotonic())

    def result(self, rank: int) -> Any:
        """What ``function`` returned on ``rank``.

        Raises:
            AssertionError: with the traceback of the process, or how it ended without a word.
            TimeoutError: it has not ended.
        """
        return self._gathered([rank])[rank]

    def results(self) -> list[Any]:
        """What every rank returned; all processes have ended. Whoever fails first is named at once."""
        values = self._gathered(range(len(self._pipes)))
        for process in self.processes:
            process.join(self._left())
            assert process.exitcode == 0
        return [values[rank] for rank in range(len(self._pipes))]

    def _gathered(self, ranks: Iterable[int]) -> dict[int, Any]:
        values, waiting = {}, {self._pipes[rank]: rank for rank in ranks}
        while waiting:
            ready = connection.wait(list(waiting), self._left())
            if not ready:
                self._tell(waiting.values())
                raise TimeoutError(f"ranks {sorted(waiting.values())} are not through after {self._patience:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    well, value = pipe.recv()
                except EOFError:
                    self.processes[rank].join(self._left())
                    raise AssertionError(f"rank {rank} ended with {self.processes[rank].exitcode}, unheard") from None
                assert well, f"rank {rank}:\n{value}"
                values[rank] = value
        return values

    def _tell(self, ranks: Iterable[int]) -> None:
        """Lets ``ranks`` write where each of their threads stands, into the errors that a failed test shows."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            self.processes[rank].join(1)  # it is killed next

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in filter(None, self.processes):
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in filter(None, self._pipes):
            pipe.close()
