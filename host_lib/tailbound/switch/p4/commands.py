"""Forwarding and job entries as commands of ``simple_switch_CLI``. Pure text, names as in ``p4/``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tailbound.errors import ConfigError
from tailbound.kernel.switch import Entry
from tailbound.switch.p4.compile import Sizes

INGRESS, EGRESS = "TailboundIngress", "TailboundEgress"
#: Multicast groups: all ports, and one for each job from here on.
FLOOD_GROUP, JOB_GROUP = 1, 16
#: Packets that may wait for a port.
QUEUE_PACKETS = 4096
#: Registers: counts by job, sender and verdict; whose a slot is (zero: nobody's), and whether final.
LEDGER = f"{INGRESS}.ledger.verdicts"
SLOT_STATE = (f"{INGRESS}.slots.cookies", f"{INGRESS}.slots.finals")


def mac_text(mac: bytes) -> str:
    """An Ethernet address as commands name it."""
    return mac.hex(":")


def check(entry: Entry, sizes: Sizes) -> None:
    """Refuses an entry whose ranks or ports the program has no room for; ``switch.job.place`` has looked at slots.

    Raises:
        ConfigError: it has none.
    """
    if not 1 <= len(entry.members) <= sizes.ranks:
        raise ConfigError(f"{len(entry.members)} workers: give 1..{sizes.ranks}, as this switch takes")
    for member in entry.members:
        if member is not None and not 0 <= member.ifindex < sizes.ports:
            raise ConfigError(
                f"port {member.ifindex} of {member.address}: give one of this switch's 0..{sizes.ports - 1}"
            )


def _add(table: str, action: str, keys: Iterable[object], values: Iterable[object] = ()) -> str:
    control, _, _ = table.rpartition(".")
    words = [f"table_add {table} {control}.{action}", *map(str, keys), "=>", *map(str, values)]
    return " ".join(words)


def shared(entry: Entry, place: int) -> list[str]:
    """What has the job's address and port is for the aggregator, and is charged to ``place`` until a cookie is read.

    The switch answers ARP for its address.
    """
    return [
        _add(f"{INGRESS}.admit.services", "serve", (entry.address, entry.port), (place,)),
        _add(f"{INGRESS}.forward.neighbours", "answer", (entry.address,), (mac_text(entry.mac),)),
    ]


def job(entry: Entry, place: int) -> list[str]:
    """The job itself, its senders and their addresses."""
    ranks = [(rank, member) for rank, member in enumerate(entry.members) if member is not None]
    values = (place, len(entry.members), entry.base, entry.rows - 1, entry.headroom, JOB_GROUP + place)
    return [
        *(_add(f"{EGRESS}.receivers", "send_to", (place, r), (mac_text(m.mac), m.address)) for r, m in ranks),
        *(_add(f"{INGRESS}.admit.senders", "know", (place, r), (m.address, m.ifindex)) for r, m in ranks),
        # last: from here on contributions are summed
        _add(
            f"{INGRESS}.admit.jobs",
            "join",
            (entry.address, entry.port, entry.cookie),
            (*values, mac_text(entry.mac)),
        ),
    ]


def stations(ports: Mapping[bytes, int]) -> list[str]:
    """Static entries: Ethernet address -> port."""
    return [_add(f"{INGRESS}.forward.macs", "send", (mac_text(mac),), (port,)) for mac, port in ports.items()]


def flooding() -> str:
    """What has no static entry goes to all ports but its own."""
    return f"table_set_default {INGRESS}.forward.macs {INGRESS}.forward.flood {FLOOD_GROUP}"


def queues() -> str:
    """Room before each port for a burst of results; bmv2 has 64 packets by default and drops silently."""
    return f"set_queue_depth {QUEUE_PACKETS}"
