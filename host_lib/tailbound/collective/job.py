"""What all stages of a rank share: settings, datapath, sender, memory, suspicions, marks and counters."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import OwnerMap
from tailbound.codec.scale import shift_cap_of
from tailbound.codec.scratch import readonly
from tailbound.codec.threads import Threads
from tailbound.collective.buffers import BufferPool
from tailbound.collective.channels import Channels
from tailbound.collective.flow_control import FlowControl
from tailbound.collective.op import Pending
from tailbound.collective.repair import Repairs
from tailbound.datapath.protocol import Datapath, Store
from tailbound.kernel.routes import speed_of
from tailbound.observe.events import Events
from tailbound.observe.ledger import Accounts
from tailbound.observe.trace import Trace
from tailbound.transport import flush
from tailbound.transport.backoff import AnswerTime
from tailbound.transport.choose import Facts
from tailbound.transport.clock import majority
from tailbound.transport.config import Config
from tailbound.transport.deadline import Deadlines
from tailbound.transport.membership import Membership
from tailbound.transport.overtime import Overtime
from tailbound.transport.sender import Sender
from tailbound.transport.sequence import Sequence
from tailbound.transport.steps import Steps
from tailbound.wire import packets, schema
from tailbound.wire.schema import PacketType, Verdict, op_slot, serial_distance

log = logging.getLogger("tailbound")


#: So many ops back a rank remembers that it abstained.
_ABSTAINED = 256


@dataclass
class Marks:
    """Own marks: the highest op whose contributions (results) have been sent in full."""

    contributed: int
    published: int


class Job:
    """One rank's share of one job over one datapath.

    Args:
        now: CLOCK_MONOTONIC in ns, the clock that the kernel's stamps use too; a simulation brings its own.
    """

    def __init__(
        self,
        config: Config,
        datapath: Datapath,
        sender: Sender,
        cookie: int,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.now = now
        self.config = config
        self.datapath = datapath
        self.sender = sender
        self.cookie = cookie
        self.rank, self.ranks = config.rank, config.ranks
        self.peers = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        #: rank of the job's switch; None: there is none
        self.switch = self.ranks if config.switch is not None else None
        #: ranks that can own rows: with a switch, one more than those that contribute
        self.world = self.ranks + (self.switch is not None)
        #: the switch, as a sequence of ranks
        self.extra = () if self.switch is None else (self.switch,)
        owners = tuple(range(self.ranks)) if self.switch is None else (self.switch,)
        self.map = OwnerMap(0, owners, config.rotate is not False)
        self.sequence = Sequence(self.world, self.map, config.first_step)
        before = (self.sequence.next_label - 1) & 0xFFFFFFFF
        self.marks = Marks(before, before)
        self.shift_cap = shift_cap_of(self.ranks)
        self.pool = BufferPool(self.rank, self.ranks, datapath.store.result_rows)
        self.repairs = Repairs(self.ranks)
        #: threads that share the codec's work, the transport thread among them
        self.threads = Threads(max(1, config.codec_threads), config.width)
        self.membership = Membership(self.ranks, self.rank, config.suspect_after, config.hold_max)
        self.steps = Steps(datapath.store.result_rows)
        self.deadlines = Deadlines(config)
        self.overtime = Overtime(self.now())
        self._spoke = [0] * self.world  # when a word of each rank was last read, ns
        #: finished ops whose arrival stamps are still to be read
        self.pending: deque[Pending] = deque()
        self.self_misses = 0
        #: the newest ops that this rank said it has nothing for; peers that missed the word ask
        self.abstained: deque[int] = deque(maxlen=_ABSTAINED)
        self.exponents: dict[tuple[int, int, int, int], NDArray[np.int16]] = {}
        self.counters: Counter[str] = Counter()
        self.events = Events(self.rank, now)
        self.trace = Trace(self.rank)
        self.accounts = Accounts(self.ranks, config.safeguard, config.rotate, self.world)
        self.flow = FlowControl(
            sender, datapath, cookie, self.rank, list(sender.peers), speed_of(datapath.endpoint[0]), now
        )
        self.channels = Channels(config.result, Facts(self.ranks, datapath.name, self.switch is not None), sender)
        self._head = packets.header(
            cookie=cookie,
            sender=self.rank,
            map_id=self.map.id,
            map_known=self.map.id,
        )
        self.advertise_deadline(self.deadlines.advertised)
        #: how long the switch takes to answer
        self.patience = AnswerTime(flush.PATIENCE, flush.PATIENCE_MOST)
        #: ops running of which the switch has sent nothing
        self.silent_ops = 0
        self._live: list[int] | None = None
        self.live_ranks = np.array(self.peers, np.int64)
        #: when the live set last changed: the kernel's counts of complete rows in older ops are of several sets
        self.live_since = 0
        #: pinned maps outlive jobs, and only the program writes the ledger
        self.verdicts_before = np.zeros((schema.MAX_RANKS + 1, schema.VERDICTS), np.uint64)
        #: frames in pieces that the log has told of
        self.not_linear_told = 0
        # numba compiles for read-only and writable arrays apart: the same views for every datapath
        self.slots = readonly(datapath.store.slots)
        self.presence = readonly(datapath.store.presence)
        self.peer_states = readonly(datapath.store.peer_states)
        self.result_records = readonly(datapath.store.result_records)
        self.sum_mask = datapath.store.sum_rows - 1

    @property
    def store(self) -> Store:
        """The datapath's arrays."""
        return self.datapath.store

    @property
    def self_late(self) -> bool:
        """Whether the own row is no longer waited for (clock-8)."""
        return self.self_misses >= self.config.self_late_after

    def activate(self, addresses: list[int], own_address: int) -> None:
        """Fills control and peers and lets packets in; addresses as u32 in network byte order, by rank, switch last."""
        control, store = self.store.control, self.store
        control["active"] = 0
        first = self.sequence.next_label
        self.datapath.reset(first)
        store.peers[:] = 0
        for rank, address in enumerate(addresses):
            if rank != self.rank:
                store.peers[rank]["address"] = address
        store.expect[:] = 0
        store.expect_results[:] = 0
        for name, value in {
            "cookie": self.cookie,
            "rank": self.rank,
            "ranks": self.world,
            "address": own_address,
            "group": 0,
            "map_id": self.map.id,
            "map_since": first,
            "map_before": self.map.id,
            "sum_rows": store.sum_rows,
            "sum_base": 0,
            "result_base": 0,
            "shift_cap": self.shift_cap,
            "first_op": first,
            "released": (first - 1) & 0xFFFFFFFF,
        }.items():
            control[name] = value
        self._live = None
        self.verdicts_before = self.verdicts() + self.verdicts_before
        self.not_linear_told = 0
        self.publish_live()
        self.datapath.fence()
        control["active"] = 1

    def publish_live(self) -> None:
        """Writes the live set to the kernel, for completion, tails and the majority clock."""
        live = self.membership.live
        if live == self._live:
            return
        self._live, self.live_since = live, self.now()
        self.live_ranks = np.array(live, np.int64)
        control, peers = self.store.control, self.store.peers
        bitmap = sum(1 << p for p in live)
        words = [bitmap >> 64 * i & (1 << 64) - 1 for i in range(4)]
        for rank in self.peers:
            peers[rank]["live"] = rank in live
        control["live"][0] = words
        control["live_peers"] = len(live)
        control["need"] = majority(len(live) + 1)

    def weights(self, ranks: tuple[int, ...], *, switched: bool) -> tuple[int, ...]:
        """Weights of an owner map: those of the ranks, or (``switched``) all rows for the switch, if there is one."""
        if self.switch is None:
            return ranks
        return (0,) * self.ranks + (1,) if switched else (*ranks, 0)

    def switched(self, owner_map: OwnerMap) -> bool:
        """Whether rows of ops placed by ``owner_map`` go to the switch."""
        return self.switch is not None and self.switch in owner_map.owners

    def capacity(self) -> int:
        """Rows that may be in flight and kept for who lags, in all rings that the next op uses."""
        store = self.store
        if self.config.switch is not None and self.switched(self.sequence.map):
            return min(store.result_rows, self.config.switch.rows)
        return int(min(store.result_rows, store.sum_rows / self.sequence.map.share))

    def record(self, label: int) -> np.void | None:
        """The kernel's record of an op, or None while no packet has named it."""
        record = self.store.ops[op_slot(label)]
        if record["op"] == label and record["cookie"] == self.cookie:
            found: np.void = record
            return found
        return None

    def contributed(self, rank: int, label: int) -> bool:
        """Whether ``rank`` has fully sent its contributions to ops up to ``label``."""
        state = self.store.peer_states[rank]
        return bool(state["cookie"] == self.cookie and serial_distance(int(state["contributed"]), label) >= 0)

    def published(self, rank: int, label: int) -> bool:
        """Whether ``rank`` has fully sent its results of ops up to ``label``."""
        state = self.store.peer_states[rank]
        return bool(state["cookie"] == self.cookie and serial_distance(int(state["published"]), label) >= 0)

    def hear(self, rank: int) -> None:
        """A word of ``rank`` has come."""
        self._spoke[rank] = self.now()
        self.overtime.spoke(rank, self._spoke[rank])

    def heard(self, ranks: Iterable[int]) -> int:
        """When one of ``ranks`` was last heard of, by a word or by a mark that rose, ns; 0: never."""
        states, last = self.store.peer_states, 0
        for rank in ranks:
            state = states[rank]
            last = max(last, self._spoke[rank], int(state["last_ns"]) if state["cookie"] == self.cookie else 0)
        return last

    def header(self, kind: PacketType, label: int, layout: int, **fields: int) -> NDArray[Any]:
        """A header of this rank with its marks and advertisements."""
        head = self._head.copy()  # ten times faster than filling every field anew
        head["type"] = kind
        head["op"] = label
        head["layout"] = layout
        head["contributed"] = self.marks.contributed
        head["published"] = self.marks.published
        head["incast"] = self.flow.incast.advertised
        for name, value in fields.items():
            head[name] = value
        return head

    def tell(self, rank: int, head: NDArray[Any], body: bytes = b"") -> bytes:
        """Sends one control packet to ``rank``, and returns it; ``head`` (see ``header``) may be used again."""
        head["owner"] = rank
        data = packets.packet(head, body)
        self.sender.send(rank, data)
        return data

    def advertise(self, **fields: int) -> None:
        """What every header says from now on."""
        for name, value in fields.items():
            self._head[name] = value

    def advertise_deadline(self, deadline: int) -> None:
        """Writes D1 (ns) into every header from now on (clock-6)."""
        self._head["deadline"] = min(0xFFFF, -(-deadline // (schema.TIME_UNIT_US * 1000)))

    def verdicts(self) -> NDArray[np.uint64]:
        """The ledger of this job, summed over cpus: u64[257, VERDICTS], by sender and verdict."""
        ledger = self.store.ledger["verdict"]
        total: NDArray[np.uint64] = ledger.reshape(-1, schema.MAX_RANKS + 1, schema.VERDICTS).sum(axis=0)
        return total - self.verdicts_before

    def not_linear(self) -> int:
        """Frames of this job's port that the driver has handed over in pieces: dropped, whoever sent them."""
        counts = self.store.ledger["verdict"][schema.UNKNOWN_SENDER :: schema.MAX_RANKS + 1, Verdict.NOT_LINEAR]
        return int(counts.sum() - self.verdicts_before[schema.UNKNOWN_SENDER, Verdict.NOT_LINEAR])
