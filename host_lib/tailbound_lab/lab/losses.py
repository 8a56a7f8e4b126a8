"""Independent losses on a lab's cables where no XDP program may be loaded: in place of ``inject.Injector``.

Both ends of a cable drop, each in the direction in which an ``Injector`` would at the one or the other: UDP at the
worker's end, everything else at the switch's, because the kernel counts what is dropped by interface alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyroute2 import IPRoute, NetlinkError

from tailbound.errors import CapabilityError
from tailbound_lab.lab import dropfilter, namespaces
from tailbound_lab.lab.faults import Fault, FaultCounts, Way, end_settings
from tailbound_lab.lab.topology import LINKS, Cable, Link, Topology

__all__ = ["LossFilters"]

#: (direction, end at the worker or at the switch) -> hook where it passes.
_HOOKS = {
    (Way.FROM_WORKER, True): dropfilter.INGRESS,
    (Way.FROM_WORKER, False): dropfilter.EGRESS,
    (Way.TO_WORKER, True): dropfilter.EGRESS,
    (Way.TO_WORKER, False): dropfilter.INGRESS,
}


class LossFilters:
    """Filters on all cables of a built topology; they go with the namespaces.

    Args:
        topology: with cables.
        fault: of ``loss`` alone.

    Raises:
        CapabilityError: ``fault`` asks for more, or the kernel has no such filters.
    """

    def __init__(self, topology: Topology, fault: Fault) -> None:
        self._cables = topology.cables
        for cable in self._cables:
            namespaces.call(cable.namespace, _prepare, patient=True)
        self.set(fault)

    def _select(self, rank: int | None) -> Iterator[Cable]:
        return (cable for cable in self._cables if rank in (None, cable.rank))

    def set(self, fault: Fault, rank: int | None = None, link: Link | None = None, way: Way | None = None) -> None:
        """As ``Injector.set``.

        Raises:
            CapabilityError: ``fault`` asks for more than ``loss``.
        """
        if more := fault.beyond_loss:
            raise CapabilityError(
                f"{', '.join(more)} need XDP programs, and these need root: run it with sudo, or ask for loss alone"
            )
        probability = end_settings(fault, alone=way is not None).loss_good
        links = LINKS if link is None else (link,)
        ways = tuple(Way) if way is None else (way,)
        for cable in self._select(rank):
            namespaces.call(cable.namespace, _set, links, ways, probability, patient=True)

    def counts(self, rank: int | None = None, link: Link | None = None) -> FaultCounts:
        """As ``Injector.counts``."""
        total = FaultCounts()
        for cable in self._select(rank):
            total += namespaces.call(cable.namespace, _counts, LINKS if link is None else (link,), patient=True)
        return total

    def close(self) -> None:
        """Nothing is left to do."""


def _prepare() -> None:
    """A clsact on all ports of a cable."""
    with IPRoute() as ip:
        for port in (port for link in LINKS for port in (link.worker_port, link.switch_port)):
            try:
                ip.tc("add", "clsact", index=ip.link_lookup(ifname=port)[0])
            except NetlinkError as error:
                raise CapabilityError(
                    f"cannot lose packets: {error}; use a kernel with CONFIG_NET_SCH_INGRESS"
                ) from error


def _set(links: tuple[Link, ...], ways: tuple[Way, ...], probability: float) -> None:
    for link in links:
        for way in ways:
            for at_worker, port in ((True, link.worker_port), (False, link.switch_port)):
                instructions = dropfilter.program(probability, udp=at_worker)
                try:
                    dropfilter.put(port, _HOOKS[way, at_worker], instructions)
                except OSError as error:
                    raise CapabilityError(f"{error}; use a kernel with CONFIG_NET_CLS_BPF") from error


def _counts(links: tuple[Link, ...]) -> FaultCounts:
    seen = lost = other = sent = 0
    with IPRoute() as ip:
        for link in links:
            ends = [ip.link_lookup(ifname=port)[0] for port in (link.worker_port, link.switch_port)]
            udp, rest = (dropfilter.dropped(ip, index) for index in ends)
            from_worker, to_worker = (ip.get_links(i)[0].get_attr("IFLA_STATS64")["rx_packets"] for i in ends)
            seen, sent = seen + from_worker + to_worker, sent + from_worker
            lost, other = lost + udp + rest, other + rest
    return FaultCounts(seen=seen, lost=lost, lost_other=other, sent=sent)
