"""What one rank knows: its job, the kernel's records, and what it has learned of the others.

Decisions (``step``) see a ``Known``, and neither ``Speaker`` nor ``Job``: there is nothing in
it to send, seal or count with.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import OwnerMap
from tailbound.codec.records import Ring
from tailbound.codec.scale import weights_of
from tailbound.codec.scratch import readonly
from tailbound.collective.op import Op, Pending
from tailbound.collective.terms import Overtime, Repairs, Terms
from tailbound.datapath.protocol import Store
from tailbound.kernel.core import core
from tailbound.transport.config import Config
from tailbound.transport.deadline import Deadlines
from tailbound.transport.membership import Membership
from tailbound.transport.steps import OLD, STEP_MASK
from tailbound.wire import schema
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import Verdict, op_label, op_slot

#: Seals missed by the own row before it is no longer waited for (clock-8).
SELF_LATE_AFTER = 3
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


class Known:
    """What decisions are made by, from the time ``now`` (ns) on: the job, the datapath's ``store``, the others.

    Attributes: beside those that say what they are.
        rank, ranks: own rank, and how many contribute.
        peers: the others, beginning with the rank after the own one.
        switch: rank of the job's switch; None: there is none.
        world: ranks that can own rows: with a switch, one more than those that contribute.
        weights: what sums have room for.
    """

    def __init__(self, config: Config, cookie: int, store: Store, now: int) -> None:
        self.config, self.cookie = config, cookie
        self.rank, self.ranks = config.rank, config.ranks
        self.peers = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        self.switch = self.ranks if config.switch is not None else None
        self.world = self.ranks + (config.switch is not None)
        self.weights = weights_of(self.ranks)
        self.store = store
        self.records = Records(store, cookie)
        self.membership = Membership(self.ranks, self.rank, config.suspect_after, config.hold_max)
        self.deadlines = Deadlines(config)
        self.overtime = Overtime(now, config.floor)
        self.repairs = Repairs(self.world, config.floor)
        #: what the library decides about ops by
        self.terms = Terms(config, self.world, cookie, store, self.overtime, self.repairs.paths)
        #: scales that the next op of a key carries on where a switch sums
        self.exponents: dict[tuple[int, int, int, int], NDArray[np.int16]] = {}
        #: own ops in a row that were sealed without the own rows
        self.self_misses = 0
        #: rows of the smallest result and sums ring of all ranks: no more is in flight than these take
        self.least_rings = store.result_rows, store.sum_rows
        #: finished ops whose arrival stamps are still to be read
        self.pending: deque[Pending] = deque()
        #: the step whose ops are among them, and when it began
        self.sampled = -1, -(1 << 62)
        #: whether packets carry tags, as the kernel was told (auth-2)
        self.armed = False
        #: ops running of which the switch has sent nothing
        self.silent_ops = 0
        self._told: tuple[int, ...] = ()
        self.follow()

    def owners(self, ranks: tuple[int, ...], *, switched: bool) -> tuple[int, ...]:
        """Owners by an owner map: ``ranks``, or (``switched``) the switch alone, if there is one."""
        return (self.switch,) if switched and self.switch is not None else ranks

    def switched(self, owner_map: OwnerMap) -> bool:
        """Whether rows of ops placed by ``owner_map`` go to the switch."""
        return self.switch is not None and self.switch in owner_map.owners

    def scales(self, op: Op) -> NDArray[np.int16] | None:
        """Scales of the op before, by which ``op`` is coded for a switch, i16[G]; None: ranks have to agree first."""
        known = self.exponents.get(op.key)
        return known if known is not None and len(known) == op.place.layout.shape.groups else None

    @property
    def row_bytes(self) -> int:
        """Bytes of the IP packet of a full row."""
        ip = schema.IPV6_BYTES if self.store.control["prefix"].any() else schema.IPV4_BYTES
        return ip + schema.UDP_BYTES + schema.HEADER_BYTES + self.store.width

    @property
    def self_late(self) -> bool:
        """Whether the own row is no longer waited for (clock-8)."""
        return self.self_misses >= SELF_LATE_AFTER

    def summed(self, op: Op) -> list[int]:
        """Own rows of ``op`` that hold a contribution, by rank."""
        found = (ctypes.c_int64 * self.world)()
        core().fast.tb_summed(self.terms.pointer, ctypes.addressof(op), found)
        return list(found)

    def hear(self, rank: int, now: int) -> None:
        """A word of ``rank`` has come."""
        self.terms.heard[rank] = now
        self.overtime.spoke(rank, now)

    def spoke(self, rank: int) -> int:
        """When a word of ``rank`` was last read, ns; 0: never."""
        return self.terms.heard[rank]

    def newest(self, own: int) -> int:
        """The newest op label that a live rank has named, or ``own`` if none is newer."""
        return int(core().fast.tb_newest(self.terms.pointer, own))

    def age(self, step: int) -> None:
        """Dates what is old in ``step`` back (``OLD``), before it would seem to be still to come."""
        self.membership.age(step)
        oldest = np.uint32(op_label(step - OLD & STEP_MASK, 0))
        for mark in ("newest", "contributed", "published"):  # of ranks that have left
            marks = self.store.peer_states[mark]
            marks[(oldest - marks).view(np.int32) > 0] = oldest

    def follow(self) -> bool:
        """Tells the library what concerns all ops; returns whether it is another than before: all have news then."""
        members, deadlines, terms = self.membership, self.deadlines, self.terms
        told = members.changes, self.self_misses >= SELF_LATE_AFTER, deadlines.quiet, deadlines.start_max
        if told == self._told:  # asked for many times an op
            return False
        self._told = told
        _, terms.self_late, terms.silence, terms.start_max = told
        terms.live, terms.owners, terms.gone = bitmap(members.live), bitmap(members.owners), bitmap(members.gone)
        terms.voters, terms.suspects = bitmap(members.voters), bool(members.suspects)
        return True
