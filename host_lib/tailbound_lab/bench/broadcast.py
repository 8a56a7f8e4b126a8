"""What copies of a result cost: rows ``switch-broadcast-N`` and ``switch-copy`` of ``tailbound bench kernel``.

Every packet releases a row, in BPF_PROG_TEST_RUN with live frames, so that its copies really leave, by N veths of two
namespaces of their own. Their far ends drop what they get in XDP, on the same CPU: a copy's cost is that of cloning,
addressing and sending it, and of its being taken and dropped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyroute2 import IPRoute

from tailbound.errors import TailboundError
from tailbound.kernel import syscalls
from tailbound.kernel.attach import attach
from tailbound.kernel.interfaces import index_of
from tailbound.wire.schema import Flag, Verdict
from tailbound_lab.bench.stranger import DROP
from tailbound_lab.bench.switch import TURN_ROW, Turntable
from tailbound_lab.lab import namespaces, owner

__all__ = ["PORTS", "Broadcast", "copy_rows"]

PORTS = (1, 4, 8)


def _name(number: int) -> str:
    return f"out{number}"


def _build(other: str) -> None:
    with IPRoute() as ip:
        for number in range(max(PORTS)):
            peer = {"ifname": _name(number), "net_ns_fd": other}
            ip.link("add", ifname=_name(number), kind="veth", peer=peer)
            ip.link("set", index=ip.link_lookup(ifname=_name(number))[0], state="up")


def _take(program: int) -> list[int]:
    with IPRoute() as ip:
        for number in range(max(PORTS)):
            ip.link("set", index=ip.link_lookup(ifname=_name(number))[0], state="up")
    return [attach(program, _name(number)) for number in range(max(PORTS))]


@contextlib.contextmanager
def _wires() -> Iterator[str]:
    """A namespace with as many veths as there can be copies, whose far ends drop; yields its name."""
    prefix = owner.new_prefix()
    here, there = f"{prefix}-s", f"{prefix}-w0"
    links: list[int] = []
    try:
        namespaces.create(here)
        namespaces.create(there)
        namespaces.call(here, _build, there, patient=True)
        program = syscalls.prog_load(DROP, name="tb_drop")
        try:
            links += namespaces.call(there, _take, program, patient=True)
        finally:
            os.close(program)
        yield here
    finally:
        for link in links:
            os.close(link)
        for name in (here, there):
            namespaces.remove(name)


def copy_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one more copy costs, by loader: from finished rows, since the best of differences is noise."""
    found = {(row["name"], row["loader"]): row for row in rows}
    out = []
    for loader in dict.fromkeys(row["loader"] for row in rows):
        few, many = (found[f"switch-broadcast-{ports}", loader] for ports in (PORTS[0], PORTS[-1]))
        more = {
            name: (many[name] - few[name]) / (PORTS[-1] - PORTS[0]) for name in ("ns_per_packet", "ns_median")
        }  # fmt: skip
        out.append(dict(many) | {"name": "switch-copy", "summed": 0} | more)
    return out


class Broadcast:
    """Measures with turntables, by loader; a context manager, for the namespaces it makes.

    Raises:
        CapabilityError: no privilege, or no namespaces or veths here.
    """

    def __init__(self, tables: dict[str, Turntable]) -> None:
        self._tables = tables
        self._stack = contextlib.ExitStack()
        self._here = ""

    def __enter__(self) -> Broadcast:
        self._here = self._stack.enter_context(_wires())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, loader: str, repeats: int) -> list[dict[str, Any]]:
        """One row for each number of ports.

        Raises:
            TailboundError: not every packet released a row, or not every copy left.
        """
        return [namespaces.call(self._here, self._one, loader, ports, repeats) for ports in PORTS]

    def _one(self, loader: str, ports: int, repeats: int) -> dict[str, Any]:
        table = self._tables[loader]
        indices = tuple(index_of(_name(number)) for number in range(ports))
        table.job(ports, indices)
        cpu = min(os.sched_getaffinity(0))
        data = table.packet(0, ports, table.fresh(), Flag.FLUSH)
        frame = table.turn(cpu, data, TURN_ROW, ports)
        os.sched_setaffinity(0, {cpu})  # a thread of its own, which ends after this
        before, left = table.counted(), self._left(table, indices)
        duration = syscalls.run_xdp_live(table.program, frame, repeats)
        stored = int((table.counted() - before)[Verdict.STORED])
        copies = self._left(table, indices) - left
        if (stored, copies) != (repeats, repeats * ports):
            raise TailboundError(
                f"bench broadcast ({loader}): {stored} rows and {copies} copies of {repeats} x {ports}; "
                "run it again on a quiet machine"
            )
        return {
            "name": f"switch-broadcast-{ports}",
            "loader": loader,
            "codes": len(data) - 64,
            "ns_per_packet": float(duration),
            "summed": stored,
            "repeats": repeats,
        }

    def _left(self, table: Turntable, indices: tuple[int, ...]) -> int:
        return sum(table.switch.port_counters(index)["results"] for index in indices)
