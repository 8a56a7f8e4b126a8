"""Round trips to every peer: small PROBE packets behind bursts, turned round by the peer's kernel (XDP_TX).

The time of sending travels in the packet, and the program that receives the echo stores the difference
(``peer_states.rtt_ns``), so no process needs to be awake at either end. On the udp datapath the receiving threads do
both: the round trip then contains two wake-ups of threads, and ``by`` says so.

One probe per peer is on the way at a time: what it measures is the queue behind the decisions made so far. Its echo
also says how many of our packets have come there with CE (congestion experienced, RFC 3168): the receiver counts, and
the sender knows what share that is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.transport.keys import KeyRing
from tailbound.wire import packets
from tailbound.wire.proof import proof_of
from tailbound.wire.schema import HEADER_BYTES, ROW_STEP, PacketType
from tailbound.wire.tag import NO_KEY

_WORD, _CHECK_AT = struct.Struct(">Q"), packets.offset_of("check")
#: Bytes to a peer between two probes: a few bursts.
EVERY = 192 * 1024
#: ns after which a probe without an echo counts as lost. Longer than any queue that the pacer lets stand.
LOST = 100_000_000


def risen(before: int, now: int) -> int:
    """By how much a count of 32 bits has risen; 0 if it has fallen, since then it was begun anew."""
    difference = (now - before) & 0xFFFFFFFF
    return difference if difference < 1 << 31 else 0


class Echo(NamedTuple):
    """What came back with a probe."""

    peer: int
    rtt: int  #: round trip without what the probe waited in this host's own queues, ns
    whole: int  #: round trip with that, ns
    sent: int  #: bytes that left for the peer between this probe and the one before
    marked: float  #: share of their packets that came with CE


class Prober:
    """When to probe which peer, the probe packets, and what came back.

    Args:
        cookie, rank: of the job and of this rank.
        peers: ranks to probe.
        states: ``peer_states`` of the datapath.
        keys: of the job, where it has a key.
        by: who turns probes round and measures: the ``kernel`` (xdp) or a ``thread`` (udp).
    """

    def __init__(
        self,
        cookie: int,
        rank: int,
        peers: Iterable[int],
        states: NDArray[Any],
        by: Literal["kernel", "thread"],
        keys: KeyRing | None = None,
    ) -> None:
        self._keys, self._by = keys, by
        # a thread's echo waits behind its own rank's rows, about as long as the probe did behind ours
        self._ways = 2 if by == "thread" else 1
        self.sent = self.echoes = self.marked = 0
        self._rtt, self._told = states["rtt_ns"], states["told"]
        self._packets: dict[int, NDArray[np.uint8]] = {}
        for peer in peers:
            head = packets.header(type=PacketType.PROBE, cookie=cookie, sender=rank, owner=peer)
            self._packets[peer] = np.frombuffer(packets.packet(head, bytes(ROW_STEP)), np.uint8).copy()
        self._bytes = dict.fromkeys(self._packets, EVERY)  # since the last probe
        self._count = dict.fromkeys(self._packets, 0)  # packets, likewise
        #: by peer on whose echo we wait: time of sending, value in ``rtt_ns`` before, bytes since the probe before,
        #: packets since the last one that has come back, and ns that it waits in own queues
        self._waiting: dict[int, tuple[int, int, int, int, int]] = {}
        self.missed = dict.fromkeys(self._packets, 0)  #: by peer: probes lost running
        self._marks: dict[int, int] = {}  # by peer: own packets that came there with CE, by its last echo

    @property
    def by(self) -> str:
        """Who measures round trips: ``kernel``, ``thread``, or ``nobody`` as long as no probe has come back."""
        return self._by if self.echoes else "nobody"

    @property
    def waits(self) -> bool:
        """Whether an echo may still come."""
        return bool(self._waiting)

    def left(self, peer: int, size: int, packets: int, now: int, limited: bool) -> bool:
        """``packets`` of ``size`` bytes together have left for ``peer``.

        Returns:
            Whether it is to be probed behind them; a ``limited`` one always is.
        """
        self._count[peer] += packets
        self._bytes[peer] = size = self._bytes[peer] + size
        if size < EVERY and not limited:
            return False
        waiting = self._waiting.get(peer)
        if waiting is None:
            return True
        if now - waiting[0] < LOST + self._ways * waiting[4]:  # what waits in own queues is not lost yet
            return False
        self.missed[peer] += 1
        return True

    def due_in(self, peer: int, limited: bool) -> int:
        """Bytes to ``peer`` after which a probe is due, unless one is on the way."""
        if peer in self._waiting:
            return EVERY
        return 0 if limited else EVERY - self._bytes[peer]

    def packet(self, peer: int, now: int, held: int = 0) -> NDArray[np.uint8]:
        """The probe to send at once: u8[80]; it counts as on the way from here.

        ``held``: ns that it waits in this host's own queues, and which are no part of its round trip.
        """
        data = self._packets[peer]
        _WORD.pack_into(data.data, HEADER_BYTES, now)
        key = NO_KEY if self._keys is None else self._keys.now
        _WORD.pack_into(data.data, _CHECK_AT, int(proof_of(data, key)))
        given_up = self._waiting.get(peer)  # the next echo tells the marks of its packets, too
        count = self._count[peer] + (given_up[3] + 1 if given_up is not None else 0)
        self._waiting[peer] = now, int(self._rtt[peer]), self._bytes[peer], count, held
        self._bytes[peer] = self._count[peer] = 0
        self.sent += 1
        return data

    def collect(self, now: int) -> list[Echo]:
        """Echoes since the last call."""
        found = []
        for peer, (sent, before, size, count, held) in self._waiting.items():
            rtt = int(self._rtt[peer])
            if rtt != before and 0 < rtt <= now - sent:  # a longer one is that of a probe given up before
                found.append(Echo(peer, max(1, rtt - self._ways * held), rtt, size, self._marked(peer, count)))
        for echo in found:
            del self._waiting[echo.peer]
            self.missed[echo.peer] = 0
        self.echoes += len(found)
        return found

    def _marked(self, peer: int, count: int) -> float:
        """Share of ``count`` packets, and the probe behind them, that were marked; 0 with the first echo."""
        told = int(self._told[peer])
        marks = risen(self._marks.get(peer, told), told)
        self._marks[peer] = told
        self.marked += marks
        return min(1.0, marks / (count + 1))
