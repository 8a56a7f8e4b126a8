"""The kernel's records of a job: what the datapath writes of ops and peers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.records import Ring
from tailbound.codec.scratch import readonly
from tailbound.datapath.protocol import Store
from tailbound.wire import schema
from tailbound.wire.schema import Verdict, op_slot

#: Serial distances below this are those of labels that are not older.
_AHEAD = 1 << 31


class Records:
    """What the datapath writes of a job. Read only.

    Args:
        store: its arrays.
        cookie: of the job; what has another one is of another job.
    """

    def __init__(self, store: Store, cookie: int) -> None:
        self._ledger, self._cookie = store.ledger["verdict"], cookie
        # numba compiles for read-only and writable arrays apart: the same views for every datapath
        self.ring = Ring(readonly(store.sums), readonly(store.slots))
        self.peer_states, self.result_rows = readonly(store.peer_states), readonly(store.results)
        self.ops, self.arrivals = readonly(store.ops), readonly(store.arrivals)
        # a field is read out of a column in a fifth of the time that reading it out of a record takes
        states = self.peer_states
        self._cookies, self._contributed, self._published = states["cookie"], states["contributed"], states["published"]
        self._newest = states["newest"]
        self._labels, self._op_cookies = self.ops["op"], self.ops["cookie"]
        #: pinned maps outlive jobs, and only the program writes the ledger
        self._before = np.broadcast_to(np.uint64(), (schema.MAX_RANKS + 1, schema.VERDICTS))

    def of(self, label: int) -> np.void | None:
        """The record of an op, or None while no packet has named it."""
        slot = op_slot(label)
        if self._labels.item(slot) == label and self._op_cookies.item(slot) == self._cookie:
            found: np.void = self.ops[slot]
            return found
        return None

    def all_contributed(self, ranks: Iterable[int], label: int) -> list[int]:
        """Those of ``ranks`` that have fully sent their contributions to ops up to ``label``."""
        return self._risen(self._contributed, ranks, label)

    def all_published(self, ranks: Iterable[int], label: int) -> list[int]:
        """Those of ``ranks`` that have fully sent their results of ops up to ``label``."""
        return self._risen(self._published, ranks, label)

    def _risen(self, marks: NDArray[np.uint32], ranks: Iterable[int], label: int) -> list[int]:
        mark, its, cookie = marks.item, self._cookies.item, self._cookie
        return [p for p in ranks if (mark(p) - label) & 0xFFFFFFFF < _AHEAD and its(p) == cookie]

    def newest(self, rank: int) -> int | None:
        """The newest label that ``rank`` has named; None: none yet."""
        return self._newest.item(rank) if self._cookies.item(rank) == self._cookie else None

    def verdicts(self, senders: list[int] | slice = slice(None)) -> NDArray[np.uint64]:
        """The ledger of this job, summed over cpus: u64[257, VERDICTS], by sender and verdict; or some lines of it."""
        ledger = self._ledger.reshape(-1, schema.MAX_RANKS + 1, schema.VERDICTS)
        counts: NDArray[np.uint64] = ledger[:, senders].sum(axis=0) - self._before[senders]
        return counts

    def count(self, sender: int, *verdicts: Verdict) -> int:
        """A few cells of the ledger, summed over cpus and ``verdicts``: a whole line of it takes ten times as long."""
        lines = range(sender, len(self._ledger), schema.MAX_RANKS + 1)
        cells: int = sum([self._ledger.item(line, verdict) for line in lines for verdict in verdicts])
        return cells - sum([self._before.item(sender, verdict) for verdict in verdicts])

    def reset(self) -> None:
        """What has been counted until now was of other jobs."""
        if (counted := self.verdicts()).any():
            self._before = self._before + counted
