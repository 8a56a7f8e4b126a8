"""A rank that other ranks request rows of (``host_lib/core/answers.c``)."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from op_world import COOKIE, OpWorld, launched
from packed import parse
from queue_world import STRIDE, Line
from tailbound.collective.buffers import Given
from tailbound.collective.op import Op
from tailbound.kernel.core import address, core
from tailbound.transport.sequence import OwnerMap, Sequence
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, VERSION, Flag, PacketType
from tailbound.wire.tag import NO_KEY

RANKS, TAG = 4, 7
#: Bytes per second.
PACE = 1e8


class Answers(OpWorld):
    """Rank 0, which has handed out results of ops that are over, and gives contributions of one in flight."""

    def __init__(self, sock: UdpSocket) -> None:
        super().__init__(RANKS)
        self.line = Line([sock])
        self.repairs = self.known.repairs
        self.line.queue.pacer.link.own = PACE * (RANKS - 1)
        self.voice = self.speaks(self.line.queue.line, 1408, self.line.queue.pacer.largest(STRIDE))
        self._kept: list[Given] = []
        self._seen: defaultdict[int, int] = defaultdict(int)

    def keep(self, label: int, rows: int, lacking: tuple[int, ...] = ()) -> None:
        """``rows`` results of an op, but for some without a contributor."""
        kept = Given(rows, STRIDE - HEADER_BYTES, [])
        kept.made.usable[:] = 1
        kept.made.usable[list(lacking)] = 0
        named(kept.made.packets, label, np.arange(rows))
        place: Any = SimpleNamespace(label=label, tag=TAG)
        kept.belong(place, NO_KEY)
        kept.after, self.terms.given = self.terms.given, ctypes.addressof(kept)
        self._kept.append(kept)

    def enter(self, *, gives: bool = True) -> Op:
        """An op in flight, whose contributions have been sent."""
        op = launched(Sequence(RANKS, OwnerMap(0, tuple(range(RANKS)))), RANKS, entries=64 * 256)
        named(op.buffers.contributions.memory, op.label, op.buffers.place)
        if gives:
            op.given = op.buffers.stamp.packets
        self.fast.tb_enter(self.terms.pointer, ctypes.addressof(op))
        return op

    def ask(self, label: int, asker: int, places: Any, rows: int, *, half: bool = False, tag: int = TAG) -> bool:
        """A request; whether it is taken. ``half``: for contributions."""
        label &= 0xFFFFFFFF
        return all(
            self.fast.tb_note_request(ctypes.addressof(self.voice), label, asker, half, tag, row, rows, body, len(body))
            for row, body in bitmaps(np.array(places, np.int64), 1408)
        )

    def answer(self, now: int = 0) -> list[tuple[int, int, list[int]]]:
        """Sends rows; op, asker and places of those that are gone, as the askers are told."""
        self.fast.tb_answer(ctypes.addressof(self.voice), now)
        self.line.queue.pump(now)
        said, self.line.kernel.single = [parse(data) for _, data in self.line.kernel.single], []
        return [(int(h["op"][0]), int(h["owner"][0]), (int(h["row"][0]) + bits_of(b)).tolist()) for h, b in said]

    def sent(self) -> list[tuple[int, int, list[int]]]:
        """Rows that have left since the last call, burst by burst: op, rank and places."""
        found = []
        for rank, count in self.line.taken:
            data = bytes(self.line.kernel.data[rank])
            at, self._seen[rank] = self._seen[rank], self._seen[rank] + count
            heads = [parse(data[i * STRIDE :][:STRIDE]) for i in range(at, at + count)]
            assert all(head and head[0]["flags"][0] & Flag.REPEAT for head in heads), "a repeated row has a right check"
            found.append((int(heads[0][0]["op"][0]), rank, [int(head[0]["row"][0]) for head in heads]))
        self.line.taken.clear()
        return found


def bitmaps(places: NDArray[np.int64], width: int) -> list[tuple[int, bytes]]:
    """First place and body of the packets that say ``places``, which rise, of at most ``width`` bytes each."""
    out, body, size = [], ctypes.create_string_buffer(width), ctypes.c_uint32()
    while len(places):
        taken = core().fast.tb_bitmap(address(places), len(places), body, width, ctypes.byref(size))
        out.append((int(places[0]), body.raw[: size.value]))
        places = places[taken:]
    return out


def bits_of(body: bytes) -> NDArray[np.int64]:
    """Which are set."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(body, np.uint8)))


def named(packets: NDArray[np.uint8], label: int, rows: NDArray[Any]) -> None:
    """Headers that say the op and the place."""
    heads = np.zeros(len(packets), HEADER_DTYPE)
    heads["version"], heads["type"], heads["cookie"] = VERSION, PacketType.RESULT, COOKIE
    heads["op"], heads["row"] = label, rows
    packets[:, :HEADER_BYTES] = heads.view(np.uint8).reshape(len(packets), HEADER_BYTES)
