"""The udp datapath without a socket: the world of ``cases``, and packets fed to it as received buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from datapath_world import DatapathWorld
from tailbound.datapath import udp
from tailbound.datapath.protocol import allocate, store_of
from tailbound.wire.address import words_of
from tailbound.wire.schema import HEADER_BYTES


class Tables(udp.Tables):
    """Those of the product, with what they take in from and leave to their datapath."""

    def take_in(self, *packets: Any) -> int:
        return int(self.source.library.fast.tb_take_in(self.address, *packets))  # type: ignore[union-attr]

    def take_controls(self) -> list[bytes]:
        room = HEADER_BYTES + self.arrays["results"].shape[1]
        return self.source.words(room, int(self.state[udp.CONTROL_HEAD] - self.state[udp.CONTROL_TAIL]))


class World(DatapathWorld):
    """Tables in the state that ``cases`` begins with; ``clock`` advances by a microsecond a packet.

    ``make`` gives other tables than the product's.
    """

    def __init__(
        self,
        ranks: int = cases.RANKS,
        width: int = cases.WIDTH,
        registered: Any = None,
        *,
        ipv6: bool = False,
        make: Callable[[Any], Any] = Tables,
    ) -> None:
        self.tables = make(allocate(width, cases.SUM_ROWS, cases.RESULT_ROWS))
        self.arrays, self.ipv6 = self.tables.arrays, ipv6
        self.store = store_of(self.arrays)
        addresses = [words_of(cases.ip_of(rank, ipv6=ipv6)) for rank in range(ranks)]
        self._sources = [np.array([*words.prefix, words.address], np.uint32) for words in addresses]
        self.populate(ranks, registered)
        self.clock = 1_000_000_000
        self.reflected = 0
        self.echoes = np.zeros((64, 2), np.uint32)

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        self.tables.put_key(epoch, key)

    def seal(self, op: int, seq: int, rows: int) -> None:
        self.tables.source.seal(op, seq, rows)

    def events(self) -> list[tuple[int, int, int]]:
        return self.tables.source.take()

    def ledger(self) -> NDArray[np.uint64]:
        return self.store.ledger["verdict"].copy()

    def receive(self, data: bytes, source: int) -> None:
        self.feed(data, source)

    def feed(self, data: bytes, source: int, segment: int = 0, marked: bool = False) -> NDArray[np.uint8]:
        """One received buffer from rank ``source``; returns the buffer as it is afterwards, reflections in it."""
        buffer = np.zeros(max(8, -(-len(data) // 8) * 8), np.uint8)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        self.clock += 1000
        words, echoes = self._sources[source].ctypes.data, self.echoes
        self.reflected = self.tables.take_in(
            buffer.ctypes.data, len(data), segment, words, self.clock, marked, echoes.ctypes.data, len(echoes)
        )
        return buffer
