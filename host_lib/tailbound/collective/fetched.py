"""Results of one op that are asked for over the reliable path: what is missing, and what has come (clock-35).

Pure state: nothing here asks or answers, that is ``fetch``.

Request: op label u32, layout tag u16, rows of the owner's list u16, and a bitmap of the places that are missing, as in
REPAIR. Answer: the result packets of those that exist, one after the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.decode import MISSING, own_source
from tailbound.codec.owners import Places
from tailbound.collective.buffers import Buffers
from tailbound.transport.sequence import Place
from tailbound.transport.stage import Why
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, PacketType

ASK = struct.Struct("!IHH")


@dataclass(slots=True)
class Fetch:
    """Fetching for one op.

    Attributes:
        why: what has closed its second half.
        begun, until: when, and when it is decoded at the latest, ns.
        asked: places that are missing, by owner: i64[], rising.
        waiting: owners that have not answered.
        came: owner, places and packets (u8[n, 64 + V]) of every answer.
        flags: of the headers of what has been taken, together (``Flag``).
    """

    why: Why
    begun: int
    until: int
    asked: dict[int, Places]
    waiting: set[int] = field(init=False)
    came: list[tuple[int, Places, NDArray[np.uint8]]] = field(default_factory=list)
    flags: int = 0

    def __post_init__(self) -> None:
        self.waiting = set(self.asked)

    def request(self, place: Place, owner: int) -> bytes:
        """What to ask ``owner`` of the op at ``place``."""
        rows = place.placement.shares[owner]
        bits = np.zeros(rows, np.uint8)
        bits[self.asked[owner]] = 1
        return ASK.pack(place.label, place.layout.tag, rows) + np.packbits(bits).tobytes()

    def arrived(self, place: Place, owner: int, body: bytes | bytearray | None) -> None:
        """``owner`` has answered ``body``, of which rows are taken that were asked for; None: it has nothing."""
        self.waiting.discard(owner)
        stride = HEADER_BYTES + place.layout.shape.results.codes
        if not body or len(body) % stride:
            return
        packets = np.frombuffer(body, np.uint8).reshape(-1, stride)
        heads = _heads(packets)
        right = (heads["type"] == PacketType.RESULT) & (heads["op"] == place.label) & (heads["owner"] == owner)
        right &= (heads["layout"] == place.layout.tag) & (heads["count"] > 0) & np.isin(heads["row"], self.asked[owner])
        right &= heads["map_id"] == place.placement.owner_map.id  # as the kernel does with rows under another map
        packets = packets[right]
        places, first = np.unique(heads["row"][right].astype(np.int64), return_index=True)
        self.came.append((owner, places, packets[first]))

    def settle(self, place: Place, buffers: Buffers) -> tuple[int, NDArray[np.uint8]]:
        """Points rows in ``buffers`` that are missing at what has come.

        Returns:
            How many, and the packets that ``buffers.source`` means: of the own results, and behind them these.
        """
        parts, taken = [buffers.results.packets], 0
        for owner, places, packets in self.came:
            rows = place.placement.rows_of(owner)[places]
            lacking = buffers.source[rows] == MISSING  # others have come meanwhile
            rows, heads = rows[lacking], _heads(packets[lacking])
            buffers.source[rows] = own_source(len(parts[0]) + taken) - np.arange(len(rows))
            buffers.row_scale[rows], buffers.row_exponent[rows] = heads["scale"], heads["exponent"]
            self.flags |= int(np.bitwise_or.reduce(heads["flags"], initial=0))
            parts.append(packets[lacking])
            taken += len(rows)
        return taken, np.concatenate(parts)


def _heads(packets: NDArray[np.uint8]) -> NDArray[np.void]:
    heads: NDArray[np.void] = np.ascontiguousarray(packets[:, :HEADER_BYTES]).view(HEADER_DTYPE).reshape(-1)
    return heads
