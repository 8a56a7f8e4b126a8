"""Where the ranks of a benchmark run: a lab of namespaces, or plain processes on loopback without any privileges."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tailbound.errors import CapabilityError, ConfigError
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.straggler import ENVIRONMENT as STRAGGLER

#: Set for ranks on loopback: process to die with. In a lab the launcher sees to it.
PARENT = "TAILBOUND_BENCH_PARENT"


class Place(Protocol):
    """Starts processes, one a rank; ``tailbound_lab.lab.cluster.Cluster`` is one."""

    spec: LabSpec

    @property
    def xdp(self) -> bool:
        """Whether its ranks can have XDP."""

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command as ``rank``, in a process group of its own."""


class Loopback:
    """Ranks as plain processes on 127.0.0.1: no privileges, no namespaces, no faults.

    Args:
        spec: only workers and straggler are heeded.

    Raises:
        CapabilityError: the settings ask for what only a lab has.
    """

    xdp = False

    def __init__(self, spec: LabSpec) -> None:
        if wanted := needs_lab(spec):
            raise CapabilityError(f"{', '.join(wanted)} need network namespaces: run it as root (sudo)")
        self.spec = spec
        self._processes: list[subprocess.Popen[Any]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun would set for ``rank``."""
        ranks = str(self.spec.workers)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            PARENT: str(os.getpid()),
        }
        if self.spec.straggler is not None:
            variables[STRAGGLER] = str(self.spec.straggler)
        return variables

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command as ``rank``, in a process group of its own."""
        inherited = {name: value for name, value in os.environ.items() if name != "TAILBOUND_INTERFACE"}
        process = subprocess.Popen(
            list(argv), env={**inherited, **self.environment(rank), **(env or {})}, process_group=0, **options
        )
        self._processes.append(process)
        return process


def datapath_at(place: Place, asked: str) -> str:
    """What ranks at ``place`` are to receive over: what was asked for, or ``udp`` where there is no XDP.

    Raises:
        CapabilityError: ``xdp`` was asked for, and is not to be had there.
    """
    if place.xdp:
        return asked
    if asked == "xdp":
        raise CapabilityError("the xdp datapath loads XDP programs, which needs root: run it with sudo")
    return "udp"


def needs_lab(spec: LabSpec) -> list[str]:
    """What ``spec`` asks for that plain processes on loopback cannot have."""
    wanted = {
        "a rate": spec.rate is not None,
        "faults": spec.has_faults,
        "wire-size packets": spec.wire,
        "a flooding switch": spec.flood,
        "another MTU": spec.mtu != LabSpec(1).mtu,
    }
    return [name for name, asked in wanted.items() if asked]


@contextmanager
def open_place(spec: LabSpec, datapath: str) -> Iterator[tuple[Place, str | None]]:
    """A lab where one can be had, else loopback where that is enough.

    Yields:
        The place, and why it is not a lab (None: it is one).

    Raises:
        ConfigError: fewer than two workers.
        CapabilityError: a lab is asked for (by faults, rate, ``xdp``) and cannot be had.
    """
    if spec.workers < 2:
        raise ConfigError(f"an all-reduce needs at least 2 workers, not {spec.workers}")
    from tailbound_lab.lab.cluster import Cluster

    lab = Cluster(spec)
    try:
        lab.__enter__()
    except CapabilityError as error:
        if datapath == "xdp" or needs_lab(spec):
            raise
        with Loopback(spec) as place:
            yield place, str(error)
        return
    try:
        yield lab, None
    finally:
        lab.close()
