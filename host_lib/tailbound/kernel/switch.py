"""The switch's programs and maps: sums on the ports, copies by a device map for each job.

What packets mean is in ``xdp_programs/aggregate.h``; this module makes maps, loads, attaches, and writes job entries in
the order in which the program may read them. Which jobs may be is decided above (``tailbound.switch``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailbound.errors import ConfigError
from tailbound.kernel import load, maps, syscalls
from tailbound.wire.address import Words, text_of, words_of
from tailbound.wire.packets import layout
from tailbound.wire.schema import MAX_RANKS, SWITCH_JOBS, SWITCH_MAPS, UNKNOWN_SENDER, VERDICTS

SWITCH, SWITCH_OUT = "tb_switch", "tb_switch_out"
#: The map of the jobs' device maps.
DEVICES = "switch_devices"
MAP_NAMES = (*(m.name for m in SWITCH_MAPS), DEVICES)
#: Slots of the port tables at least and at most; one for each port, by its index.
_PORTS_LEAST, _PORTS_MOST = 64, 1 << 14


@dataclass(frozen=True)
class Sizes:
    """What programs and maps are made for.

    Attributes:
        width: W, codes of the widest row.
        slots: of all jobs together.
        ports: size of the port tables, a power of two.
        cpus: rows of counters.
    """

    width: int
    slots: int
    ports: int
    cpus: int = field(default_factory=maps.possible_cpus)

    @property
    def shapes(self) -> dict[str, maps.Shape]:
        """Dtype and shape of every map of the switch."""
        sizes = {"width": self.width, "slots": self.slots, "ports": self.ports, "cpus": self.cpus}
        return {m.name: layout(m, **sizes) for m in SWITCH_MAPS}


def port_table(indices: Sequence[int]) -> int:
    """The smallest table in which every port's index has a place of its own.

    Raises:
        ConfigError: there is none of a sensible size.
    """
    size = _PORTS_LEAST
    while len({index % size for index in indices}) < len(indices):
        size *= 2
        if size > _PORTS_MOST:
            raise ConfigError(f"ports with the indices {sorted(indices)} fit no table: give each once")
    return size


@dataclass(frozen=True)
class Member:
    """A rank of a job entry: IP address, Ethernet address (6 bytes), index of the port towards it."""

    address: str
    mac: bytes
    ifindex: int


@dataclass(frozen=True)
class Entry:
    """A job entry as the program reads it; ``members`` by rank, None where nobody is registered."""

    cookie: int
    address: str
    mac: bytes
    port: int
    base: int
    rows: int
    headroom: int
    members: tuple[Member | None, ...]


def _text_of(record: Any) -> str:
    """The address in a record, in text; empty: nobody is registered."""
    words = Words(int(record["address"]), tuple(record["prefix"].tolist()))
    return text_of(words) if words != Words(0) else ""


class Switch:
    """Maps and descriptors, made or opened; closing it leaves what is pinned or attached by a pinned link.

    Args:
        sizes: what the maps were made for.
        held: the maps, arrays mapped.
        program, out: descriptors of the two programs, -1 where they are not at hand.
    """

    def __init__(self, sizes: Sizes, held: maps.Maps, program: int, out: int) -> None:
        self.sizes = sizes
        self.maps = held
        self.program = program
        self.out = out

    #: of its results, see ``transport.config.FORMS``
    form = "mean"

    @property
    def slots(self) -> int:
        """Of all jobs together."""
        return self.sizes.slots

    @property
    def width(self) -> int:
        """Codes of the widest row."""
        return self.sizes.width

    def alive(self) -> bool:
        """Whether it runs: it does as long as its programs are attached."""
        return True

    @classmethod
    def make(cls, sizes: Sizes, loader: str = "auto", *, ipv6: bool = False) -> Switch:
        """Makes maps and loads the programs, for jobs over IPv6 or over IPv4.

        Raises:
            CapabilityError: compiler, privilege or kernel feature missing.
        """
        made = cls(sizes, maps.create(SWITCH_MAPS, sizes.shapes, events=False), -1, -1)
        try:
            inner = device_map(1)
            try:
                made.maps.fds[DEVICES] = syscalls.map_create(
                    syscalls.MAP_TYPE_ARRAY_OF_MAPS, 4, 4, SWITCH_JOBS, name=DEVICES, inner=inner
                )
            finally:
                os.close(inner)
            defines = {"TB_WIDTH": sizes.width, "TB_PORTS": sizes.ports} | load.of_family(ipv6=ipv6)
            made.program = load.load("switch.bpf.c", SWITCH, defines, MAP_NAMES, made.maps.fds, loader)
            made.out = load.load(
                "switch_out.bpf.c", SWITCH_OUT, defines, MAP_NAMES, made.maps.fds, loader, "xdp/devmap"
            )
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Closes descriptors; may be called twice."""
        self.maps.close(self.program, self.out)
        self.program = self.out = -1

    # -- job entries --------------------------------------------------------------------------------

    def put(self, place: int, entry: Entry) -> None:
        """Writes a job entry: everything it says first, its name last. Call it where the ports are.

        Raises:
            OSError: the kernel refuses a port.
        """
        arrays = self.maps.arrays
        self.drop(place)
        ranks = arrays["switch_ranks"][place * MAX_RANKS : (place + 1) * MAX_RANKS]
        out = arrays["switch_out"][place * self.sizes.ports : (place + 1) * self.sizes.ports]
        for rank, member in enumerate(entry.members):
            if member is not None:
                address, prefix = words_of(member.address)
                value = (address, member.ifindex, np.frombuffer(member.mac, np.uint8), rank, prefix, 0)
                ranks[rank] = value
                out[member.ifindex % self.sizes.ports] = value
        job = arrays["switch_jobs"][place]
        job["ranks"], job["base"], job["mask"] = len(entry.members), entry.base, entry.rows - 1
        job["headroom"], job["port"] = entry.headroom, socket.htons(entry.port)
        job["address"], job["prefix"] = words_of(entry.address)
        job["mac"] = np.frombuffer(entry.mac, np.uint8)
        devices = device_map(len(entry.members))
        try:
            for rank, member in enumerate(entry.members):
                if member is not None:
                    port = struct.pack("=Ii", member.ifindex, self.out)
                    syscalls.map_update(devices, struct.pack("=I", rank), port)
            syscalls.map_update(self.maps.fds[DEVICES], struct.pack("=I", place), struct.pack("=i", devices))
        finally:
            os.close(devices)
        directory = arrays["switch_directory"][0]
        directory["address"][place], directory["port"][place] = job["address"], job["port"]
        directory["prefix"][3 * place : 3 * place + 3] = job["prefix"]
        directory["cookie"][place] = entry.cookie

    def drop(self, place: int) -> None:
        """Removes a job entry, its name first; when this returns, no packet is summed under it any more.

        Its slots keep its cookie: for the next job there they are another job's.
        """
        arrays = self.maps.arrays
        arrays["switch_directory"]["cookie"][0, place] = 0
        with contextlib.suppress(FileNotFoundError):
            syscalls.map_delete(self.maps.fds[DEVICES], struct.pack("=I", place))
        arrays["switch_directory"]["address"][0, place] = 0
        arrays["switch_directory"]["prefix"][0, 3 * place : 3 * place + 3] = 0
        arrays["switch_ranks"][place * MAX_RANKS : (place + 1) * MAX_RANKS] = 0
        arrays["switch_out"][place * self.sizes.ports : (place + 1) * self.sizes.ports] = 0

    def entries(self) -> dict[int, Entry]:
        """The job entries by place."""
        arrays = self.maps.arrays
        found = {}
        for place, cookie in enumerate(arrays["switch_directory"]["cookie"][0].tolist()):
            if not cookie:
                continue
            job = arrays["switch_jobs"][place]
            ranks = arrays["switch_ranks"][place * MAX_RANKS : place * MAX_RANKS + int(job["ranks"])]
            members = tuple(
                Member(address, r["mac"].tobytes(), int(r["ifindex"])) if (address := _text_of(r)) else None
                for r in ranks
            )
            found[place] = Entry(
                cookie=cookie,
                address=_text_of(job),
                mac=job["mac"].tobytes(),
                port=socket.ntohs(int(job["port"])),
                base=int(job["base"]),
                rows=int(job["mask"]) + 1,
                headroom=int(job["headroom"]),
                members=members,
            )
        return found

    # -- counters -----------------------------------------------------------------------------------

    def ledger(self, place: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Counters of a job, u64[senders and unknown, verdicts], over all CPUs."""
        rows = self.maps.arrays["switch_ledger"]["verdict"]
        shape = (self.sizes.cpus, SWITCH_JOBS, UNKNOWN_SENDER + 1, VERDICTS)
        out: np.ndarray[Any, np.dtype[np.uint64]] = rows.reshape(shape)[:, place].sum(0)
        return out

    def rows_of(self, entry: Entry) -> tuple[int, int]:
        """Rows of a job in its slots: final ones, and open ones."""
        records = self.maps.arrays["switch_slots"][entry.base : entry.base + entry.rows]
        own = records[records["cookie"] == entry.cookie]
        final = int(np.count_nonzero(own["final"]))
        return final, len(own) - final

    def port_counters(self, ifindex: int) -> Mapping[str, int]:
        """Counters of a port over all CPUs."""
        rows = self.maps.arrays["switch_ports"].reshape(self.sizes.cpus, self.sizes.ports)[
            :, ifindex % self.sizes.ports
        ]
        return {str(name): int(rows[name].sum()) for name in rows.dtype.names or ()}


def device_map(entries: int) -> int:
    """An empty device map, by rank, with a program for each copy; tight, since a broadcast walks all of it."""
    return syscalls.map_create(syscalls.MAP_TYPE_DEVMAP, 4, 8, entries, name="tb_switch_dev")
