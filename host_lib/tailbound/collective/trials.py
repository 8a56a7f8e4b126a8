"""Tries of the way to a peer, by HELLO packets: a small one, one as wide as a row, and a burst of such.

They are sent before the first op (``hello``), and later where rows stop arriving (``paths``). The burst leaves by
segmentation offload, as rows do: there are kernels and drivers that take one and send nothing, or something else.

Fields of a HELLO: ``row`` numbers the sender's trials of this receiver, and ``rows`` is the packet's place in a burst,
from 1 on (0: a single one). ``count`` and ``seq`` answer: the newest trial of the receiver that was heard of, and what
has come of it, kinds in the lowest byte and packets of bursts above it.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tailbound.collective.speaker import Speaker
from tailbound.transport.backoff import Policy
from tailbound.transport.batch import burst_packets, send_burst
from tailbound.transport.config import MS
from tailbound.transport.sender import FULL
from tailbound.wire.schema import HEADER_BYTES, Flag, PacketType

#: What can come of a trial, as bits.
SMALL, WIDE, BURST = 1, 2, 4
#: How long a peer is tried, in ns: at a loss of one half each way, all tries fail once in 10^8.
LIMIT = 10_000 * MS
#: How a peer is tried again.
TRIES = Policy(20 * MS, 320 * MS)
#: Answers that tell of single packets and of no burst, after which offload counts as broken. The first try has two.
ANSWERS = 5
#: Packets in the bursts to all peers together, about, and of one at least and at most.
_ALL, _LEAST, _MOST = 128, 4, 64
_KINDS = 0xFF


class Said(NamedTuple):
    """A packet of a peer.

    Attributes:
        peer: who sent it.
        answer: to a try, and not one of the peer's own.
        heard: what of the peer's trial came with it, as bits.
        trial: own trial that it answers.
        told: what the peer has heard of that one, as bits.
        arrived: packets of its bursts that have come there.
    """

    peer: int
    answer: bool
    heard: int
    trial: int
    told: int
    arrived: int


@dataclass
class _Heard:
    """Arrivals of a peer's newest trial: its number, kinds as bits, and places in bursts as bits."""

    trial: int = 0
    kinds: int = 0
    places: int = 0


class Trials:
    """Sends, hears and answers HELLO packets.

    Args:
        job: of the rank.

    Attributes:
        burst: packets of a burst; half of them have to arrive.
        refused: errno by peer, where the system refused the last wide packet.
    """

    def __init__(self, job: Speaker) -> None:
        self._job = job
        stride = HEADER_BYTES + job.store.width
        self.burst = min(burst_packets(stride), _MOST, max(_LEAST, _ALL // max(1, len(job.peers))))
        self.refused: dict[int, int] = {}
        self.peers = frozenset(job.peers)
        self._heard = {peer: _Heard() for peer in job.peers}
        self._sent = 0

    def ask(self, peer: int, trial: int) -> None:
        """Sends the packets of one try, the small one last: its answer covers the others, if they have come before."""
        wide, sender = bytes(self._job.store.width), self._job.sender
        ports = sender.ports[sender.channel[peer]]
        self._sent += 1
        port = ports[self._sent % len(ports)]
        self._send(port, peer, [self._packet(peer, trial, place + 1, wide) for place in range(self.burst)])
        number = self._send(port, peer, [self._packet(peer, trial, 0, wide)])
        if number in FULL or number == errno.ECONNREFUSED:  # as good as lost
            number = 0
        self.refused[peer] = number
        number = self._send(0, peer, [self._packet(peer, trial, 0)])
        if number not in FULL and number != errno.ECONNREFUSED:
            self.refused[peer] = number or self.refused[peer]

    def _packet(self, peer: int, trial: int, place: int, body: bytes = b"", *, ask: bool = True) -> bytes:
        heard = self._heard[peer]
        kinds = heard.kinds | heard.places.bit_count() << 8
        flags = int(Flag.REPEAT) if ask else 0
        head = self._job.header(
            PacketType.HELLO, self._job.marks.contributed, 0, flags=flags, row=trial, rows=place,
            count=heard.trial, seq=kinds,
        )  # fmt: skip
        return self._job.word(peer, head, body)

    def _send(self, port: int, peer: int, packets: list[bytes]) -> int:
        """Sends ``packets``, of one length, in one burst; returns 0 or the errno of what refused it."""
        sender = self._job.sender
        if len(packets) == 1:
            number = sender.sockets[port].send_one(packets[0], sender.peers[peer])
        else:
            number = send_burst(sender.sockets[port], sender.peers[peer], b"".join(packets), len(packets[0]))
        if not number:
            sender.took(peer, len(packets), sum(map(len, packets)), 1)
        return number

    def receive(self, head: np.void, body: bytes) -> Said:
        """Takes a HELLO packet of a peer, and answers a question."""
        peer, trial, place = int(head["sender"]), int(head["row"]), int(head["rows"])
        kind, answer = 0, not int(head["flags"]) & Flag.REPEAT
        if not answer:
            heard = self._heard[peer]
            if trial != heard.trial:
                self._heard[peer] = heard = _Heard(trial)
            if place:
                heard.places |= 1 << place - 1
                kind = BURST if 2 * heard.places.bit_count() >= self.burst else 0
            else:
                kind = WIDE if len(body) >= self._job.store.width else SMALL
            news = kind & ~heard.kinds
            heard.kinds |= kind
            if news or kind == SMALL:
                self._send(0, peer, [self._packet(peer, 0, 0, ask=False)])
        told = int(head["seq"])
        return Said(peer, answer, kind, int(head["count"]), told & _KINDS, told >> 8)
