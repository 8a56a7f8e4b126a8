"""Sends bursts straight from packet memory: one system call for up to 64 packets (UDP GSO), no copies in Python.

The data path never raises: what cannot be sent is counted per peer and, to the protocol, is lost like any other
packet. A refused burst is a burst that the deadline takes care of.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ConfigError
from tailbound.transport.burst import burst_packets, interleave
from tailbound.transport.counts import PeerCounts
from tailbound.transport.shared import SHARED_MOST, Shared
from tailbound.wire.schema import MAX_RANKS

#: ``<linux/udp.h>``: segment size of a GSO send. The socket module has no name for it before 3.13.
UDP_SEGMENT = 103
SOL_UDP = socket.IPPROTO_UDP

#: ``pace(rank, bytes)``: seconds to wait before a burst of so many bytes to ``rank``; 0 or less: go.
Pace = Callable[[int, int], float]

#: Single packets that may wait for room.
_DEFERRED = 1024
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
#: What a path without UDP GSO answers.
NO_GSO = (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP)


class Sender:
    """Sends packet memory to peers over sockets that the caller owns (and closes).

    Not thread-safe: one thread sends. The GIL is released in every system call.

    Args:
        sockets: bound UDP sockets. Single packets leave over the first one. With more, bursts leave over the others,
            as many for each peer as there are, at least one as far as they last: what waits in front of a slow peer
            then takes no room from the rest, and a peer's receive-side scaling sees several source ports.
        peers: (IPv4 address, UDP port) by rank.
        pace: asked before every burst, see ``Pace``.
        patience: seconds to wait at most for room in a full socket before a burst is given up.

    Raises:
        ConfigError: no socket.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        peers: Mapping[int, tuple[str, int]],
        *,
        pace: Pace | None = None,
        patience: float = 0.05,
    ) -> None:
        if not sockets:
            raise ConfigError("a sender needs at least one bound socket")
        self.sockets = list(sockets)
        self.peers = dict(peers)
        self.counts = {rank: PeerCounts() for rank in self.peers}
        self.plain: set[int] = set()  #: ranks to which GSO does not work
        #: single packets for which a full socket has no room wait here, where a send queue empties it; None: they are
        #: waited for. The oldest give way when it is full.
        self.deferred: deque[tuple[int, bytes]] | None = None
        self._pace = pace
        self._patience = patience
        data = range(1, len(self.sockets)) if len(self.sockets) > 1 else range(1)
        each = max(1, len(data) // max(1, len(self.peers)))
        #: sockets of every channel, as indices into ``sockets``; bursts of a channel take them in turn
        self.ports = [tuple(data[i : i + each]) for i in range(0, len(data) - each + 1, each)]
        #: channel that bursts for a rank leave over, those of ``shared`` among them
        self.channel = {rank: i % len(self.ports) for i, rank in enumerate(self.peers)}
        self._plain_sockets = all(type(sock) is socket.socket for sock in self.sockets)

        #: channels that reach many ranks at once, by the number that stands for them where a rank is meant
        self.shared: dict[int, Shared] = {}

    def share(self, channel: Shared) -> int:
        """Adds a channel, for a send queue alone; returns its number. Before the queue is used, by whoever waits on
        ``sockets``.

        Raises:
            ConfigError: there are ``SHARED_MOST`` already.
        """
        if len(self.shared) == SHARED_MOST:
            raise ConfigError(f"a sender has {SHARED_MOST} shared channels at most")
        number = MAX_RANKS + len(self.shared)
        self.shared[number] = channel
        self.channel[number] = len(self.ports)
        self.ports.append(tuple(range(len(self.sockets), len(self.sockets) + len(channel.sockets))))
        self.sockets += channel.sockets
        return number

    def ranks_of(self, rank: int) -> tuple[int, ...]:
        """Who gets what is sent to ``rank``, which may stand for a shared channel."""
        return self.shared[rank].ranks if rank >= MAX_RANKS else (rank,)

    def took(self, rank: int, packets: int, size: int, bursts: int) -> None:
        """Counts ``packets`` of ``size`` bytes together that left for ``rank`` in ``bursts``."""
        if rank >= MAX_RANKS:
            self.shared[rank].took(self.counts, packets, size, bursts)
            return
        counts = self.counts[rank]
        counts.packets += packets
        counts.bytes += size
        counts.bursts += bursts

    def lose(self, rank: int, packets: int) -> None:
        """Counts ``packets`` for ``rank`` that are given up."""
        if rank >= MAX_RANKS:
            self.shared[rank].lose(self.counts, packets)
        else:
            self.counts[rank].lost += packets

    def calls_of(self, rank: int) -> PeerCounts:
        """Where system calls for ``rank`` are counted."""
        return self.shared[rank].counts if rank >= MAX_RANKS else self.counts[rank]

    @property
    def batched(self) -> bool:
        """Whether bursts may go to the kernel many at a time, past ``send_burst``."""
        return self._plain_sockets and self._pace is None and "send_burst" not in self.__dict__

    def flush(self) -> bool:
        """Tries deferred packets again, the oldest first; returns whether all are gone."""
        while self.deferred:
            rank, packet = self.deferred[0]
            number = self._try(self.sockets[0], rank, packet, 0)
            if number in _FULL:
                return False
            if number:
                self.refuse(rank, number)
                self.counts[rank].lost += 1
            self.deferred.popleft()
        return True

    @property
    def packets(self) -> int:
        """Packets handed to the kernel, all peers."""
        return sum(c.packets for c in self.counts.values())

    def send(self, rank: int, packets: NDArray[np.uint8], count: int | None = None) -> int:
        """Sends the first ``count`` packets (default: all) to ``rank``.

        Args:
            rank: a key of ``peers``.
            packets: u8[>= count, stride], C-contiguous, headers finished.
            count: packets.

        Returns:
            Packets that the kernel took.
        """
        total = len(packets) if count is None else count
        return self.send_runs([(rank, packets[:total])])

    def send_runs(self, runs: Sequence[tuple[int, NDArray[np.uint8]]], until: int | None = None) -> int:
        """Sends several runs, a burst of each in turn, in the order given (see ``burst.stagger``).

        Args:
            runs: (rank, u8[count, stride]) pairs; all of one stride. The same memory may occur several times.
            until: CLOCK_MONOTONIC in ns; what has not left by then is given up and counted as lost.

        Returns:
            Packets that the kernel took.
        """
        runs = [(rank, packets) for rank, packets in runs if len(packets)]
        if not runs:
            return 0
        stride = runs[0][1].shape[1]
        views = [packets.data.cast("B") for _, packets in runs]
        sent = 0
        for run, first, count in interleave([len(packets) for _, packets in runs], burst_packets(stride)):
            if until is not None and time.monotonic_ns() > until:
                self.counts[runs[run][0]].lost += count
                continue
            view = views[run][first * stride : (first + count) * stride]
            sent += self.send_burst(runs[run][0], view, stride)
        return sent

    def send_burst(self, rank: int, view: memoryview | bytes, stride: int) -> int:
        """One burst of packets of ``stride`` bytes (the last may be shorter); paced. Returns the packets taken."""
        if self._pace is not None and (wait := self._pace(rank, len(view))) > 0:
            time.sleep(wait)
        sock = self.sockets[self.ports[self.channel[rank]][0] if len(view) > stride else 0]
        if len(view) > stride and rank not in self.plain:
            error = self._call(sock, rank, view, stride)
            if error == 0:
                return -(-len(view) // stride)
            if error not in NO_GSO:
                self.counts[rank].lost += -(-len(view) // stride)
                return 0
            self.plain.add(rank)
        sent = 0
        for start in range(0, len(view), stride):
            if self._call(sock, rank, view[start : start + stride], 0) == 0:
                sent += 1
            else:
                self.counts[rank].lost += 1
        return sent

    def _call(self, sock: socket.socket, rank: int, view: memoryview | bytes, stride: int) -> int:
        """One system call with waiting and one retry; returns 0 or the errno that ended it, counted."""
        until = 0.0
        retried = False
        while True:
            number = self._try(sock, rank, view, stride)
            if number == 0:
                return 0
            if number in _FULL:
                if self.deferred is not None and not stride:
                    self._defer(rank, bytes(view))
                    return 0
                if self._room(sock, number, self.counts[rank], until):
                    until = until or time.monotonic() + self._patience
                    continue
            self.refuse(rank, number)
            if number == errno.ECONNREFUSED and not retried:
                retried = True  # the error belongs to an earlier datagram, this one was not tried
                continue
            return number

    def _try(self, sock: socket.socket, rank: int, view: memoryview | bytes, stride: int) -> int:
        """One system call; returns 0, counted, or its errno."""
        control = [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", stride))] if stride else []
        try:
            sock.sendmsg([view], control, socket.MSG_DONTWAIT, self.peers[rank])
        except OSError as error:
            return error.errno or errno.EIO
        self.took(rank, -(-len(view) // stride) if stride else 1, len(view), 1)
        return 0

    def _defer(self, rank: int, packet: bytes) -> None:
        assert self.deferred is not None
        self.counts[rank].waits += 1
        if len(self.deferred) >= _DEFERRED:
            self.counts[self.deferred.popleft()[0]].lost += 1
        self.deferred.append((rank, packet))

    def refuse(self, rank: int, number: int) -> None:
        """Counts a refused call by the name of its errno."""
        errors, name = self.calls_of(rank).errors, errno.errorcode.get(number, str(number))
        errors[name] = errors.get(name, 0) + 1

    def _room(self, sock: socket.socket, number: int, counts: PeerCounts, until: float) -> bool:
        """Waits for room in a full socket; False when patience is at its end (``until``, 0: not begun)."""
        left = until - time.monotonic() if until else self._patience
        if left <= 0:
            return False
        counts.waits += 1
        if number == errno.EAGAIN:
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            poller.poll(left * 1e3)
        else:
            time.sleep(min(left, 0.0005))  # a full device queue makes no socket event
        return True
