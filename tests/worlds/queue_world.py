"""What tests of the send queue share: sockets that do as they are told, and packets."""

from __future__ import annotations

import ctypes
import errno
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailbound.collective.speaker import Marks, Voice
from tailbound.kernel.core import address
from tailbound.transport.control import Header
from tailbound.transport.keys import KeyRing
from tailbound.transport.pace import Pacer
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender, Shared
from tailbound.transport.sockets import Socket
from tailbound.wire.packets import DTYPES, record_of
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import HEADER_BYTES, MAX_RANKS, ROW_STEP, TERMS, VERSION, PacketType
from tailbound.wire.tag import NO_KEY
from tailbound_lab.simulate.messages import read

ADDRESS, STRIDE, COOKIE = "127.0.0.1", 128, 77
MS = 1_000_000
#: Bytes of a probe.
PROBE = HEADER_BYTES + ROW_STEP
#: A time that never comes.
LATER = 1 << 62


class Told:
    """What rank 0 of four ranks, the last of them a switch if ``ranks`` is 3, has been told by the others.

    Attributes:
        states: marks and echoes, by rank.
        terms: with what is decided from them.
        marks: the own ones.
        voice: for a ``SendQueue``.
    """

    def __init__(self, keys: KeyRing | None = None, ranks: int = 4) -> None:
        self.states = np.zeros(MAX_RANKS, DTYPES["tb_peer_state"])
        self.terms = record_of(TERMS)(states=address(self.states), cookie=COOKIE, ranks=ranks, world=4)
        self.marks, self._head = Marks(), Header(version=VERSION, cookie=COOKIE, sender=0)
        self._key = keys.now if keys else NO_KEY
        self.voice = Voice(
            ctypes.addressof(self.terms), 0, ctypes.addressof(self._head), ctypes.addressof(self.marks),
            address(self._key), width=STRIDE - HEADER_BYTES,
        )  # fmt: skip

    def published(self, op: int, *ranks: int) -> None:
        """``ranks`` have said so of ``op``."""
        for rank in ranks:
            self.states["published"][rank], self.states["cookie"][rank] = op, COOKIE

    def gone(self, *ranks: int) -> None:
        """These have left."""
        self.terms.gone[:] = bitmap(ranks)


class Kernel:
    """Behind all sockets of a sender: takes and fails as it is told to, remembers (rank, packets) of each burst.

    Attributes:
        script: for the next calls, errno, or minus the number of messages to take.
        always: the same for all others.
        taken: bursts.
        data: what was in them, by rank.
        single: (target, packet) of single packets.
        probes: (rank, packet) of probes.
        calls: (socket, bursts that it took) of each call.
        stuck: sockets that are full.
    """

    def __init__(self, sender: Sender) -> None:
        self.script: list[int] = []
        self.always = 0
        self.taken: list[tuple[int, int]] = []
        self.data: defaultdict[int, bytearray] = defaultdict(bytearray)
        self.single: list[tuple[tuple[str, int], bytes]] = []
        self.probes: list[tuple[int, bytes]] = []
        self.calls: list[tuple[int, int]] = []
        self.stuck: set[int] = set()
        self._ranks = {target: rank for rank, target in sender.peers.items()}
        self._ranks |= {channel.target: number for number, channel in sender.shared.items()}
        for port, sock in enumerate(sender.sockets):
            told: Any = SimpleNamespace(fileno=sock.fileno, room=sock.room, send_many=partial(self.send_many, port))
            sender.sockets[port] = told

    def send_many(self, port: int, messages: int, count: int) -> tuple[int, int]:
        step = self.script.pop(0) if self.script else self.always
        if step > 0 or port in self.stuck:
            return 0, step or errno.EAGAIN
        taken = min(count, -step) if step else count
        sent = read(messages, taken)
        if len(sent[0].data) % STRIDE and sent[0].data[1:2] != bytes([PacketType.PROBE]):
            self.single += [(message.target, message.data) for message in sent]
            return taken, 0
        if len(sent[0].data) == PROBE:
            self.probes += [(self._ranks[message.target], message.data) for message in sent]
            return taken, 0
        self.calls.append((port, taken))
        for message in sent:
            rank = self._ranks[message.target]
            self.taken.append((rank, len(message.packets)))
            self.data[rank] += message.data
        return taken, 0


def memory(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, STRIDE), np.uint8)


class Line:
    """A queue to ranks 1, 2 and 3 over ``sockets``, which do as ``kernel`` is told."""

    def __init__(
        self, sockets: Sequence[Socket], pacer: Pacer | None = None, shared: Shared | None = None, **more: Any
    ) -> None:
        self.sender = Sender(sockets, {rank: (ADDRESS, 9000 + rank) for rank in (1, 2, 3)})
        if shared is not None:
            self.sender.share(shared)
        self.queue = SendQueue(self.sender, pacer, **more)
        self.kernel = Kernel(self.sender)
        self._kept: list[Any] = []

    @property
    def taken(self) -> list[tuple[int, int]]:
        return self.kernel.taken

    @property
    def gone(self) -> int:
        """Packets that have left of the submissions that are over."""
        return int(self.queue.said.contributions + self.queue.said.results)

    def submit(
        self, op: int, kind: PacketType, *runs: tuple[int, int], now: int = 0, until: int = LATER, **more: Any
    ) -> None:
        """Rows of ``op``, given as (rank, packets)."""
        given = [(rank, memory(count, seed=rank)) for rank, count in runs]
        self._kept.append(given)
        self.queue.submit(op, kind, given, until, now, **more)

    def go(self, now: int = 1) -> None:
        """Sockets have room from now on."""
        self.kernel.always = 0
        self.queue.pump(now)

    def rest(self, now: int) -> int:
        """Pumps whenever the queue says so until it is empty; when that is."""
        while not self.queue.empty:
            now = max(now, self.queue.again)
            self.queue.pump(now)
        return now
