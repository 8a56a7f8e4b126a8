"""What a rank's sums must be: at every seal, the codes that contributors have sent, added up once more (kernel-16).

The codes are taken from packets as they arrive, before the datapath sees them; who has contributed, it has noted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.protocol import Store
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, OP_INDEX_BITS, PacketType, serial_distance
from tailbound_lab.simulate.fabric import Burst

#: Where the type is in a header.
_TYPE = HEADER_DTYPE.fields["type"][1]  # type: ignore[index]
#: Where the lanes of eight codes lie in a sum.
_LANES = [0, 2, 4, 6, 1, 3, 5, 7]
#: Ops of so many steps before the newest that has been sealed may still be sealed.
_KEPT = 4 << OP_INDEX_BITS


class Sums:
    """Of one rank.

    Args:
        store: its datapath's.
        cookie: of its job.

    Attributes:
        rows: of others, in sums that were sealed.
    """

    def __init__(self, store: Store, cookie: int) -> None:
        self._store, self._cookie = store, cookie
        #: by op and rank: f64[rows, codes], times their weights and scales; in the order of row sequences modulo the
        #: next power of two, which goes on where sequences wrap
        self._said: dict[int, dict[int, NDArray[np.float64]]] = {}
        self._over: set[int] = set()  # ops that have been sealed of late
        self.rows = 0

    def came(self, burst: Burst) -> None:
        """Notes the contributions in ``burst``."""
        if burst.data[_TYPE] != PacketType.CONTRIBUTION:  # a burst is of one type
            return
        count = len(burst.data) // burst.stride
        packets = np.frombuffer(burst.data, np.uint8, count * burst.stride).reshape(count, burst.stride)
        heads = packets[:, :HEADER_BYTES].copy().view(HEADER_DTYPE)[:, 0]
        for op in set(heads["op"].tolist()) - self._over:
            these = heads["op"] == op
            units = np.ldexp(heads["weight"][these].astype(np.float64), heads["exponent"][these] // 4)
            codes = packets[these, HEADER_BYTES:] * units[:, None]
            said = self._said.setdefault(op, {})
            shape = 1 << (int(heads["rows"][these][0]) - 1).bit_length(), codes.shape[1]
            if burst.source not in said:
                said[burst.source] = np.zeros(shape)
            said[burst.source][heads["seq"][these] % shape[0]] = codes

    def sealed(self, op: int, seq: int, rows: int) -> None:
        """Adds up the ``rows`` sums of ``op`` from row sequence ``seq`` on, and compares."""
        store, said = self._store, self._said.pop(op, {})
        self._said = {other: codes for other, codes in self._said.items() if serial_distance(op, other) < _KEPT}
        self._over = {op} | {other for other in self._over if serial_distance(op, other) < _KEPT}
        slots = (seq + np.arange(rows)) & (store.sum_rows - 1)
        records = store.slots[slots]
        mine = (records["op"] == op) & (records["cookie"] == self._cookie)
        bits = np.where(mine[:, None], records["ranks"], 0).astype(np.uint64)
        contributors = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool)
        wanted, length = np.zeros((rows, store.width)), 0
        for rank in np.flatnonzero(contributors.any(axis=0)).tolist():
            here = contributors[:, rank]
            assert rank in said, f"op {op}: {here.sum()} rows of rank {rank}, which has sent none"
            codes = said[rank][(seq + np.arange(rows)) % len(said[rank])]
            length = codes.shape[1]  # what lies beyond is of other ops
            wanted[here, :length] += codes[here]
        there = contributors.any(axis=1)
        found = store.sums[slots[there]].view(np.uint16).reshape(-1, store.width // 8, 8)
        sums = np.ldexp(wanted[there], -(records["exponent"][there, None] // 4)).reshape(found.shape)[:, :, _LANES]
        cut = np.where(sums % 1 > 0, records["count"][there, None, None], 0)  # of scales too far apart less is kept
        wrong = (np.abs(found - sums) > cut)[:, : length // 8].any(axis=(1, 2))
        assert not wrong.any(), f"op {op}: {wrong.sum()} of {rows} sums are not those of their contributors"
        self.rows += int(contributors.sum())
