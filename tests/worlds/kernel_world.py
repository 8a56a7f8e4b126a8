"""The worker's program without an interface: the world of ``cases``, and frames fed to it by BPF_PROG_TEST_RUN."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from datapath_world import DatapathWorld
from tailbound.datapath.protocol import store_of
from tailbound.datapath.xdp import shapes
from tailbound.kernel import load, maps
from tailbound.kernel.events import EventRing
from tailbound.kernel.maps import put_key
from tailbound.wire.schema import WORKER_MAPS, Verdict
from tailbound_lab.bench.frames import frame
from tailbound_lab.bench.program_run import run_xdp

DROP, PASS, TX = 1, 2, 3
#: What the kernel does with a packet by its verdict; all others are dropped.
ACTIONS = {Verdict.CONTROL_PASSED: PASS, Verdict.REFLECTED: TX}
#: Ethernet, IP and UDP before the payload.
HEADERS, HEADERS_IPV6 = 42, 62
#: Of the program of a world that is made without sizes; what else is compiled takes them, too, and it is done once.
DEFINES = {"TB_PORT": cases.PORT, "TB_WIDTH": cases.WIDTH, "TB_RESULT_ROWS": cases.RESULT_ROWS, "TB_VLAN": 0}


class KernelWorld(DatapathWorld):
    """Maps and program; ``begin`` brings them into the state that ``cases`` begins with, as often as one likes.

    Making one costs a run of the verifier, beginning anew nothing: ``kept.Kept`` hands them from test to test.
    The program's own maps are not frozen, since they are zeroed from here; ``store`` is read-only where the host's
    would be.
    """

    def __init__(
        self,
        loader: str,
        width: int = cases.WIDTH,
        result_rows: int = cases.RESULT_ROWS,
        vlan: int = 0,
        ipv6: bool = False,
    ) -> None:
        sizes = {"width": width, "sum_rows": cases.SUM_ROWS, "result_rows": result_rows}
        self.maps = maps.create((replace(m, writer="both") for m in WORKER_MAPS), shapes(**sizes), events=True)
        self.arrays, self.ipv6 = self.maps.arrays, ipv6
        self._loader, self._armed = loader, False
        self._receiver = load.receiver_defines(cases.PORT, width, result_rows, vlan, ipv6=ipv6)
        defines = DEFINES | {"TB_WIDTH": width, "TB_RESULT_ROWS": result_rows, "TB_VLAN": vlan}
        defines |= load.of_family(ipv6=ipv6)
        self.program = load.load("worker.bpf.c", load.WORKER, defines, load.WORKER_MAP_NAMES, self.maps.fds, loader)
        seen = {name: array.view() for name, array in self.arrays.items()}
        for map_ in WORKER_MAPS:
            if map_.name in seen:
                seen[map_.name].flags.writeable = map_.writer != "program"
        self.store = store_of(seen)
        self.ring = EventRing(self.maps.fds[maps.EVENTS], self.maps.fds["slot_locks"], cases.SUM_ROWS)
        self.begin()

    def begin(self, ranks: int = cases.RANKS, registered: Any = None) -> None:
        """As new: maps are zero, events gone, and ``ranks`` registered, or those in ``registered`` of them."""
        for array in self.arrays.values():
            array.view(np.uint8)[...] = 0
        self.ring.take()
        self.populate(ranks, registered)
        self.action = -1
        self.back = b""

    def arm(self) -> None:
        """The program for tags takes packets, too."""
        if not self._armed:
            load.load_tagged(self.maps.fds, self._receiver, self._loader)
            self._armed = True
        super().arm()

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        put_key(self.maps.fds["keys"], epoch, key)

    def seal(self, op: int, seq: int, rows: int) -> None:
        self.ring.seal(op, seq, rows)

    def events(self) -> list[tuple[int, int, int]]:
        return self.ring.take()

    def ledger(self) -> NDArray[np.uint64]:
        counts: NDArray[np.uint64] = self.store.ledger["verdict"].reshape(-1, 257, 64).sum(0)
        return counts

    def close(self) -> None:
        self.ring.close()
        os.close(self.program)
        self.maps.close()

    def frame_of(self, data: bytes, source: int | None = None, port: int = cases.PORT) -> bytes:
        """A frame to this rank, from the sender that ``data`` names unless told otherwise."""
        there = cases.ip_of(self.sender_of(data) if source is None else source, ipv6=self.ipv6)
        return frame(data, there, cases.ip_of(cases.RANK, ipv6=self.ipv6), cases.PORT, port)

    def run(self, data: bytes, repeat: int = 1) -> int:
        """One frame; returns and keeps the action, and keeps the frame as it is afterwards."""
        result = run_xdp(self.program, data, repeat)
        self.action, self.back = result.action, result.data
        return result.action

    def receive(self, data: bytes, source: int) -> None:
        self.run(self.frame_of(data, source))

    def judge(self, data: bytes) -> tuple[Verdict, int]:
        """One frame: its verdict and its ledger row; it must be counted exactly once."""
        before = self.ledger()
        self.run(data)
        return cases.judged(self.ledger() - before)
