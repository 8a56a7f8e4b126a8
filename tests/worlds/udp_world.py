"""The udp datapath without a socket: the world of ``cases``, and packets fed to it as received buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from tailbound.datapath.store import allocate, store_of
from tailbound.datapath.tables import Tables
from tailbound.wire.address import words_of
from tailbound.wire.schema import HEADER_BYTES, UNKNOWN_SENDER, Verdict


class World:
    """Tables in the state that ``cases`` begins with; ``clock`` advances by a microsecond a packet.

    ``allocated`` are arrays in memory of the caller's, ``make`` gives other tables over them.
    """

    def __init__(
        self,
        ranks: int = cases.RANKS,
        width: int = cases.WIDTH,
        registered: Any = None,
        allocated: Any = None,
        *,
        ipv6: bool = False,
        make: Callable[[Any], Any] = Tables,
    ) -> None:
        self.tables = make(allocated or allocate(width, cases.SUM_ROWS, cases.RESULT_ROWS))
        self.store = store_of(self.tables.arrays)
        places = [cases.ip_of(r, ipv6=ipv6) if r < 250 or ipv6 else f"198.19.0.{r - 249}" for r in range(ranks)]
        addresses = [words_of(place) for place in places]
        self.sources = [np.array([*words.prefix, words.address], np.uint32) for words in addresses]
        self.tables.seal(cases.FIRST_OP - 1, 0, cases.SUM_ROWS)
        for rank in range(ranks):
            if rank != cases.RANK and (registered is None or rank in registered):
                self.store.peers[rank]["address"], self.store.peers[rank]["prefix"] = addresses[rank]
                self.store.peers[rank]["live"] = 1
        self.control(**cases.control_values(ranks))
        self.clock = 1_000_000_000
        self.echoes = np.zeros((64, 2), np.uint32)

    def control(self, **values: Any) -> None:
        """Changes fields of the control record."""
        for name, value in values.items():
            self.store.control[name][0] = value

    def arm(self) -> None:
        """From now on packets carry tags by ``cases.KEYS``."""
        for epoch, key in enumerate(cases.KEYS):
            self.tables.put_key(epoch, key)
        self.control(tagged=1)

    def seal(self, op: int, seq: int, rows: int) -> None:
        """As the host does."""
        self.tables.seal(op, seq, rows)

    def events(self) -> list[tuple[int, int, int]]:
        """Those that came since the last time: (kind, op, ns)."""
        return self.tables.take_events()

    def feed(self, data: bytes, source: int, segment: int = 0, marked: bool = False) -> NDArray[np.uint8]:
        """One received buffer from rank ``source``; returns the buffer as it is afterwards, reflections in it."""
        buffer = np.zeros(max(8, -(-len(data) // 8) * 8), np.uint8)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        self.clock += 1000
        self.reflected = self.take_in(buffer, len(data), source, segment, marked)
        return buffer

    def take_in(
        self, buffer: NDArray[np.uint8], length: int, source: int, segment: int = 0, marked: bool = False
    ) -> int:
        """``length`` bytes of ``buffer`` from rank ``source`` at the time of ``clock``; how many probes came back."""
        words, echoes = self.sources[source].ctypes.data, self.echoes
        return self.tables.take_in(
            buffer.ctypes.data, length, segment, words, self.clock, marked, echoes.ctypes.data, len(echoes)
        )

    def take(self, data: bytes, source: int | None = None) -> tuple[Verdict, int]:
        """One packet (from the sender it names unless told otherwise): its verdict and its ledger row."""
        if source is None:
            named = data[14] if len(data) >= HEADER_BYTES else 1
            source = named if 0 < named < len(self.sources) else 1
        before = self.ledger()
        self.feed(data, source)
        return cases.judged(self.ledger() - before)

    def ledger(self) -> NDArray[np.uint64]:
        """Counters by sender and verdict, a copy."""
        return self.store.ledger["verdict"].copy()

    def lanes(self, slot: int, count: int) -> NDArray[np.uint16]:
        """The sums of the first ``count`` codes of a slot, in the order of the codes."""
        lanes = self.store.sums[slot].view(np.uint16).reshape(-1, 2, 4)
        return lanes.transpose(0, 2, 1).reshape(-1)[:count].copy()


assert UNKNOWN_SENDER == 256
