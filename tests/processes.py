"""Jobs of real processes with a Gloo process group, for the tests of the PyTorch side.

Processes are forked from a server that has imported torch already, so that one costs little to start.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds that a job may take on a loaded machine, all waits for it together: less than a test may take.
PATIENCE = 100.0


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    modules = ["torch", "torch.nn.parallel", "tailbound.torch", "torch_jobs", "backend_jobs", "fsdp_jobs"]
    context.set_forkserver_preload(modules)
    return context


def _child(
    pipe: Any,
    function: Callable[..., Any],
    backend: str,
    rank: int,
    ranks: int,
    store: str,
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
        pipe.send((True, function(rank, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()


class Job:
    """Processes that all run ``function(rank, *arguments)`` in one process group of ``backend``."""

    def __init__(
        self, function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, backend: str = "gloo"
    ) -> None:
        context = _context()
        self._until = time.monotonic() + PATIENCE
        self._pipes, self.processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            store = str(folder / f"store-{function.__name__}")
            whole = (there, function, backend, rank, ranks, store, arguments)
            process = context.Process(target=_child, args=whole)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def await_event(self, event: Any, what: str) -> None:
        """Waits for an event that a rank sets.

        Raises:
            AssertionError: the job's time is over; with ``what`` was awaited and what ranks have said since.
        """
        if event.wait(self._left()):
            return
        said = [str(pipe.recv()) for pipe in self._pipes if pipe.poll()]
        raise AssertionError("\n".join([f"not within {PATIENCE:g} s: {what}", *said]))

    def _left(self) -> float:
        """Seconds of the job's time."""
        return max(0.1, self._until - time.monotonic())

    def result(self, rank: int) -> Any:
        """What ``function`` returned on ``rank``.

        Raises:
            AssertionError: with the traceback of the process.
            TimeoutError, EOFError: it did not end, or was killed.
        """
        if not self._pipes[rank].poll(self._left()):
            raise TimeoutError(f"rank {rank} is not through after {PATIENCE:g} s")
        well, value = self._pipes[rank].recv()
        assert well, f"rank {rank}:\n{value}"
        return value

    def results(self) -> list[Any]:
        """What every rank returned; all processes have ended."""
        values = [self.result(rank) for rank in range(len(self._pipes))]
        for process in self.processes:
            process.join(self._left())
            assert process.exitcode == 0
        return values

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
