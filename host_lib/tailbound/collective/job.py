"""What a rank works with: datapath, threads, flow control, accounts; with what it says and knows."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.mean import mean_entry
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import GROUP_ROWS
from tailbound.codec.threads import Threads
from tailbound.collective.accounting import Accounts
from tailbound.collective.channels import Channels
from tailbound.collective.op import Op
from tailbound.collective.paths import Paths
from tailbound.collective.speaker import Speaker
from tailbound.datapath.protocol import Datapath
from tailbound.kernel.core import address, core
from tailbound.kernel.net import name_of, speed_of
from tailbound.transport.config import FORMS, Config
from tailbound.transport.keys import KeyRing
from tailbound.transport.pace import Pacer
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender
from tailbound.wire.address import Words
from tailbound.wire.packets import record_of
from tailbound.wire.schema import OWNER, PacketType

log = logging.getLogger("tailbound")
Owner = record_of(OWNER)
#: A loss that there is not.
_NEVER = 2.0


class Job(Speaker):
    """One rank's share of one job over one datapath: what it knows, what it says, and what it works with.

    Arguments are those of ``Speaker``, with the datapath in place of its store, and ``scratch`` of ``Threads``.
    """

    def __init__(
        self,
        config: Config,
        datapath: Datapath,
        sender: Sender,
        cookie: int,
        now: Callable[[], int] = time.monotonic_ns,
        keys: KeyRing | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        super().__init__(config, datapath.store, sender, cookie, now, keys)
        self.datapath = datapath
        #: threads that share the codec's work, the transport thread among them
        self.threads = Threads(max(1, config.codec_threads), config.width, scratch)
        #: whether rows reach the peers
        self.paths = Paths(self, lambda: datapath.interface or name_of(datapath.endpoint[0]))
        self.accounts = Accounts(self, self.paths.complain)
        link = config.rate or speed_of(datapath.endpoint[0])
        pacer = Pacer(self.sender.peers, datapath.gap, link, config.rate, sender.room)
        #: all that is sent leaves by it
        self.queue = SendQueue(sender, pacer, self.voice, 1 if datapath.name == "xdp" else 2, now)
        self.voice.source, self.voice.controls = datapath.source.pointer, datapath.fds()[1]
        self.channels = Channels(self, datapath)
        limits = [_NEVER if one is None else one for one in (config.safeguard.stop, config.safeguard.skip)]
        #: what results are made, sent and read by
        self.owner = Owner(
            self.terms.pointer, datapath.source.pointer, self.queue.line,
            ctypes.addressof(self.marks), ctypes.addressof(self.accounts.ledger.lines),
            *limits, mean_entry(), self.threads.scratch.memory_at,
            ctypes.addressof(self.voice), address(self.store.expect_results), GROUP_ROWS * self.threads.alone,
            FORMS[config.switch.form] if config.switch else 0,
        )  # fmt: skip

    def send_own(self, op: Op, runs: list[tuple[int, NDArray[np.uint8]]]) -> None:
        """Queues the own rows of ``op`` (none: says in its turn that there are none); then its mark rises.

        Of rows for a switch the others are told that they have left (``tb_tell_all``). The kernel hears how many
        results make the op complete.
        """
        expected = self.store.expect_results[op.slot]
        expected["rows"], expected["op"] = op.rows - op.own, op.label
        until = (op.start or op.admitted) + self.config.stage_max  # no seal is later, so no row is worth more
        self.queue.submit(op.label, PacketType.CONTRIBUTION, runs, until, self.now(), ctypes.addressof(op))

    def activate(self, addresses: Sequence[Words], own: Words) -> None:
        """Fills control and peers and lets packets in; addresses by rank, that of a switch last."""
        control, store = self.store.control, self.store
        control["active"] = 0
        first = self.sequence.next_label
        self.datapath.reset(first)
        store.peers[:] = 0
        for rank, words in enumerate(addresses):
            if rank != self.rank:
                store.peers[rank]["address"], store.peers[rank]["prefix"] = words
        store.expect_results[:] = 0
        for name, value in {
            "cookie": self.cookie,
            "rank": self.rank,
            "ranks": self.world,
            "address": own.address,
            "prefix": own.prefix,
            "group": 0,
            "map_id": self.sequence.map.id,
            "map_since": first,
            "map_before": self.sequence.map.id,
            "sum_rows": store.sum_rows,
            "sum_base": 0,
            "result_base": 0,
            "weight_cap": self.weights.cap,
            "spare": self.weights.spare,
            "first_op": first,
            "released": (first - 1) & 0xFFFFFFFF,
        }.items():
            control[name] = value
        control["tagged"] = self.armed = self.keys is not None
        self._live = None
        self.records.reset()
        self.publish_live()
        core().fast.tb_order(self.datapath.source.pointer)
        control["active"] = self.datapath.active
