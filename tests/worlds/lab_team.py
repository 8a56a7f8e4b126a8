"""Teams of communicators in the namespaces of a lab, and a store for processes that live in different ones."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from support import PATIENCE, MemoryStore, Team, assembled
from tailbound.collective.communicator import Communicator
from tailbound.transport.config import Config
from tailbound_lab.lab.cluster import Cluster


@contextmanager
def lab_team(
    lab: Cluster,
    settings: dict[str, Any],
    *,
    datapath: str = "xdp",
    cookie: int | None = None,
    store: MemoryStore | None = None,
    name: str = "job",
) -> Iterator[Team]:
    """A job with one rank in every worker's namespace, all in this process."""
    shared = store or MemoryStore()
    ranks = len(lab.workers)

    def maker(rank: int) -> Callable[[], Communicator]:
        def make() -> Communicator:
            config = Config(**({"rank": rank, "ranks": ranks, "port": lab.spec.port} | settings))
            interface = lab.workers[rank].interface
            return Communicator(shared, config, datapath=datapath, interface=interface, name=name)

        return lambda: lab.run(rank, make, sysfs=True)

    with assembled([maker(rank) for rank in range(ranks)], cookie) as whole:
        yield whole


def all_said(workers: Sequence[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What each of ``workers`` has printed when it has ended well; all together have ``seconds`` for that.

    Raises:
        AssertionError: one has not; with what all have printed until then.
    """
    end, said, late = time.monotonic() + seconds, [], []
    for rank, worker in enumerate(workers):
        try:
            said.append(worker.communicate(timeout=max(0.0, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            late.append(rank)
            os.killpg(worker.pid, signal.SIGKILL)
            said.append(worker.communicate()[0])
    codes = [worker.returncode for worker in workers]
    assert not any(codes), "\n".join([f"exit codes {codes}, not through after {seconds:g} s: {late}", *said])
    return said


class _Server(BaseManager):
    pass


_Server.register("store", callable=None)


def _serve(path: Path) -> _Server:
    """Serves one ``MemoryStore`` at a Unix socket, which reaches across network namespaces."""
    held = MemoryStore()

    class Server(BaseManager):
        pass

    Server.register("store", callable=lambda: held)
    server = Server(address=str(path), authkey=b"tailbound")
    server.start()
    return server  # type: ignore[return-value]


@contextmanager
def served_store(path: Path) -> Iterator[str]:
    """Address for ``connect`` of a store that lives as long as the ``with`` block."""
    server = _serve(path)
    try:
        yield str(path)
    finally:
        server.shutdown()


def connect(address: str) -> Any:
    """The store at ``address``, from another process."""
    client = _Server(address=address, authkey=b"tailbound")
    client.connect()
    return client.store()  # type: ignore[attr-defined]


def chosen(job: Team, *results: str) -> list[dict[str, Any]]:
    """Waits until the ranks send their results as told; their choices."""
    until = time.monotonic() + PATIENCE
    while True:
        choices = [member.stats()["choice"] for member in job.communicators]
        if [choice["result"] for choice in choices] == list(results):
            return choices
        assert time.monotonic() < until, choices
        time.sleep(0.005)
