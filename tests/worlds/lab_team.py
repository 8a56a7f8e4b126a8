"""Teams of communicators in the namespaces of a lab, and a store for processes that live in different ones."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from support import MemoryStore, Team, await_that, team
from tailbound_lab.lab.cluster import Cluster


def lab_team(
    lab: Cluster, settings: dict[str, Any], *, datapath: str = "xdp", **more: Any
) -> contextlib.AbstractContextManager[Team]:
    """``support.team`` with one rank in every worker's namespace, all in this process."""
    return team(
        len(lab.workers), {"port": lab.spec.port} | settings, datapath=datapath, interface=lab.workers[0].interface,
        within=lambda rank, make: lab.run(rank, make, sysfs=True), **more,
    )  # fmt: skip


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


@functools.cache
def _held() -> MemoryStore:
    """The store of a server, in its process."""
    return MemoryStore()


class _Server(BaseManager):
    """Serves a ``MemoryStore`` at a Unix socket, which reaches across network namespaces."""


_Server.register("store", callable=_held)


@contextmanager
def served_store(path: Path) -> Iterator[str]:
    """Address for ``connect`` of a store that lives as long as the ``with`` block."""
    server = _Server(address=str(path), authkey=b"tailbound")
    server.start()
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

    def choices() -> list[dict[str, Any]]:
        return [member.stats()["choice"] for member in job.communicators]

    await_that(lambda: [choice["result"] for choice in choices()] == list(results), f"{results} are chosen")
    return choices()
