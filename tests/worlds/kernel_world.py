"""The worker's program without an interface: the world of ``cases``, and frames fed to it by BPF_PROG_TEST_RUN."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from tailbound.datapath.store import store_of
from tailbound.datapath.xdp import shapes
from tailbound.kernel import load, maps
from tailbound.kernel.events import EventRing
from tailbound.kernel.maps import Sealer, put_key
from tailbound.wire.address import words_of
from tailbound.wire.schema import HEADER_BYTES, WORKER_MAPS, Verdict
from tailbound_lab.bench.frames import frame
from tailbound_lab.bench.program_run import run_xdp

DROP, PASS, TX = 1, 2, 3
#: Ethernet, IP and UDP before the payload.
HEADERS, HEADERS_IPV6 = 42, 62
#: Of the program of a world that is made without sizes; what else is compiled takes them, too, and it is done once.
DEFINES = {"TB_PORT": cases.PORT, "TB_WIDTH": cases.WIDTH, "TB_RESULT_ROWS": cases.RESULT_ROWS, "TB_VLAN": 0}


def ip_of(rank: int, *, ipv6: bool = False) -> str:
    """As in the udp world: ``cases.ip_of`` as far as that goes."""
    return cases.ip_of(rank, ipv6=ipv6) if rank < 250 or ipv6 else f"198.19.0.{rank - 249}"


def address_of(rank: int) -> int:
    """The same as the maps hold it, for IPv4."""
    return words_of(ip_of(rank)).address


class KernelWorld:
    """Maps and program; ``begin`` brings them into the state that ``cases`` begins with, as often as one likes.

    Making one costs a run of the verifier, beginning anew nothing: ``kept.Kept`` hands them from test to test.
    ``source`` is the worker's program or, where a test loads one of its own, empty. The program's own maps are not
    frozen, since they are zeroed from here; ``store`` is read-only where the host's would be.
    """

    def __init__(
        self,
        loader: str,
        width: int = cases.WIDTH,
        source: str = "worker",
        sum_rows: int = cases.SUM_ROWS,
        result_rows: int = cases.RESULT_ROWS,
        vlan: int = 0,
        ipv6: bool = False,
    ) -> None:
        sizes = {"width": width, "sum_rows": sum_rows, "result_rows": result_rows}
        self.maps = maps.create((replace(m, writer="both") for m in WORKER_MAPS), shapes(**sizes), events=True)
        defines = DEFINES | {f"TB_{name.upper()}": value for name, value in sizes.items()} | {"TB_VLAN": vlan}
        defines |= load.of_family(ipv6=ipv6)
        if source == "worker":
            del defines["TB_SUM_ROWS"]  # as it is loaded for a job: compiled once for both
        self.program = -1
        self._loader, self._armed = loader, False
        self._receiver = load.receiver_defines(cases.PORT, width, result_rows, vlan, ipv6=ipv6)
        self.ipv6 = ipv6
        if source:
            names = load.WORKER_MAP_NAMES
            self.program = load.load(f"{source}.bpf.c", f"tb_{source}", defines, names, self.maps.fds, loader)
        seen = {name: array.view() for name, array in self.maps.arrays.items()}
        for map_ in WORKER_MAPS:
            if map_.name in seen:
                seen[map_.name].flags.writeable = map_.writer != "program"
        self.store = store_of(seen)
        self.ring = EventRing(self.maps.fds[maps.EVENTS])
        self.sealer = Sealer(self.maps.fds["slot_locks"], sum_rows)
        self.sum_rows = sum_rows
        self.begin()

    def begin(self, ranks: int = cases.RANKS, registered: Any = None) -> None:
        """As new: maps are zero, events gone, and ``ranks`` registered, or those in ``registered`` of them."""
        for array in self.maps.arrays.values():
            array.view(np.uint8)[...] = 0
        self.ring.drain()
        self.sealer.seal(cases.FIRST_OP - 1, 0, self.sum_rows)
        self.ranks = ranks
        for rank in range(ranks):
            if rank != cases.RANK and (registered is None or rank in registered):
                address, prefix = words_of(ip_of(rank, ipv6=self.ipv6))
                self.store.peers[rank] = (address, 1, prefix, 0)
        own = words_of(ip_of(cases.RANK, ipv6=self.ipv6))._asdict()
        self.control(**cases.control_values(ranks) | {"sum_rows": self.sum_rows} | own)
        self.action = -1
        self.back = b""

    def arm(self) -> None:
        """From now on packets carry tags by ``cases.KEYS``, and the program for these takes them."""
        if not self._armed:
            load.load_tagged(self.maps.fds, self._receiver, self._loader)
            self._armed = True
        for epoch, key in enumerate(cases.KEYS):
            put_key(self.maps.fds["keys"], epoch, key)
        self.control(tagged=1)

    def seal(self, op: int, seq: int, rows: int) -> None:
        """As the host does."""
        self.sealer.seal(op, seq, rows)

    def events(self) -> list[tuple[int, int, int]]:
        """Those that came since the last time: (kind, op, ns)."""
        return self.ring.drain()

    def close(self) -> None:
        self.ring.close()
        if self.program >= 0:
            os.close(self.program)
        self.maps.close()

    def control(self, **values: Any) -> None:
        """Changes fields of the control record."""
        for name, value in values.items():
            self.store.control[name][0] = value

    def frame_of(self, data: bytes, source: int | None = None, port: int = cases.PORT) -> bytes:
        """A frame to this rank, from the sender that ``data`` names unless told otherwise."""
        if source is None:
            named = data[14] if len(data) >= HEADER_BYTES else 1
            source = named if 0 < named < self.ranks else 1
        return frame(data, ip_of(source, ipv6=self.ipv6), ip_of(cases.RANK, ipv6=self.ipv6), cases.PORT, port)

    def run(self, data: bytes, repeat: int = 1, linear: int | None = None) -> int:
        """One frame; returns and keeps the action, and keeps the frame as it is afterwards."""
        result = run_xdp(self.program, data, repeat, linear)
        self.action, self.back = result.action, result.data
        return result.action

    def judge(self, data: bytes, linear: int | None = None) -> tuple[Verdict, int]:
        """One frame: its verdict and its ledger row; it must be counted exactly once."""
        before = self.ledger()
        self.run(data, linear=linear)
        return cases.judged(self.ledger() - before)

    def take(self, data: bytes, source: int | None = None) -> tuple[Verdict, int]:
        """One UDP payload: its verdict and its ledger row."""
        return self.judge(self.frame_of(data, source))

    def ledger(self) -> NDArray[np.uint64]:
        """Counters by sender and verdict, over all CPUs."""
        counts: NDArray[np.uint64] = self.store.ledger["verdict"].reshape(-1, 257, 64).sum(0)
        return counts

    def counted(self) -> dict[Verdict, int]:
        """Counters by verdict that are not zero."""
        return {Verdict(i): int(n) for i, n in enumerate(self.ledger().sum(0)) if n}

    def lanes(self, slot: int, count: int) -> NDArray[np.uint16]:
        """The sums of the first ``count`` codes of a slot, in the order of the codes."""
        lanes = self.store.sums[slot].view(np.uint16).reshape(-1, 2, 4)
        return lanes.transpose(0, 2, 1).reshape(-1)[:count].copy()


def same_memory(kernel: KernelWorld, udp: Any) -> None:
    """Asserts that two datapaths hold the same bytes, times of day aside; a scale may be no number."""
    for name in ("slots", "sums", "results", "result_records", "presence"):
        ours, theirs = (getattr(world.store, name).view(np.uint8) for world in (kernel, udp))
        assert np.array_equal(ours, theirs), name
    for name in ("ops", "peer_states"):
        ours, theirs = getattr(kernel.store, name), getattr(udp.store, name)
        for field in ours.dtype.names:
            if field in ("last_ns", "rtt_ns", "opened_ns", "majority_ns"):
                assert np.array_equal(ours[field] != 0, theirs[field] != 0), f"{name}.{field}"
            else:
                assert np.array_equal(ours[field], theirs[field]), f"{name}.{field}"
    stamps = [world.store.arrivals.view(np.uint32) != 0 for world in (kernel, udp)]  # of each, all fields in turn
    assert np.array_equal(*stamps), f"arrivals: {np.flatnonzero(stamps[0] != stamps[1])}"
