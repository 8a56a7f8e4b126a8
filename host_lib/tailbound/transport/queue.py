"""What waits to be sent: op by op, nothing that is stale, never a sleep (clock-17).

The transport thread submits runs of packets and pumps once a turn. The library keeps them and decides what leaves when
(``host_lib/core/send.c``): a pump is one call of it, without the GIL.

As a rule everything leaves within ``submit``: the queue holds what a full socket or a rate (``pace``) keeps back. Per
destination the order of submission is kept within results and within contributions, since the last packet of a run says
that all before it has been sent.

Results go before the contributions of later ops, and behind those of their own: an owner that has its sums early would
otherwise keep the others' sums waiting for as long as its own results take to send. Rows that were asked for again go
first: they are few, a rank waits for them who does so for a few milliseconds only, and their flow has ended.

Rows for everybody may leave once, over a shared channel (``sender.Shared``): they wait for what is older for any of its
ranks, leave at the rate of the slowest, and are paid for and counted by rank.

A row that had to wait is stale when its time is up (``until``), or when no rank takes it any more: an owner that has
published an op takes no contributions to it, and a rank that has left takes no results. It is dropped and counted.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address, core
from tailbound.transport.pace import Pacer
from tailbound.transport.sender import Sender
from tailbound.transport.sockets import UdpSocket, sockaddr
from tailbound.wire.packets import record_of
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import HEADER_BYTES, SENDING, PacketType, Sent

#: (rank, u8[count, stride]): packets for one rank, or the number of a shared channel, headers finished.
Run = tuple[int, NDArray[np.uint8]]

_Sending = record_of(SENDING)


class SendQueue:
    """The send queue of one rank; all calls from one thread.

    Paths are probed where there is a ``voice``: the time of sending travels in a small packet behind bursts, which the
    peer turns round. Who receives the echo stores the difference (``tb_peer_state.rtt_ns``), so that with ``xdp`` no
    process needs to be awake at either end.

    Args:
        sender: sockets, addresses and counters.
        pacer: rates by rank, of the ranks of ``sender``.
        voice: ``tb_voice`` of the rank; None: nothing is known of peers; no round trips, no limits.
        ways: how often a round trip waits in own queues. The kernel turns probes round at once; the echo of a thread
            waits behind its own rank's rows, about as long as the probe did behind ours.
        clock: CLOCK_MONOTONIC in ns, for how much the link takes.

    Attributes:
        said: what the library says, and counts.
        pacer: as above.
        line: the queue as the library knows it (``struct tb_line``).
        direct: all sockets are the system's.

    Raises:
        CapabilityError: see ``kernel.core.core``.
        MemoryError: there is none.
    """

    def __init__(
        self,
        sender: Sender,
        pacer: Pacer | None = None,
        voice: Any = None,
        ways: int = 1,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.sender = sender
        self._core = core()
        self.said, self._targets = _Sending(ranks=sender.ranks, ways=ways), sender.targets
        self.pacer = pacer = pacer or Pacer(sender.peers)
        assert len(pacer.table) == sender.ranks
        self.line = self._core.fast.tb_line_open(
            ctypes.byref(self.said), self._targets, pacer.table, ctypes.byref(pacer.link)
        )
        if not self.line:
            raise MemoryError("no memory for a send queue")
        # not at exit, when the transport's thread may still be at work
        weakref.finalize(self, self._core.fast.tb_line_close, self.line).atexit = False
        self._voice = voice
        if voice is not None:
            self.said.voice, voice.line = ctypes.addressof(voice), self.line
            voice.largest = pacer.largest(voice.width + HEADER_BYTES)
        self._clock = clock
        self.direct = False
        self._told: object = None  # sockets, who goes without GSO and shared channels, as the library knows them

    @property
    def again(self) -> int:
        """When to pump again, ns; 0: nothing waits, or for a writable socket."""
        return int(self.said.again)

    @property
    def full(self) -> int:
        """Bitmap of sockets that had no room; they become writable when there is some again."""
        return int(self.said.full)

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not (self.said.left or self.said.words or self.said.due)

    def submit(
        self,
        label: int,
        kind: PacketType,
        runs: Sequence[Run],
        until: int,
        now: int,
        op: int = 0,
    ) -> None:
        """Takes over packets, whose memory has to stay as it is until they have left, and sends what can be sent now.

        Args:
            label: op.
            kind: CONTRIBUTION, or what is like a result.
            runs: may be empty: ``op`` hears of that in its turn among those of its kind, too.
            until: CLOCK_MONOTONIC in ns; what has not left by then is stale.
            now: CLOCK_MONOTONIC in ns.
            op: address of ``tb_own_op`` whose rows they are: it hears when they have left; 0: none does.
        """
        self.tell()
        runs = [run for run in runs if len(run[1])]
        stride = runs[0][1].shape[1] if runs else 0
        words = [word for to, packets in runs for word in (to, address(packets), len(packets))]
        error = self._core.fast.tb_submit(
            self.line, kind == PacketType.CONTRIBUTION, op, label, until, stride,
            self.pacer.largest(stride) if runs else 1, (ctypes.c_uint64 * len(words))(*words), len(runs), 0,
        )  # fmt: skip
        if error:
            raise MemoryError("no memory for a submission")
        self.pump(now)

    def say(self, rank: int, packet: bytes) -> None:
        """Sends a single packet at once, or in its turn as soon as the first socket has room for it."""
        self.tell()
        self._core.fast.tb_say(self.line, rank, packet, len(packet))
        self._send()

    def cancel(self, label: int) -> int:
        """Drops what is still queued for op ``label``, whose memory is about to be used again; returns the rows."""
        return int(self._core.fast.tb_cancel(self.line, label)) if self.said.left else 0

    def poll(self, now: int) -> None:
        """Sends what waits and may leave now, if anything does."""
        if not self.empty:
            self.pump(now)

    def pump(self, now: int) -> None:
        """Sends what may leave now."""
        self.tell()
        if self.direct:
            self._send(now)
            return
        self.said.now = now
        self._core.fast.tb_begin(self.line)
        self._send()
        self._core.fast.tb_end(self.line, self._clock())

    def _send(self, now: int | None = None) -> None:
        """Sends all that may leave, in a pump at ``now``; None: single packets, or all in the pump that has begun."""
        if self.direct:
            self._core.waits.tb_pump(self.line, now is None, now or 0)
            self._core.fast.tb_back(self.said.sleep)
        said, fast = self.said, self._core.fast
        while not self.direct and (what := fast.tb_next(self.line)) != Sent.DONE:
            if what == Sent.PROBE:
                fast.tb_time_probes(self.line, self._clock())
            substitute: Any = self.sender.sockets[said.port]
            fast.tb_took(self.line, *substitute.send_many(said.messages, said.count))
        self._hear()

    def _hear(self) -> None:
        """Notes which messages were refused."""
        said, sender = self.said, self.sender
        count, said.refused = said.refused, 0
        for to, number in zip(said.to[:count], said.errors[:count], strict=True):
            sender.refuse(to, number)
            if number > 0 and to in sender.shared:
                sender.shared[to].broken = True

    def tell(self) -> None:
        """Tells the library of sockets, shared channels and whom GSO does not reach, and hears what was refused."""
        said, sender = self.said, self.sender
        if said.refused:  # by what the library has sent alone
            self._hear()
        shared = [(one.target, one.ranks, one.local) for one in sender.shared.values()]
        if self._told == (told := (sender.sockets.copy(), sender.plain.copy(), shared)):
            return
        self._told = told
        self.direct = all(isinstance(sock, UdpSocket) for sock in sender.sockets)
        said.sockets, said.channels = len(sender.sockets), len(sender.ports)
        said.fds[: said.sockets] = [sock.fileno() for sock in sender.sockets]
        said.rooms[: said.sockets] = sender.rooms
        said.first[: said.channels] = [ports[0] for ports in sender.ports]
        said.ports[: said.channels] = [len(ports) for ports in sender.ports]
        said.peers[:] = bitmap(sender.peers)
        for rank, name in sender.peers.items():
            self._point(rank, name, (rank,), 1)
        for number, one in sender.shared.items():
            self._point(number, one.target, one.ranks, one.cost)

    def _point(self, to: int, name: tuple[str, int], ranks: Sequence[int], cost: int) -> None:
        target, sender = self._targets[to], self.sender
        target.name[:] = np.frombuffer(sockaddr(name), np.uint64).tolist()
        target.ranks[:] = bitmap(ranks)
        target.channel, target.cost, target.plain = sender.channel[to], cost, to in sender.plain
