"""In which order packets leave, and many bursts in one system call.

A flow is a run of packets for one rank. Flows take turns, a burst of each, without a Python object per burst: the flow
that is least far on is always next, so that a call that was cut short goes on where it was. Message headers are filled
by nogil code and handed over by ``sendmmsg``.

Every sender begins with the rank after its own, so that at no moment all ranks send to the same one (OptiReduce's
transpose schedule, NSDI'25 section 3.2, per burst instead of per round).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailbound.errors import ConfigError
from tailbound.transport.sender import DESTINATIONS
from tailbound.transport.sockets import SOCKADDR_BYTES, Socket, sockaddr
from tailbound.wire.jit import Scalar, cached

#: A UDP GSO send holds at most this many segments (UDP_MAX_SEGMENTS before Linux 6.9) ...
MAX_SEGMENTS = 64
#: ... and this many bytes of UDP payload (65535 - 20 - 8).
MAX_BYTES = 65507


def burst_packets(stride: int) -> int:
    """Packets of ``stride`` bytes in one GSO send: 44 at 1472 bytes, 7 at 8960.

    Raises:
        ConfigError: not even one fits.
    """
    if not 0 < stride <= MAX_BYTES:
        raise ConfigError(f"packets of {stride} bytes: give 1..{MAX_BYTES}, as a UDP payload has")
    return min(MAX_SEGMENTS, MAX_BYTES // stride)


#: Columns of a flow: address of its first packet; packets that have left, packets in all; rank, or the number of a
#: shared channel; packets of a burst; bursts that may leave now; channel (``Sender.channel``).
BASE, NEXT, TOTAL, RANK, SIZE, ALLOWED, CHANNEL = range(7)
FLOW_WORDS = 7
#: As many bursts as one may want: no limit.
ANY = 1 << 30
#: Messages of one system call.
BATCH = 32

_CONTROL_BYTES = 24
#: ``<linux/udp.h>``: segment size of a GSO send. The socket module has no name for it before 3.13.
_UDP_SEGMENT = 103


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def fill(
    flows: NDArray[np.int64],
    most: int,
    channel: int,
    names: NDArray[np.uint64],
    control: NDArray[np.uint64],
    messages: NDArray[np.uint64],
    iovecs: NDArray[np.uint64],
    order: NDArray[np.int64],
) -> Scalar:
    """Writes messages for the next bursts; returns how many. Nothing counts as sent before ``settle`` says so.

    Args:
        flows: i64[F, 7], see the columns.
        most: messages at most.
        channel: only flows of this channel.
        names: u64[destinations], addresses of each rank's ``sockets.sockaddr``; 0: not a peer.
        control: u64[3], ``struct cmsghdr`` and the segment size, which is the bytes of a packet.
        messages: u64[BATCH, 8], ``struct mmsghdr``; the iovec pointers are in place.
        iovecs: u64[BATCH, 2].
        order: i64[BATCH, 2], out: flow and packets of every message.
    """
    count, stride = flows.shape[0], np.int64(control[2])
    ahead = np.empty((count, 2), np.int64)
    for f in range(count):
        ahead[f, 0], ahead[f, 1] = flows[f, NEXT], flows[f, ALLOWED]
    n = 0
    while n < most:
        best = -1
        for f in range(count):
            open_ = flows[f, CHANNEL] == channel and ahead[f, 1] > 0 and ahead[f, 0] < flows[f, TOTAL]
            if open_ and (best < 0 or ahead[f, 0] < ahead[best, 0]):
                best = f
        if best < 0:
            break
        packets = min(flows[best, SIZE], flows[best, TOTAL] - ahead[best, 0])
        iovecs[n, 0] = np.uint64(flows[best, BASE] + ahead[best, 0] * stride)
        iovecs[n, 1] = np.uint64(packets * stride)
        messages[n, 0] = names[flows[best, RANK]]
        messages[n, 4] = np.uint64(control.ctypes.data if packets > 1 else 0)
        messages[n, 5] = np.uint64(_CONTROL_BYTES if packets > 1 else 0)
        order[n, 0], order[n, 1] = best, packets
        ahead[best, 0] += packets
        ahead[best, 1] -= 1
        n += 1
    return n


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def settle(
    flows: NDArray[np.int64], order: NDArray[np.int64], taken: int, moved: NDArray[np.int64]
) -> tuple[Scalar, Scalar]:
    """Moves the flows past the first ``taken`` messages.

    Args:
        flows, order: of ``fill``.
        taken: messages.
        moved: i64[BATCH, 3], out: flow, packets and bursts of every flow that these moved, in the order of flows.

    Returns:
        Packets that are left in all flows, and how many flows have moved.
    """
    count = 0
    for i in range(taken):
        f, packets = order[i, 0], order[i, 1]
        flows[f, NEXT] += packets
        flows[f, ALLOWED] -= 1
        k = count
        while k > 0 and moved[k - 1, 0] >= f:
            k -= 1
        if k == count or moved[k, 0] != f:
            for n in range(count, k, -1):
                moved[n, 0], moved[n, 1], moved[n, 2] = moved[n - 1, 0], moved[n - 1, 1], moved[n - 1, 2]
            moved[k, 0], moved[k, 1], moved[k, 2] = f, 0, 0
            count += 1
        moved[k, 1] += packets
        moved[k, 2] += 1
    left = 0
    for f in range(flows.shape[0]):
        left += flows[f, TOTAL] - flows[f, NEXT]
    return left, count


def flows_of(runs: list[tuple[int, NDArray[np.uint8]]], size: int, channels: Mapping[int, int]) -> NDArray[np.int64]:
    """Flows of (rank, u8[count, stride]) runs, in bursts of ``size`` packets; the caller keeps the memory alive.

    ``channels``: each rank's channel.
    """
    rows = [(_address(packets), 0, len(packets), rank, size, ANY, channels[rank]) for rank, packets in runs]
    return np.array(rows, np.int64).reshape(-1, FLOW_WORDS)


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def _address(packets: NDArray[np.uint8]) -> Scalar:
    """Of its first byte; ``packets.ctypes`` takes five times as long."""
    return packets.ctypes.data


class Batch:
    """Memory for the messages of one call, and the call. Layouts are those of 64-bit little-endian Linux.

    Args:
        peers: (IP address, UDP port) by rank.
    """

    def __init__(self, peers: Mapping[int, tuple[str, int]]) -> None:
        self._names = np.zeros((DESTINATIONS, SOCKADDR_BYTES // 8), np.uint64)
        self._pointers = np.zeros(len(self._names), np.uint64)
        self._targets: dict[int, tuple[str, int]] = {}
        for rank, target in peers.items():
            self.point(rank, target)
        self._messages = np.zeros((BATCH, 8), np.uint64)
        self._iovecs = np.zeros((BATCH, 2), np.uint64)
        for i in range(BATCH):
            self._messages[i] = 0, SOCKADDR_BYTES, self._iovecs[i].ctypes.data, 1, 0, 0, 0, 0
        #: flow and packets of the messages that ``fill`` wrote
        self.order = np.zeros((BATCH, 2), np.int64)
        self._moved = np.zeros((BATCH, 3), np.int64)
        self._memory = self._messages, self._iovecs, self.order
        self._address = self._messages.ctypes.data
        self._controls: dict[int, NDArray[np.uint64]] = {}

    def point(self, rank: int, target: tuple[str, int]) -> None:
        """Bursts for ``rank``, or a shared channel of that number, go to ``target`` (IP address, UDP port)."""
        if self._targets.get(rank) == target:
            return
        self._targets[rank] = target
        self._names[rank] = np.frombuffer(sockaddr(target), np.uint64)
        self._pointers[rank] = self._names[rank].ctypes.data

    def fill(self, flows: NDArray[np.int64], stride: int, channel: int = 0, most: int = BATCH) -> int:
        """Prepares the next bursts of ``flows`` over ``channel``, at most ``most``; returns how many."""
        control = self._controls.get(stride)
        if control is None:
            # cmsghdr: length 18, level and type, segment size
            control = self._controls[stride] = np.array(
                [18, socket.IPPROTO_UDP | _UDP_SEGMENT << 32, stride], np.uint64
            )
        return int(fill(flows, min(most, BATCH), channel, self._pointers, control, *self._memory))

    def send(self, sock: Socket, count: int) -> tuple[int, int]:
        """Hands over the first ``count`` messages; returns how many were taken, and the errno if none was."""
        return sock.send_many(self._address, count)

    def settle(self, flows: NDArray[np.int64], taken: int) -> tuple[int, list[tuple[int, int, int]]]:
        """The first ``taken`` messages have left (or are given up).

        Returns:
            Packets left; flow, packets and bursts of every flow that has moved on.
        """
        left, count = settle(flows, self.order, taken, self._moved)
        return left, self._moved[:count].tolist()
