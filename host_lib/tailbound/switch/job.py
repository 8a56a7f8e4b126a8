"""Which jobs may share a switch, and where their slots lie. No I/O.

A job has a cookie of its own, which is refused by name where another job has it, and a range of slots of its own.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tailbound.errors import ConfigError
from tailbound.kernel.switch import Entry
from tailbound.transport.config import DEFAULT_PORT
from tailbound.wire.schema import HEADROOM, MAX_RANKS, SWITCH_JOBS

#: Slots of a job: a bucket of 25 MiB of float32 at W = 1408, and more than as much again for the ones behind.
DEFAULT_ROWS = 16384
_MAC = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")


def mac_bytes(text: str) -> bytes:
    """Six bytes of ``02:7b:00:00:00:01``.

    Raises:
        ConfigError: not such an address, or one of a group.
    """
    if not _MAC.fullmatch(text):
        raise ConfigError(f"Ethernet address {text!r}: write for example 02:7b:00:00:00:01")
    found = bytes.fromhex(text.replace(":", ""))
    if found[0] & 1:
        raise ConfigError(f"Ethernet address {text!r} is a group's: give a machine's")
    return found


def ip_text(text: str) -> str:
    """An IP address as it is written shortest.

    Raises:
        ConfigError: none, or one that no rank has: of a group, of nobody, of one link alone, or of IPv6 one that begins
            with four bytes of 0 (``ebpf/ip.h``).
    """
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        raise ConfigError(f"address {text!r} is no IP address: write for example 10.0.0.1 or fd00::1") from None
    if (
        found.is_multicast
        or found.is_unspecified
        or (found.version == 6 and (found.scope_id or found.is_link_local or found.packed[:4] == bytes(4)))
    ):
        raise ConfigError(f"address {text!r} is none that other hosts reach: write for example fd00::1")
    return str(found)


@dataclass(frozen=True)
class RankSpec:
    """A worker: IP address, Ethernet address, and the name of the port towards it."""

    address: str
    mac: str
    port: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", ip_text(self.address))
        mac_bytes(self.mac)


def parse_rank(text: str) -> RankSpec:
    """``ADDRESS,MAC,PORT``.

    Raises:
        ConfigError: not of this form.
    """
    parts = text.split(",")
    if len(parts) != 3:
        raise ConfigError(f"rank {text!r} is not ADDRESS,MAC,PORT: write for example 10.0.0.1,02:7b:00:00:00:01,eth1")
    return RankSpec(ip_text(parts[0].strip()), parts[1].strip().lower(), parts[2].strip())


def parse_station(text: str) -> tuple[str, str]:
    """``MAC,PORT``.

    Raises:
        ConfigError: not of this form.
    """
    mac, comma, port = (part.strip() for part in text.partition(","))
    if not comma or not port:
        raise ConfigError(f"station {text!r} is not MAC,PORT: write for example 02:7b:00:00:00:01,eth1")
    mac_bytes(mac)
    return mac.lower(), port


@dataclass(frozen=True)
class JobSpec:
    """A job as its user asks for it.

    Attributes:
        ranks: the workers in rank order.
        cookie: 1..2**32 - 1.
        port: UDP port.
        rows: slots, a power of two.
        headroom: what the next op's scale leaves above the largest need, in quarter powers of two.
    """

    ranks: tuple[RankSpec, ...]
    cookie: int
    port: int = DEFAULT_PORT
    rows: int = DEFAULT_ROWS
    headroom: int = HEADROOM

    def __post_init__(self) -> None:
        if not 1 <= len(self.ranks) < MAX_RANKS:
            raise ConfigError(f"{len(self.ranks)} workers: give a job of a switch 1..{MAX_RANKS - 1}")
        if not 1 <= self.cookie < 1 << 32:
            raise ConfigError(f"cookie {self.cookie:#x}: give 1..0xffffffff")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"UDP port {self.port}: give 1..65535")
        if self.rows < 1 or self.rows & (self.rows - 1):
            raise ConfigError(f"{self.rows} slots: give a power of two")
        if not 0 <= self.headroom <= 64:
            raise ConfigError(f"headroom {self.headroom}: give 0..64 quarter powers of two")
        for what in ("address", "port"):
            seen: dict[str, int] = {}
            for rank, spec in enumerate(self.ranks):
                twin = seen.setdefault(getattr(spec, what), rank)
                if twin != rank:
                    why = "" if what == "address" else ": a copy of each result leaves by a port, so one worker a port"
                    raise ConfigError(f"ranks {twin} and {rank} have the same {what} {getattr(spec, what)}{why}")


def place(spec: JobSpec, there: Mapping[int, Entry], slots: int) -> tuple[int, int]:
    """Where a job goes in a switch of ``slots`` slots in which the jobs ``there`` are, by place.

    Returns:
        (place of the entry, first slot).

    Raises:
        ConfigError: no room, or something of it is another job's; that one is named.
    """
    for other in there.values():
        if other.cookie == spec.cookie:
            raise ConfigError(
                f"job {spec.cookie:#010x} is in the switch already: remove it first, or draw another cookie"
            )
    free = [number for number in range(SWITCH_JOBS) if number not in there]
    if not free:
        raise ConfigError(f"the switch has {SWITCH_JOBS} jobs already, as many as it takes: remove one")
    if spec.rows > slots:
        raise ConfigError(
            f"{spec.rows} slots for job {spec.cookie:#010x}: the switch has {slots}, ask for at most these"
        )
    taken = sorted((other.base, other.base + other.rows, other.cookie) for other in there.values())
    base = 0
    for low, high, _ in taken:
        if base + spec.rows <= low:
            break
        base = max(base, high)
    if base + spec.rows > slots:
        used = ", ".join(f"{low}..{high - 1} by {cookie:#010x}" for low, high, cookie in taken)
        raise ConfigError(
            f"no {spec.rows} free slots in a row among {slots} (taken: {used}): remove a job or ask for fewer"
        )
    return free[0], base
