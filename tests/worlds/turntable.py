"""The switch's program behind a turntable (``switch_bench.bpf.c``), which moves packets from row to row."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from tailbound.kernel import load, syscalls
from tailbound.kernel.maps import possible_cpus
from tailbound.kernel.switch import MAP_NAMES, Entry, Member, Sizes, Switch
from tailbound.wire import schema
from tailbound.wire.address import words_of
from tailbound.wire.packets import header, packet
from tailbound.wire.schema import PacketType
from tailbound_lab.bench.frames import frame

PORT, WIDTH, SLOTS = 7000, 1408, 64
_SWITCH, _WORKER, _COOKIE = "198.18.252.1", "198.18.0.1", 0x7A11
#: How the turntable moves packets on: not at all, rank by rank and row by row, row by row.
TURN_NOT, TURN_RANK, TURN_ROW = range(3)
_TURN = "switch_turn"
_TURN_BYTES = schema.HEADER_BYTES + 16


class Turntable:
    """The switch with the turntable's program in front; one job of as many ranks as a case says."""

    def __init__(self, loader: str, slots: int = SLOTS, width: int = WIDTH) -> None:
        self.loader = loader
        self.switch = Switch.make(Sizes(width, slots, 64), loader)
        fds = self.switch.maps.fds
        try:
            cpus = possible_cpus()
            fds[_TURN] = syscalls.map_create(syscalls.MAP_TYPE_ARRAY, 4, _TURN_BYTES, cpus, name=_TURN)
            defines = {"TB_WIDTH": width, "TB_PORTS": 64}
            names = (*MAP_NAMES, _TURN)
            self.program = load.load("switch_bench.bpf.c", "tb_switch_bench", defines, names, fds, loader)
        except BaseException:
            self.switch.close()
            raise
        self._slots = slots

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
            owner=ranks, seq=seq, rows=schema.MAX_RANKS, need=-3, exponent=-1, weight=1, count=ranks,
        )  # fmt: skip
        return packet(head, np.random.default_rng(7).integers(1, 256, codes, np.uint8).tobytes())

    def turn(self, cpu: int, data: bytes, turn: int, ranks: int) -> bytes:
        """Sets what the packets of a CPU become, from ``data`` on; the frame to repeat."""
        after = struct.pack("=IIII", words_of(_WORKER)[0], words_of(_SWITCH)[0], turn, ranks)
        value = data[: schema.HEADER_BYTES] + after
        syscalls.map_update(self.switch.maps.fds[_TURN], struct.pack("=I", cpu), value)
        return frame(data, _WORKER, _SWITCH, PORT, PORT)

    def counted(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Ledger by verdict, over all senders and CPUs."""
        out: np.ndarray[Any, np.dtype[np.uint64]] = self.switch.ledger(0).sum(0)
        return out
