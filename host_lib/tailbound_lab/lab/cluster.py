"""A lab as a context manager: workers in network namespaces, joined by cables and a switch.

::

    with Cluster(LabSpec(workers=4, rate=parse_rate("1gbit"), loss=0.01)) as lab:
        lab.run(0, function)                  # in a thread inside worker 0
        process = lab.popen(1, ["python3", "train.py"])
        lab.set_link(2, up=False)

Everything is removed at the end of the ``with`` block, also after an exception, Ctrl-C, SIGTERM or SIGHUP.
After SIGKILL nothing can run; the namespaces' names tell whose they were, and the next lab (or
``tailbound lab clean``) removes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tailbound.doctor.facts import has_capability
from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import ethtool, pin
from tailbound_lab.lab import build, counters, enter, namespaces, owner, traffic, user_namespace
from tailbound_lab.lab.faults import Fault, FaultCounts, Way
from tailbound_lab.lab.inject import Injector
from tailbound_lab.lab.losses import LossFilters
from tailbound_lab.lab.passthrough import PassThrough
from tailbound_lab.lab.signals import ExitOnSignal, held
from tailbound_lab.lab.spec import Background, LabSpec
from tailbound_lab.lab.summing import SummingSwitch
from tailbound_lab.lab.topology import LINKS, Link, Topology, Worker, describe

T = TypeVar("T")
log = logging.getLogger("tailbound")

#: A port that is free in every fresh namespace; torchrun's default.
MASTER_PORT = 29500
_NO_BACKGROUND = "the background's sender has ended by itself; see its output above"


class Cluster:
    """Workers, cables and a switch in namespaces of their own.

    Args:
        spec: what to build; an int means that many untroubled workers.

    Raises:
        ConfigError: invalid faults; or, on entering, a lab that is built already.
        CapabilityError: on entering: neither root nor in a user namespace of one's own, the kernel lacks namespaces,
            veth, bridge or tbf, or, for faults, no compiler for XDP programs; in a user namespace: what needs XDP.
    """

    def __init__(self, spec: LabSpec | int) -> None:
        self.spec = LabSpec(spec) if isinstance(spec, int) else spec
        self.topology: Topology = self._describe("tb-unbuilt")
        self._owner = 0
        self._fault = Fault.of(self.spec)  # here, so that invalid faults are refused before anything is built
        self._faults: Injector | LossFilters | None = None
        self._wire: PassThrough | None = None
        self._switch: SummingSwitch | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._background: subprocess.Popen[Any] | None = None
        self._signals = ExitOnSignal()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """By rank."""
        return self.topology.workers

    @property
    def xdp(self) -> bool:
        """Whether XDP programs can be had: not in a user namespace. Ranks receive over ``udp`` there."""
        return not user_namespace.owned()

    def __enter__(self) -> Cluster:
        if self._owner:
            raise ConfigError("this lab is built already: enter it once")
        self._check_privileges()
        owner.reap()
        self._owner = os.getpid()
        self.topology = self._describe(owner.new_prefix())
        self._signals.install()
        with contextlib.suppress(CapabilityError):  # by the host: each worker has a mount namespace of its own
            pin.mount()
        try:
            queues = os.cpu_count() or 1
            wire = self.spec.wire_size
            build.build(self.topology, mtu=self.spec.mtu, queues=queues, wire=wire)
            if wire:
                self._force_wire_size()
            if self.spec.switch:
                self._switch = SummingSwitch(self.topology, self.spec)
            if self.spec.has_fault_programs:
                if self.xdp:
                    self._faults = Injector(self.topology, self._fault, self.spec.seed, self.spec.queued)
                else:
                    self._faults = LossFilters(self.topology, self._fault)
                if self._fault.needs_checksums:
                    self._finish_checksums(LINKS)
            if self.spec.rate is not None:
                for worker in self.workers:
                    self.set_rate(worker.rank, self.spec.rate)
            if self.spec.background is not None:
                self.set_background(self.spec.background)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what runs inside and remove everything. Signals wait until that is done; may be called twice."""
        if self._owner != os.getpid():
            return  # a forked child must not take its parent's lab away
        try:
            self._take_down()
        finally:
            self._signals.restore()

    def _take_down(self) -> None:
        with held():
            if self._faults is not None:
                self._faults.close()
                self._faults = None
            if self._wire is not None:
                self._wire.close()
                self._wire = None
            if self._switch is not None:
                self._switch.close()
                self._switch = None
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            if not self._end_background():
                log.warning(_NO_BACKGROUND)
            owner.remove_all(list(self.topology.namespaces))
            for process in self._processes:
                process.wait()
            self._processes.clear()
            self._owner = 0

    # -- running things inside --------------------------------------------------------------------

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun would set for ``rank``, and Tailbound's own."""
        worker = self._worker(rank)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "GROUP_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(self.spec.workers),
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_WORLD_SIZE": str(self.spec.workers),
            "ROLE_WORLD_SIZE": str(self.spec.workers),
            "MASTER_ADDR": self.workers[0].plain_address,
            "MASTER_PORT": str(MASTER_PORT),
            "TORCHELASTIC_RUN_ID": self.workers[0].namespace.rpartition("-")[0],
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "GLOO_SOCKET_IFNAME": Link.PLAIN.interface,
            "OMP_NUM_THREADS": "1",
            "TAILBOUND_INTERFACE": worker.interface,
            "TAILBOUND_PORT": str(self.spec.port),
        }
        if not self.xdp:
            variables["TAILBOUND_DATAPATH"] = "udp"
        if self._switch is not None:
            variables |= self._switch.environment
        if self.spec.straggler is not None:
            variables["TAILBOUND_LAB_STRAGGLER"] = str(self.spec.straggler)
        return variables

    def run(self, rank: int, function: Callable[..., T], *arguments: Any, sysfs: bool = False) -> T:
        """``function(*arguments)`` in a thread inside the worker's namespace; its result or its exception.

        Sockets and BPF links that it makes stay in that namespace wherever they are used afterwards.
        ``sysfs``: ``/sys/class/net`` shows the worker's interfaces too (a few milliseconds).
        """
        return namespaces.call(self._worker(rank).namespace, function, *arguments, sysfs=sysfs)

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in the worker's namespace, in a process group of its own, with a ``/sys`` to match.

        ``env``: variables on top of this process's and ``environment(rank)``; ``options`` are of ``subprocess.Popen``.
        The command dies with this process where it is started from the main thread (the kernel ties it to
        the thread), and with the lab in any case.
        """
        tie = ["--parent", str(os.getpid())] if threading.current_thread() is threading.main_thread() else []
        shim = [sys.executable, "-I", "-S", str(Path(enter.__file__)), *tie, "--hosts", self.topology.hosts]
        process = subprocess.Popen(
            [*shim, str(namespaces.path(self._worker(rank).namespace)), "--", *argv],
            env={**os.environ, **self.environment(rank), **(env or {})},
            process_group=0,
            **options,
        )
        self._processes.append(process)
        return process

    # -- troubling it -----------------------------------------------------------------------------

    def set_link(self, rank: int, up: bool, link: Link | None = None) -> None:
        """Cut or mend a worker's connection at its switch port: ``link`` or, by default, both.

        Interfaces keep their carrier, as they do when something beyond the next switch fails.
        """
        self._worker(rank)
        state = build.FORWARDING if up else build.DISABLED
        for each in LINKS if link is None else (link,):
            namespaces.call(self.topology.switch, build.set_port_state, each.port(rank), state, patient=True)

    def set_rate(self, rank: int, rate: int | None, link: Link | None = None) -> None:
        """Limit a worker's links, each way, to ``rate`` bit/s; None: no limit.

        What it sends waits on its own interface, whose sockets know it; what it is sent, in its cable's buffer.

        Raises:
            ConfigError: the lab has no cables.
        """
        cable = self._cable(rank)
        smooth = self.spec.queue is not None
        own = partial(build.set_rate, host=True, smooth=smooth)
        for each in LINKS if link is None else (link,):
            namespaces.call(self.workers[rank].namespace, own, each.interface, rate, patient=True)
            namespaces.call(cable, partial(build.set_rate, each.worker_port, rate, smooth=smooth), patient=True)
            if isinstance(self._faults, Injector):
                self._faults.set_rate(rank, each, rate)

    def set_faults(
        self, fault: Fault, rank: int | None = None, link: Link | None = None, way: Way | None = None
    ) -> None:
        """Replace the faults of one worker's cables, or of all, and start their generators anew; counters go on.

        ``way``: only in one direction, the other one stays as it is. The probabilities are then those of this cable
        alone, and not half of what two workers see of each other.

        Raises:
            ConfigError: the lab has no fault programs.
        """
        if rank is not None:
            self._worker(rank)
        injector = self._injector()
        if fault.needs_checksums:
            self._finish_checksums(LINKS if link is None else (link,))
        injector.set(fault, rank, link, way)

    def set_background(self, background: Background | None) -> None:
        """Replace the foreign traffic; None: silence. The same seed gives the same bursts, counted from this call.

        Raises:
            ConfigError: the lab has no namespace for it.
            CapabilityError: what was to be sent until now was not: the process that sends has ended by itself.
        """
        if self.topology.background is None:
            raise ConfigError("this lab has no place for foreign traffic: build it with LabSpec(background=...)")
        if not self._end_background():
            raise CapabilityError(_NO_BACKGROUND)
        if background is not None:
            self._background = traffic.start(self.topology, background, self.spec.seed, self.spec.mtu)

    def _end_background(self) -> bool:
        """Whether it ran until now, or there was none."""
        process, self._background = self._background, None
        return process is None or traffic.stop(process)

    @property
    def switch(self) -> SummingSwitch:
        """The switch that sums.

        Raises:
            ConfigError: the lab has none.
        """
        if self._switch is None:
            raise ConfigError("this lab's switch does not sum: build it with LabSpec(switch=True)")
        return self._switch

    # -- looking at it ----------------------------------------------------------------------------

    def fault_counts(self, rank: int | None = None, link: Link | None = None) -> FaultCounts:
        """What the fault programs did so far, summed over one worker's cables or all, both ways; zeros without any."""
        return FaultCounts() if self._faults is None else self._faults.counts(rank, link)

    def drops(self) -> list[counters.InterfaceCounters]:
        """Independent counters of every interface of the lab."""
        return [
            entry
            for name in self.topology.namespaces
            for entry in namespaces.call(name, counters.read, name, patient=True)
        ]

    def lost_frames(self) -> int:
        """Frames that any queue or ring of the lab dropped (no XDP program's drops)."""
        return sum(entry.lost for entry in self.drops())

    # -- own business -----------------------------------------------------------------------------

    def _check_privileges(self) -> None:
        """Whether this process may build what is asked for.

        Raises:
            CapabilityError: it may not; says what it needs.
        """
        if not has_capability("CAP_SYS_ADMIN", "CAP_NET_ADMIN"):
            why = os.environ.get(user_namespace.REFUSED)
            refused = f", and a user namespace of its own is refused here: {why}" if why else ""
            raise CapabilityError(f"the lab makes network namespaces and needs root: run it with sudo{refused}")
        missing = [*self._fault.beyond_loss, *(["a switch that sums"] if self.spec.switch else [])]
        missing += ["finite queues"] if self.spec.queue is not None else []
        if missing and not self.xdp:
            raise CapabilityError(
                f"{', '.join(missing)}: done by XDP programs, which need root: run it with sudo, or without these "
                "(rate, loss, background and stragglers need no root)"
            )

    def _describe(self, prefix: str) -> Topology:
        spec = self.spec
        background = spec.background is not None
        return describe(prefix, spec.workers, cables=spec.has_cables, background=background, ipv6=spec.ipv6)

    def _worker(self, rank: int) -> Worker:
        if not 0 <= rank < self.spec.workers:
            raise ConfigError(f"rank {rank} does not exist: ranks are 0..{self.spec.workers - 1}")
        return self.workers[rank]

    def _cable(self, rank: int) -> str:
        self._worker(rank)
        if not self.topology.cables:
            raise ConfigError("this lab has no cables to trouble: build it with LabSpec(cables=True)")
        return self.topology.cables[rank]

    def _injector(self) -> Injector | LossFilters:
        if self._faults is None:
            raise ConfigError("this lab has no fault programs: build it with LabSpec(cables=True), or with faults")
        return self._faults

    def _force_wire_size(self) -> None:
        """XDP on every end but the workers' data interfaces, which are for Tailbound's own program.

        Without XDP, super-frames are cut where they would leave. Workers receive with GRO, as every NIC does: it is the
        peers measured on TCP that would suffer.
        """
        if self.xdp:
            self._wire = PassThrough(self._wire_places())
        else:
            self._cut_super_frames()
        for worker in self.workers:
            for link in LINKS:
                namespaces.call(worker.namespace, ethtool.set_features, link.interface, True, ethtool.GRO, patient=True)

    def _wire_places(self) -> list[tuple[str, str]]:
        """Where the program goes that passes everything."""
        links = [link for link in LINKS if not (self.spec.switch and link is Link.DATA)]  # there, the switch's own is
        places = [(self.topology.switch, link.port(worker.rank)) for link in links for worker in self.workers]
        if self.topology.cables and not self.spec.has_fault_programs:
            places += [end for w in self.workers for link in LINKS for end in self.topology.cable_ends(w.rank, link)]
        return places + [(worker.namespace, Link.PLAIN.interface) for worker in self.workers]

    def _cut_super_frames(self) -> None:
        """Without XDP: before they leave a worker, or the switch's ports, for those of the background."""
        for worker in self.workers:
            interfaces = [link.interface for link in LINKS]
            namespaces.call(worker.namespace, build.send_single_frames, interfaces, patient=True)
        ports = [link.port(worker.rank) for worker in self.workers for link in LINKS]
        namespaces.call(self.topology.switch, build.send_single_frames, ports, patient=True)

    def _finish_checksums(self, links: Sequence[Link]) -> None:
        """Let the workers' stacks compute checksums; see ``Fault.needs_checksums``."""
        for worker in self.workers:
            for link in links:
                change = ethtool.set_features, link.interface, False, ethtool.CHECKSUMS
                namespaces.call(worker.namespace, *change, patient=True)
