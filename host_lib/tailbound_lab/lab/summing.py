"""The lab's switch when it sums: Tailbound's program on the data ports, and one job of all workers.

Its copies leave by redirect, past the ports' own queues; they meet tbf and faults in the cable of the worker that gets
them.
The far end of every port takes redirected frames: a cable's end carries XDP, a worker's interface XDP or GRO.
"""

from __future__ import annotations

from typing import Any

from tailbound.kernel.switch import Entry, Switch
from tailbound.switch import report
from tailbound.switch.box import Box, open_xdp, remove
from tailbound.switch.job import JobSpec, RankSpec
from tailbound.transport.rendezvous import new_cookie
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.topology import Link, Topology

#: Slots of the workers' job, a power of two; another one fits beside it.
_ROWS = 1 << 14


class SummingSwitch:
    """Attached until closed, or until its owner dies.

    Attributes:
        entry: the job of all workers; its cookie serves one run of them.

    Raises:
        CapabilityError: compiler, privilege or kernel feature missing.
        AttachError: a port refuses; nothing stays attached.
    """

    def __init__(self, topology: Topology, spec: LabSpec) -> None:
        self._namespace = topology.switch
        self._address = Link.DATA.switch_address(ipv6=spec.ipv6)
        self._ports = [Link.DATA.port(worker.rank) for worker in topology.workers]
        workers = (RankSpec(w.address, w.mac, Link.DATA.port(w.rank)) for w in topology.workers)
        self._job = JobSpec(tuple(workers), new_cookie(), spec.port, _ROWS)
        self._box = self._open()
        self.entry = self.add(self._job)

    def _open(self) -> Box[Switch]:
        def inside() -> Box[Switch]:
            return open_xdp(self._ports, self._address, mac=Link.DATA.switch_mac, slots=2 * _ROWS)

        return namespaces.call(self._namespace, inside, patient=True)

    @property
    def environment(self) -> dict[str, str]:
        """What workers need to know of it."""
        return self._box.environment(self.entry)

    def add(self, spec: JobSpec) -> Entry:
        """Takes another job in; see ``Box.add``."""
        return namespaces.call(self._namespace, self._box.add, spec, patient=True)

    def renew(self) -> int:
        """A new cookie for another run of the workers' job; the old run's packets are a stranger's from now on."""
        remove(self._box, self.entry.cookie)
        self.entry = self._again(new_cookie())
        return self.entry.cookie

    def restart(self) -> None:
        """Down and up again, as a box that crashed: same job and cookie, nothing else is remembered."""
        self._box.close()
        self._box = self._open()
        self.entry = self._again(self.entry.cookie)

    def _again(self, cookie: int) -> Entry:
        """The workers' job, under ``cookie``."""
        job = self._job
        return self.add(JobSpec(job.ranks, cookie, job.port, job.rows, headroom=job.headroom))

    def status(self) -> dict[str, Any]:
        """As ``tailbound switch status --json`` says it."""
        return report.examine(self._box)

    def close(self) -> None:
        """Detaches."""
        self._box.close()
