"""A rank's sums at every seal: the codes that its contributors have sent, added up once more (kernel-16).

The codes are taken from packets as they arrive, before the datapath sees them; the datapath notes who contributed.
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
#: Ops of so many steps before the newest that has been sealed may still be sealed.
_KEPT = 4 << OP_INDEX_BITS
#: Doublings by which a contribution of 8 bits is shifted down (codec-9).
_DOWN_MOST = 7


class Sums:
    """Of one rank, with the store of its datapath and the cookie of its job.

    Attributes:
        rows: of others, in sums that were sealed.
    """

    def __init__(self, store: Store, cookie: int) -> None:
        self._store, self._cookie, self.rows = store, cookie, 0
        #: by op and rank: f64[rows, codes + 2], times their weights and scales, and these; in the order of sequences
        #: modulo the next power of two, which goes on where they wrap
        self._said: dict[int, dict[int, NDArray[np.float64]]] = {}
        self._over: set[int] = set()  # ops that have been sealed of late

    def came(self, burst: Burst) -> None:
        """Notes the contributions in ``burst``."""
        if burst.data[_TYPE] != PacketType.CONTRIBUTION:  # a burst is of one type
            return
        count = len(burst.data) // burst.stride
        packets = np.frombuffer(burst.data, np.uint8, count * burst.stride).reshape(count, burst.stride)
        heads = packets[:, :HEADER_BYTES].copy().view(HEADER_DTYPE)[:, 0]
        for op in set(heads["op"].tolist()) - self._over:
            these = heads["op"] == op
            weights, scales = heads["weight"][these].astype(np.float64), heads["exponent"][these] // 4
            codes = np.c_[packets[these, HEADER_BYTES:] * np.ldexp(weights, scales)[:, None], weights, scales]
            shape = 1 << (int(heads["rows"][these][0]) - 1).bit_length(), codes.shape[1]
            said = self._said.setdefault(op, {}).setdefault(burst.source, np.zeros(shape))
            said[heads["seq"][these] % shape[0]] = codes

    def sealed(self, op: int, seq: int, rows: int) -> None:
        """Adds up the ``rows`` sums of ``op`` from row sequence ``seq`` on, and compares."""
        store, said = self._store, self._said.pop(op, {})
        self._said = {other: codes for other, codes in self._said.items() if serial_distance(op, other) < _KEPT}
        self._over = {op} | {other for other in self._over if serial_distance(op, other) < _KEPT}
        seqs = seq + np.arange(rows)
        records = store.slots[seqs & (store.sum_rows - 1)]
        mine = (records["op"] == op) & (records["cookie"] == self._cookie)
        bits = np.where(mine[:, None], records["ranks"], 0).astype(np.uint64)
        contributors = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool)
        (wanted, most), length = np.zeros((2, rows, store.width)), 0
        scale = records["exponent"][:, None] // 4
        for rank in np.flatnonzero(contributors.any(axis=0)).tolist():
            here = contributors[:, rank]
            assert rank in said, f"op {op}: {here.sum()} rows of rank {rank}, which has sent none"
            length = said[rank].shape[1] - 2  # what lies beyond is of other ops
            row, weight, own = np.split(said[rank][seqs[here] % len(said[rank])], [length, length + 1], axis=1)
            part = np.ldexp(row, -scale[here])
            wanted[here, :length] += part
            cut = (part % 1 > 0) | (scale[here] - own > _DOWN_MOST)  # beyond that, rows are taken once in so many
            most[here, :length] += cut * (1 + 2 * weight)
        there = contributors.any(axis=1)
        sums = store.sums[seqs[there] & (store.sum_rows - 1)].view(np.uint16)
        in_order = sums.reshape(len(sums), store.width // 8, 2, 4).swapaxes(2, 3).reshape(sums.shape)
        wrong = (np.abs(in_order - wanted[there]) > most[there])[:, :length].any(axis=1)
        assert not wrong.any(), f"op {op}: {wrong.sum()} of {rows} sums are not those of their contributors"
        self.rows += int(contributors.sum())
