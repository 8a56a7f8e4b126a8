"""A switch that runs, of either kind: ports by name, jobs in and out. XDP programs are opened here, bmv2 in ``p4``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import attach as attaching
from tailbound.kernel import net
from tailbound.kernel.linear import linear_of
from tailbound.kernel.switch import Entry, Member, Sizes, Switch, port_table
from tailbound.settings.table import OPTIONS
from tailbound.switch.job import JobSpec, ip_text, mac_bytes, place
from tailbound.transport.config import row_width
from tailbound.wire.address import family_name, ip_bytes, is_ipv6

#: Slots of all jobs together: two jobs of the default size; 92 MB at W = 1408.
DEFAULT_SLOTS = 32768


@dataclass(frozen=True)
class Port:
    """A port of the switch; ``ifindex`` is its number in a P4 switch."""

    name: str
    ifindex: int


#: What sums: ``kernel.switch.Switch``, or ``switch.p4.switch.P4Switch``, whose module needs this one.
A = TypeVar("A", bound=Any)


class Box(Generic[A]):
    """A switch and its ports; every method is to be called in the network namespace that the ports are in.

    Args:
        switch: what sums.
        ports: where it is attached.
        address, mac: of the switch, as workers see it.
        links: descriptors of the links; empty where others hold them.
    """

    def __init__(self, switch: A, ports: Sequence[Port], address: str, mac: bytes, links: Sequence[int] = ()) -> None:
        self.switch = switch
        self.ports = tuple(ports)
        self.address = address
        self.mac = mac
        self.links = list(links)

    def close(self) -> None:
        """Closes links and maps; what nobody else holds is gone then. May be called twice."""
        for link in self.links:
            os.close(link)
        self.links.clear()
        self.switch.close()

    def add(self, spec: JobSpec) -> Entry:
        """Takes a job in.

        Raises:
            ConfigError: no room, something of it is another job's, or a port is not the switch's.
            CapabilityError: the kernel refuses a port.
            AttachError: the P4 switch refuses.
        """
        number, base = place(spec, self.switch.entries(), self.switch.slots)
        by_name = {port.name: port.ifindex for port in self.ports}
        for rank, worker in enumerate(spec.ranks):
            if worker.port not in by_name:
                raise ConfigError(
                    f"rank {rank} is behind {worker.port}, which is no port of this switch; choose one of: "
                    f"{', '.join(by_name)}"
                )
        for rank, worker in enumerate(spec.ranks):
            if is_ipv6(worker.address) != is_ipv6(self.address):
                raise ConfigError(
                    f"rank {rank} has an address of {family_name(worker.address)} ({worker.address}), and this switch "
                    f"sums packets of {family_name(self.address)} ({self.address}): give addresses of one family"
                )
        members = tuple(Member(w.address, mac_bytes(w.mac), by_name[w.port]) for w in spec.ranks)
        entry = Entry(
            spec.cookie, self.address, self.mac, spec.port, base, spec.rows, spec.headroom, members
        )  # fmt: skip
        try:
            self.switch.put(number, entry)
        except OSError as error:
            raise CapabilityError(
                f"the kernel refused the ports of job {spec.cookie:#010x} ({error.strerror}): run as root, with native "
                "XDP on each port"
            ) from error
        return entry

    def environment(self, entry: Entry) -> dict[str, str]:
        """The variables by which the workers of a job learn of their switch."""
        told = {"rows": entry.rows, "form": self.switch.form, "codes": self.switch.width, "cookie": entry.cookie}
        where = ",".join([entry.address, *(f"{name}={value}" for name, value in told.items())])
        return {OPTIONS["switch"].variable: where, OPTIONS["port"].variable: str(entry.port)}


def check_ports(ports: Sequence[str]) -> None:
    """Refuses a list of ports that is empty or names one twice.

    Raises:
        ConfigError: it does.
    """
    if not ports or len(set(ports)) < len(ports):
        raise ConfigError(f"ports {', '.join(ports) or '(none)'}: give at least one, and each once")


def remove(box: Box[Switch], cookie: int) -> bool:
    """Takes a job out; its slots are free at once.

    Returns:
        Whether it was there.
    """
    for number, entry in box.switch.entries().items():
        if entry.cookie == cookie:
            box.switch.drop(number)
            return True
    return False


def open_xdp(
    ports: Sequence[str],
    address: str,
    *,
    mac: str | None = None,
    slots: int = DEFAULT_SLOTS,
    mtu: int | None = None,
    loader: str = "auto",
) -> Box[Switch]:
    """Attaches XDP programs to ports; closing the box detaches.

    Args:
        address: IP address of the switch; jobs are of its family.
        mac: its Ethernet address; None: that of the first port.
        slots: of all jobs together.
        mtu: of the path, in bytes; None: the smallest of the ports.

    Raises:
        ConfigError: an invalid port, address or size.
        CapabilityError: compiler, privilege or kernel feature missing.
        AttachError: a port refuses, or carries a program; nothing stays attached.
    """
    check_ports(ports)
    address = ip_text(address)
    if slots < 1:
        raise ConfigError(f"{slots} slots: give at least one")
    found = [Port(name, net.index_of(name)) for name in ports]
    least = min(net.mtu_of(name) for name in ports)
    if mtu is not None and mtu > least:
        raise ConfigError(f"MTU {mtu} is above the ports' {least}: give at most that")
    for port in found:
        attaching.refuse_occupied(port.name)
    own = mac_bytes(mac) if mac is not None else net.mac_of(ports[0])
    linear = min(linear_of(name) for name in ports)
    ipv6 = is_ipv6(address)
    width = row_width(0, least if mtu is None else mtu, linear=linear, ip=ip_bytes(address))
    sizes = Sizes(width, slots, port_table([p.ifindex for p in found]))
    made = Box(Switch.make(sizes, loader, ipv6=ipv6), found, address, own)
    try:
        for port in found:
            made.links.append(attaching.attach(made.switch.program, port.name))
    except BaseException:
        made.close()
        raise
    return made
