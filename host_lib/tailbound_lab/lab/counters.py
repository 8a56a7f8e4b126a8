"""Counters of the lab's interfaces that owe nothing to Tailbound's own programs.

After quiescence they must explain every packet that was sent and did not arrive (``docs/lab.md``).
Counts are of frames: a super-frame that is dropped whole counts once, so balances to the packet need
``wire`` or faults, which keep super-frames from leaving a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyroute2 import IPRoute


@dataclass(frozen=True)
class InterfaceCounters:
    """One interface, from its creation on.

    Attributes:
        namespace: where it is.
        interface: its name.
        rx_packets, tx_packets, rx_bytes, tx_bytes: frames through it.
        rx_dropped: frames it could not take.
        tx_dropped: frames the other end of the veth could not take; a full ring shows here.
        qdisc: frames dropped by its queue (tbf).
    """

    namespace: str
    interface: str
    rx_packets: int
    tx_packets: int
    rx_bytes: int
    tx_bytes: int
    rx_dropped: int
    tx_dropped: int
    qdisc: int

    @property
    def lost(self) -> int:
        """Frames dropped here that no XDP program dropped on purpose."""
        return self.rx_dropped + self.tx_dropped + self.qdisc


def read(namespace: str) -> list[InterfaceCounters]:
    """Counters of every veth of the calling thread's namespace, which is called ``namespace``."""
    found = []
    with IPRoute() as ip:
        for link in ip.get_links():
            info = link.get_attr("IFLA_LINKINFO")
            if info is None or info.get_attr("IFLA_INFO_KIND") != "veth":
                continue
            name = link.get_attr("IFLA_IFNAME")
            stats = link.get_attr("IFLA_STATS64")
            qdisc = sum(
                q.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["drops"]
                for q in ip.get_qdiscs(link["index"])
                if q.get_attr("TCA_KIND") not in ("mq", "clsact")  # its children's once more; lost on purpose
            )
            names = ("rx_packets", "tx_packets", "rx_bytes", "tx_bytes", "rx_dropped", "tx_dropped")
            found.append(InterfaceCounters(namespace, name, qdisc=qdisc, **{each: stats[each] for each in names}))
    return found
