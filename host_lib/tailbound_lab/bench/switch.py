"""What one packet costs in the switch's program: the rows ``switch-...`` of ``tailbound bench kernel``.

``xdp_programs/switch_bench.bpf.c`` turns packets as ``bench.bpf.c`` does for the worker. The mean of a row has no row
of its own, since no packet brings nothing else: it is what ``switch-flush``, in which every packet begins a row and
releases it, takes more than ``switch-store``, with the result's header and its new check.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailbound.errors import TailboundError
from tailbound.kernel import interfaces, load, syscalls
from tailbound.kernel.frames import frame
from tailbound.kernel.switch import MAP_NAMES, Entry, Member, Sizes, Switch
from tailbound.wire import schema
from tailbound.wire.packets import header, packed, packet
from tailbound.wire.schema import Flag, PacketType, Verdict

__all__ = ["CASES", "TURN_NOT", "TURN_RANK", "TURN_ROW", "Case", "Turntable"]

PORT, WIDTH, SLOTS = 7000, 1408, 64
_SWITCH, _WORKER, _COOKIE = "198.18.252.1", "198.18.0.1", 0x7A11
#: How the turntable moves packets on: not at all, rank by rank and row by row, row by row.
TURN_NOT, TURN_RANK, TURN_ROW = range(3)
_TURN = "switch_turn"
_TURN_BYTES = schema.HEADER_BYTES + 16


@dataclass(frozen=True)
class Case:
    """One row: how packets are turned and flagged, and the verdicts that every repeat must have."""

    name: str
    turn: int
    verdicts: tuple[Verdict, ...]
    ranks: int = 2
    flags: int = 0
    codes: int = WIDTH
    first: int = 0  #: packets before the clock starts
    port: int = PORT


_SUMMED = (Verdict.STORED, Verdict.ADDED)
CASES = (
    Case("switch-foreign", TURN_NOT, (), port=PORT + 1),
    Case("switch-store", TURN_ROW, (Verdict.STORED,)),
    Case("switch-add", TURN_RANK, _SUMMED, ranks=255),
    Case("switch-row-3", TURN_RANK, _SUMMED, ranks=3),
    Case("switch-row-4", TURN_RANK, _SUMMED, ranks=4),
    Case("switch-row-8", TURN_RANK, _SUMMED, ranks=8),
    Case("switch-flush", TURN_ROW, (Verdict.STORED,), flags=Flag.FLUSH),
    Case("switch-refused", TURN_NOT, (Verdict.DUPLICATE,), first=1),
    Case("switch-answer", TURN_NOT, (Verdict.ANSWERED,), flags=Flag.FLUSH, first=1),
)


class Turntable:
    """The switch with the turntable's program in front; one job of as many ranks as a case says."""

    def __init__(self, loader: str, slots: int = SLOTS, width: int = WIDTH) -> None:
        self.loader = loader
        self.switch = Switch.make(Sizes(width, slots, 64), loader)
        fds = self.switch.maps.fds
        try:
            cpus = interfaces.possible_cpus()
            fds[_TURN] = syscalls.map_create(syscalls.MAP_TYPE_ARRAY, 4, _TURN_BYTES, cpus, name=_TURN)
            defines = {"TB_WIDTH": width, "TB_PORTS": 64}
            names = (*MAP_NAMES, _TURN)
            self.program = load.load("switch_bench.bpf.c", "tb_switch_bench", defines, names, fds, loader)
        except BaseException:
            self.switch.close()
            raise
        self._slots, self._seq = slots, 0

    def close(self) -> None:
        """Closes programs and maps."""
        os.close(self.program)
        self.switch.close()

    def job(self, ranks: int, ports: tuple[int, ...] = (1,)) -> None:
        """A job of ``ranks`` workers, all at one address; copies go to the interfaces with the indices ``ports``."""
        members = tuple(Member(_WORKER, bytes(6), ports[rank % len(ports)]) for rank in range(max(ranks, len(ports))))
        self.switch.put(0, Entry(_COOKIE, _SWITCH, bytes(6), PORT, 0, self._slots, 2, members))
        self.switch.maps.arrays["switch_ranks"]["ifindex"] = 1  # the loopback interface, by which test runs come in

    def packet(self, sender: int, ranks: int, seq: int, flags: int = 0, codes: int = WIDTH) -> bytes:
        """A contribution; all have the same codes."""
        head = header(
            type=PacketType.CONTRIBUTION, flags=flags, cookie=_COOKIE, op=1 << schema.OP_INDEX_BITS, sender=sender,
            owner=ranks, seq=seq, rows=schema.MAX_RANKS, need=-3, exponent=-1, count=ranks,
        )  # fmt: skip
        return packet(head, np.random.default_rng(7).integers(1, 256, codes, np.uint8).tobytes())

    def turn(self, cpu: int, data: bytes, turn: int, ranks: int) -> bytes:
        """Sets what the packets of a CPU become, from ``data`` on; the frame to repeat."""
        after = struct.pack("=IIII", packed(_WORKER), packed(_SWITCH), turn, ranks)
        value = data[: schema.HEADER_BYTES] + after
        syscalls.map_update(self.switch.maps.fds[_TURN], struct.pack("=I", cpu), value)
        return frame(data, _WORKER, _SWITCH, PORT, PORT)

    def fresh(self) -> int:
        """A row sequence that no packet had yet, far from those before."""
        self._seq += 1 << 20
        return self._seq

    def counted(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Ledger by verdict, over all senders and CPUs."""
        out: np.ndarray[Any, np.dtype[np.uint64]] = self.switch.ledger(0).sum(0)
        return out

    def run(self, case: Case, repeats: int) -> dict[str, Any]:
        """One row.

        Raises:
            TailboundError: not every repeat had its verdict.
        """
        self.job(case.ranks)
        cpu = min(os.sched_getaffinity(0))
        home = os.sched_getaffinity(0)
        data = self.packet(0, case.ranks, self.fresh(), case.flags, case.codes)
        shown = self.turn(cpu, data, case.turn, case.ranks)
        if case.port != PORT:
            shown = frame(data, _WORKER, _SWITCH, PORT, case.port)
        os.sched_setaffinity(0, {cpu})
        try:
            if case.first:
                syscalls.run_xdp(self.program, shown, case.first)
            before = self.counted()
            duration = syscalls.run_xdp(self.program, shown, repeats).duration_ns
        finally:
            os.sched_setaffinity(0, home)
        after = self.counted() - before
        if case.verdicts and int(sum(after[v] for v in case.verdicts)) != repeats:
            named = {Verdict(i).name: int(n) for i, n in enumerate(after) if n}
            raise TailboundError(
                f"bench {case.name} ({self.loader}): not {repeats} packets counted, but {named}; run it again"
            )
        return {
            "name": case.name,
            "loader": self.loader,
            "codes": case.codes,
            "ns_per_packet": float(duration),
            "summed": int(after[Verdict.STORED] + after[Verdict.ADDED]),
            "repeats": repeats,
        }
