"""What a rank acts with: datapath, sender, memory, marks, counters; and what it knows (``known``)."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import OwnerMap
from tailbound.codec.threads import Threads
from tailbound.collective.buffers import BufferPool
from tailbound.collective.flow_control import Channels, FlowControl
from tailbound.collective.known import Known
from tailbound.collective.op import Pending
from tailbound.datapath.protocol import Datapath
from tailbound.kernel.routes import speed_of
from tailbound.observe.events import Events
from tailbound.observe.ledger import Accounts
from tailbound.observe.trace import Trace
from tailbound.transport.choose import Facts
from tailbound.transport.config import Config
from tailbound.transport.sender import Sender
from tailbound.transport.sequence import Sequence
from tailbound.transport.stage import majority
from tailbound.transport.steps import Steps
from tailbound.wire import packets, schema
from tailbound.wire.schema import PacketType

log = logging.getLogger("tailbound")


#: So many ops back a rank remembers that it abstained.
_ABSTAINED = 256


@dataclass
class Marks:
    """Own marks: the highest op whose contributions (results) have been sent in full."""

    contributed: int
    published: int


class Job(Known):
    """One rank's share of one job over one datapath: what it knows, and what it acts with.

    Args:
        config: settings.
        datapath: takes in what comes.
        sender: sends.
        cookie: of the job.
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
        super().__init__(config, cookie, datapath.store, now())
        self.now = now
        self.datapath = datapath
        self.sender = sender
        owners = tuple(range(self.ranks)) if self.switch is None else (self.switch,)
        self.map = OwnerMap(0, owners, config.rotate is not False)
        self.sequence = Sequence(self.world, self.map, config.first_step)
        before = (self.sequence.next_label - 1) & 0xFFFFFFFF
        self.marks = Marks(before, before)
        self.pool = BufferPool(self.rank, self.ranks, self.store.result_rows)
        #: threads that share the codec's work, the transport thread among them
        self.threads = Threads(max(1, config.codec_threads), config.width)
        self.steps = Steps(0, 0, (), self.store.result_rows)
        #: finished ops whose arrival stamps are still to be read
        self.pending: deque[Pending] = deque()
        #: the newest ops that this rank said it has nothing for; peers that missed the word ask
        self.abstained: deque[int] = deque(maxlen=_ABSTAINED)
        self.counters: Counter[str] = Counter()
        self.events = Events(self.rank, now)
        self.trace = Trace(self.rank)
        self.accounts = Accounts(self.ranks, config.safeguard, config.rotate, self.world)
        link = speed_of(datapath.endpoint[0])
        self.flow = FlowControl(sender, datapath, cookie, self.rank, list(sender.peers), link, now)
        self.channels = Channels(config.result, Facts(self.ranks, datapath.name, self.switch is not None), sender)
        self._head = packets.header(cookie=cookie, sender=self.rank, map_id=self.map.id, map_known=self.map.id)
        self.advertise_deadline(self.deadlines.advertised)
        #: ops running of which the switch has sent nothing
        self.silent_ops = 0
        self._live: list[int] | None = None
        self.live_ranks = np.array(self.peers, np.int64)
        #: frames in pieces that the log has told of
        self.not_linear_told = 0

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
        self.records.begin()
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

    def capacity(self) -> int:
        """Rows that may be in flight and kept for who lags, in all rings that the next op uses."""
        store = self.store
        if self.config.switch is not None and self.switched(self.sequence.map):
            return min(store.result_rows, self.config.switch.rows)
        return int(min(store.result_rows, store.sum_rows / self.sequence.map.share))

    def hear(self, rank: int) -> None:
        """A word of ``rank`` has come."""
        self._spoke[rank] = self.now()
        self.overtime.spoke(rank, self._spoke[rank])

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
