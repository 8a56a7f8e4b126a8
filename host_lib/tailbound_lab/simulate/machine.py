"""What a simulated rank has of its machine: sockets, receiving thread, wake-ups, heartbeat, wait for a core."""

from __future__ import annotations

import errno
import math
import mmap
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.protocol import Store, layouts, store_of
from tailbound.datapath.udp import CONTROL_HEAD, CONTROL_TAIL, EVENT_HEAD, EVENT_TAIL, Tables
from tailbound.kernel.core import core
from tailbound.transport.sockets import UdpSocket
from tailbound.wire.address import words_of
from tailbound.wire.schema import Ready
from tailbound_lab.simulate.fabric import Burst, Fabric
from tailbound_lab.simulate.messages import read

PORT = 5515
COOKIE = 0x5EED
#: Bytes of a burst at most, and a word.
_LONGEST = (64 << 10) + 8
_LINE = 64
#: Where the state of the datapath's queues is, by their bits.
_QUEUES = (Ready.EVENTS, EVENT_HEAD, EVENT_TAIL), (Ready.CONTROLS, CONTROL_HEAD, CONTROL_TAIL)


@cache
def address(rank: int) -> str:
    """Of a simulated rank: one that no host has (RFC 2544), since a job asks for the speed of its own interface."""
    high, low = divmod(1 + rank, 256)
    return f"198.18.{high}.{low}"


@cache
def source(rank: int) -> NDArray[np.uint32]:
    """``address`` as ``tb_take_in`` takes it."""
    words = words_of(address(rank))
    return np.array([*words.prefix, words.address], np.uint32)


@cache
def _place(of: int) -> int:
    """Where its ``source`` lies."""
    return source(of).ctypes.data


@cache
def _rank_of(host: str) -> int:
    _, _, high, low = host.split(".")
    return 256 * int(high) + int(low) - 1


def _zeros(width: int, rows: int, result_rows: int) -> dict[str, NDArray[Any]]:
    """Memory for every worker map, of which only pages are there that are written: numpy takes 2 MiB at once."""
    sizes = layouts(width, rows, result_rows, cpus=1)
    ends = list(accumulate(-(-math.prod(dims) * dtype.itemsize // _LINE) * _LINE for dtype, dims in sizes.values()))
    memory = mmap.mmap(-1, ends[-1], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return {
        name: np.frombuffer(memory, dtype, math.prod(dims), begin).reshape(dims)
        for begin, (name, (dtype, dims)) in zip([0, *ends], sizes.items(), strict=False)
    }


class Datapath:
    """The udp datapath's tables without its socket and thread (``datapath.protocol.Datapath``).

    ``rows`` and ``result_rows`` are those of the rings of sums and results, ``width`` entries each.
    """

    name = "udp"
    interface = ""
    gap = 0
    active = 1
    lost_on_arrival: ClassVar[dict[str, int]] = {}
    withdrawn = False
    #: of one datapath after the other
    _echoes = np.zeros((64, 2), np.uint32)
    _buffer = np.zeros(_LONGEST, np.uint8)
    _places = _buffer.ctypes.data, _echoes.ctypes.data

    def __init__(self, rank: int, width: int, rows: int, result_rows: int, wire: Wire) -> None:
        self.tables = Tables(_zeros(width, rows, result_rows))
        self.source = self.tables.source
        self.store: Store = store_of(self.tables.arrays)
        self.endpoint = address(rank), PORT
        self.socket = cast(UdpSocket, wire)
        self.taken = 0

    def feed(self, burst: Burst, now: int) -> list[bytes]:
        """Takes in what has arrived; the echoes to send back."""
        buffer, size = self._buffer, len(burst.data)
        buffer[:size] = np.frombuffer(burst.data, np.uint8)
        segment = burst.stride if size > burst.stride else 0
        data, echoed = self._places
        # a prober knows an echo by a round trip unlike the last one to the nanosecond; here all could be alike
        now += self.taken % 61
        count = core().fast.tb_take_in(
            self.tables.address, data, size, segment, _place(burst.source), now, burst.marked, echoed, 64
        )
        self.taken += burst.count
        if not count:
            return []
        echoes = self._echoes[:count].tolist()
        return [buffer[at : at + length].tobytes() for at, length in echoes]

    def reset(self, first_op: int) -> None:
        """See ``Datapath``."""
        self.source.seal((first_op - 1) & 0xFFFFFFFF, 0, self.store.sum_rows)

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        """See ``Datapath``."""
        self.tables.put_key(epoch, key)

    def fds(self) -> tuple[int, int]:
        """None: they are not waited for."""
        return -1, -1

    def sending(self, peers: int) -> list[UdpSocket]:
        """See ``Datapath``."""
        return [self.socket]

    def fence(self) -> None:
        """See ``Datapath``."""

    def close(self) -> None:
        """See ``Datapath``."""


class Wire:
    """A rank's socket (``transport.sockets.Socket``): what is sent goes to the fabric, as long as there is room."""

    def __init__(self, rank: int, fabric: Fabric, job: int = 0) -> None:
        self._rank, self._fabric, self._job = rank, fabric, job
        #: (to whom, packets) -> what of them leaves
        self.trouble: Callable[[int, list[bytes]], list[bytes]] | None = None

    def fileno(self) -> int:
        """None that exists."""
        return -1

    def room(self) -> int:
        """See ``Socket``."""
        return self._fabric.terms.room

    def send_one(self, packet: bytes, target: tuple[str, int], stride: int = 0) -> int:
        """See ``Socket``."""
        if not self._fabric.has_room(self._rank, self._job):
            return errno.EAGAIN
        self._send(target[0], packet, stride or len(packet))
        return 0

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        """See ``Socket``."""
        for i, message in enumerate(read(messages, count)):
            if not self._fabric.has_room(self._rank, self._job):
                return (i, 0) if i else (0, errno.EAGAIN)
            self._send(message.target[0], message.data, message.stride)
        return count, 0

    def _send(self, host: str, data: bytes, stride: int) -> None:
        burst = Burst(self._rank, _rank_of(host), data, stride, self._job)
        if self.trouble is None:
            self._fabric.send(burst)
            return
        kept = self.trouble(burst.to, burst.packets())
        alike = [packet for packet in kept if len(packet) == stride]
        rest = [packet for packet in kept if len(packet) != stride]
        for packets, length in ((alike, stride), *(([packet], len(packet)) for packet in rest)):
            if packets:
                self._fabric.send(Burst(self._rank, burst.to, b"".join(packets), length, self._job))


def readable(tables: Tables) -> int:
    """Which queues have something (``schema.Ready``)."""
    return sum(bit for bit, head, tail in _QUEUES if tables.state[head] != tables.state[tail])


class Heartbeat:
    """For ``holding.Heartbeat``: no thread; nothing is repeated."""

    def __init__(self, peers: int) -> None:
        self._peers = peers

    def said(self, packets: list[bytes], now: int) -> None:
        """See ``holding.Heartbeat``."""

    def stop(self) -> list[int]:
        """See ``holding.Heartbeat``."""
        return [0] * self._peers
