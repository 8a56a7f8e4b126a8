"""Counters of the lab's interfaces that owe nothing to Tailbound's own programs.

After quiescence they must explain every packet that was sent and did not arrive (``docs/lab.md``).
Counts are of frames: a super-frame that is dropped whole counts once, so balances to the packet need
``wire`` or faults, which keep super-frames from leaving a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyroute2 import IPRoute

from tailbound.kernel import ethtool

__all__ = ["InterfaceCounters", "read"]


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
        xdp_drops: frames its own XDP program dropped: what that program's ledger or fault counters explain.
        driver: the driver's own counters, as ``ethtool -S`` names them.
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
    xdp_drops: int
    driver: dict[str, int] = field(repr=False)

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
            driver = ethtool.statistics(name)
            qdisc = sum(
                q.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")["drops"]
                for q in ip.get_qdiscs(link["index"])
                if q.get_attr("TCA_KIND") not in ("mq", "clsact")  # its children's once more; lost on purpose
            )
            by_program = [n for key, n in driver.items() if key.startswith("rx_queue_") and key.endswith("_xdp_drops")]
            found.append(
                InterfaceCounters(
                    namespace=namespace,
                    interface=name,
                    rx_packets=stats["rx_packets"],
                    tx_packets=stats["tx_packets"],
                    rx_bytes=stats["rx_bytes"],
                    tx_bytes=stats["tx_bytes"],
                    rx_dropped=stats["rx_dropped"],
                    tx_dropped=stats["tx_dropped"],
                    qdisc=qdisc,
                    xdp_drops=sum(by_program),
                    driver=driver,
                )
            )
    return found
