"""Before the first op, every rank shows that it hears every other: over UDP, both ways, and as wide as a row.

Where UDP is dropped (a firewall, a security group) or full rows are (an MTU on the path), training would run to its
end with nothing averaged. So every rank sends every peer HELLO packets, a small one and one as wide as a row, again
until the peer says that it has heard the wide one. When it has heard all peers, or ``LIMIT`` has passed, it writes what
it lacks into the store, and all ranks read all of it: they refuse alike, and name who does not hear whom.

All of it is sent before the transport thread starts; who is through goes on answering until everybody has written.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailbound.collective.job import Job, log
from tailbound.errors import TransportError
from tailbound.transport import rendezvous
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import DEFAULT_PORT, MS
from tailbound.transport.rendezvous import Greeting, Store
from tailbound.wire.address import ip_bytes
from tailbound.wire.schema import FIRST_DROP, HEADER_BYTES, UDP_BYTES, Flag, PacketType, Verdict

#: How long a peer is tried, in ns: at a loss of one half each way, all tries fail once in 10^8.
LIMIT = 10_000 * MS
#: How a peer is tried again.
TRIES = Policy(20 * MS, 320 * MS)
#: What can be heard of a peer, as bits.
SMALL, WIDE = 1, 2
#: Lines of a refusal at most.
_LINES = 8


class Hello:
    """Whom to send what, and what was heard; pure, with the time passed in (ns).

    Args:
        peers: ranks to hear, in the order in which to try them.
        now: when it begins.
    """

    def __init__(self, peers: Iterable[int], now: int) -> None:
        self.heard = dict.fromkeys(peers, 0)  #: bits, of what has come from a peer
        self.told = dict.fromkeys(self.heard, 0)  #: bits, of what a peer has said to have come from here
        self._tries = {peer: Backoff(TRIES, now) for peer in self.heard}

    @property
    def complete(self) -> bool:
        """Whether rows come from every peer."""
        return all(bits & WIDE for bits in self.heard.values())

    @property
    def look(self) -> int:
        """When to call ``turn`` again; 0: there is nothing to send unless something comes."""
        return min((self._tries[p].due for p in self.heard if not self._settled(p)), default=0)

    def _settled(self, peer: int) -> bool:
        return bool(self.heard[peer] & self.told[peer] & WIDE)

    def turn(self, now: int) -> list[int]:
        """Peers that are to be sent a small and a wide packet now, as questions."""
        due = [p for p in self.heard if not self._settled(p) and self._tries[p].due <= now]
        for peer in due:
            self._tries[peer].ask(now)
        return due

    def take(self, peer: int, *, wide: bool, says: int) -> None:
        """A packet of ``peer`` has come, which says what has come there from here."""
        self.heard[peer] |= WIDE if wide else SMALL
        self.told[peer] |= says


@dataclass(frozen=True)
class Report:
    """What one rank has to say at the end.

    Attributes:
        deaf: peers of which nothing has come.
        narrow: peers of which only small packets have come.
        refused: what it has dropped, by the name of the verdict.
        unsent: why packets for a peer could not leave.
    """

    deaf: list[int] = field(default_factory=list)
    narrow: list[int] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    unsent: dict[str, str] = field(default_factory=dict)


def prove(
    job: Job, store: Store, prefix: str, greetings: Sequence[Greeting], bulk: Sequence[socket.socket], timeout: float
) -> list[bytes]:
    """Shows that all ranks hear each other; to be called when all let packets in, before the transport thread starts.

    Args:
        bulk: the sockets that rows leave over; wide packets take them in turn.
        timeout: seconds to wait for what the other ranks have to say.

    Returns:
        Control packets that were not for this: of peers that are through and have begun.

    Raises:
        TransportError: two ranks do not hear each other; the same on all ranks, naming them.
    """
    talk, begun = _Talk(job, bulk), job.now()
    reports: list[Report] = []
    failed: list[BaseException] = []

    def tell() -> None:
        try:
            told = json.dumps(vars(talk.report()))
            said = rendezvous.share(store, "heard", told, job.rank, job.ranks, prefix, timeout)
            reports.extend(Report(**json.loads(text)) for text in said)
        except BaseException as error:
            failed.append(error)
        finally:
            talk.stop()

    while not talk.hello.complete and job.now() < begun + LIMIT:
        talk.turn(begun + LIMIT)
    teller = threading.Thread(target=tell, name="tailbound-hello", daemon=True)
    teller.start()
    while not talk.stopped:  # a peer may still lack an answer
        talk.turn(job.now() + TRIES.most)
    teller.join()
    talk.close()
    if failed:
        raise failed[0]
    lines = complaints(greetings, reports, job.store.width)
    if lines:
        more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        raise TransportError(
            "\n  ".join([f"rank {job.rank}: UDP does not pass between all ranks:", *lines[:_LINES], *more, _PORTS])
        )
    log.info("rank %d: hears all peers over UDP, after %.1f ms", job.rank, (job.now() - begun) / 1e6)
    return talk.others


#: What a user may not know.
_PORTS = (
    "The udp datapath takes any free port, or one of 64 from TAILBOUND_PORT on where that is set; xdp has the port "
    f"that it was attached for ({DEFAULT_PORT})."
)


class _Talk:
    """Sends and receives for ``prove``."""

    def __init__(self, job: Job, bulk: Sequence[socket.socket]) -> None:
        self._job, self._bulk = job, bulk
        self._tries = 0
        self._unsent: dict[int, str] = {}
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        for fd in (job.datapath.fds()[1], self._wake):
            self._poll.register(fd, select.POLLIN)
        self.stopped = False
        self.others: list[bytes] = []
        self.hello = Hello(job.peers, job.now())

    def turn(self, until: int) -> None:
        """Sends what is due, and takes what has come, waiting for it until ``until`` (ns) at most."""
        job = self._job
        for peer in self.hello.turn(job.now()):
            self._say(peer, ask=True)
        look = min(self.hello.look or until, until)
        if self._poll.poll(max(0, look - job.now()) / MS):
            for data in job.datapath.control_packets():
                self._take(data)

    def _take(self, data: bytes) -> None:
        job = self._job
        parsed = job.unpack(data)
        if parsed is None:
            return
        head, body = parsed[0][0], parsed[1]
        if head["type"] != PacketType.HELLO:
            self.others.append(data)
            return
        peer = int(head["sender"])
        if int(head["cookie"]) == job.cookie and peer in self.hello.heard and int(head["owner"]) == job.rank:
            wide = len(body) >= job.store.width
            self.hello.take(peer, wide=wide, says=int(head["seq"]))
            if int(head["flags"]) & Flag.REPEAT and wide:  # the small one of a pair is no question more
                self._say(peer, ask=False)

    def _say(self, peer: int, *, ask: bool) -> None:
        """A small packet and, as long as the peer lacks it, a wide one."""
        job = self._job
        flags = Flag.REPEAT if ask else Flag(0)
        head = job.header(
            PacketType.HELLO, job.marks.contributed, 0, owner=peer, seq=self.hello.heard[peer], flags=flags
        )
        self._send(job.datapath.socket, peer, job.pack(head, b""))
        if ask or not self.hello.told[peer] & WIDE:
            self._tries += 1
            wide = job.pack(head, bytes(job.store.width))
            self._send(self._bulk[(peer + self._tries) % len(self._bulk)], peer, wide)

    def _send(self, sock: socket.socket, peer: int, packet: bytes) -> None:
        try:
            sock.sendto(packet, self._job.sender.peers[peer])
            self._job.sender.took(peer, 1, len(packet), 1)
        except OSError as error:  # full: as good as lost
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ECONNREFUSED):
                self._unsent[peer] = f"{error.strerror} ({len(packet) - HEADER_BYTES} bytes and the headers)"

    def report(self) -> Report:
        """What this rank has to say; while all is well, nothing."""
        heard = self.hello.heard
        bad = [p for p, bits in heard.items() if not bits & WIDE]
        drops = self._job.records.verdicts()[:, FIRST_DROP:].sum(axis=0) if bad else ()
        return Report(
            deaf=sorted(p for p in bad if not heard[p]),
            narrow=sorted(p for p in bad if heard[p]),
            refused={Verdict(FIRST_DROP + i).name: int(n) for i, n in enumerate(drops) if n},
            unsent={str(p): why for p, why in sorted(self._unsent.items())},
        )

    def stop(self) -> None:
        """From another thread: nothing more is to be said, and a turn that waits ends."""
        self.stopped = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Nobody will ``stop`` it any more."""
        os.close(self._wake)


def complaints(greetings: Sequence[Greeting], reports: Sequence[Report], width: int) -> list[str]:
    """One line for each rank that lacks others, with what to do; ``width`` codes are a full row."""
    lines = []
    for rank, report in enumerate(reports):
        at = greetings[rank]
        size = ip_bytes(at.address) + UDP_BYTES + HEADER_BYTES + width
        if report.deaf:
            them = _some(greetings[p].address for p in report.deaf)
            lines.append(
                f"rank {rank} does not hear {_ranks(report.deaf)}: nothing from {them} came to UDP port {at.port} of "
                f"{at.address}; let it in (firewall, security group, routes){_dropped(report)}"
            )
        if report.narrow:
            them = _some(greetings[p].address for p in report.narrow)
            lines.append(
                f"rank {rank} hears {_ranks(report.narrow)}, but no packets of {size} bytes from {them}: the path's "
                "MTU is below that of the interfaces; lower theirs on all hosts (ip link set dev INTERFACE mtu ...; "
                f"with xdp: tailbound attach --mtu ...){_dropped(report)}"
            )
        for peer, why in report.unsent.items():
            lacks = reports[int(peer)]
            if rank in lacks.deaf or rank in lacks.narrow:  # else it has arrived after all
                lines.append(f"rank {rank} cannot send to rank {peer} at {greetings[int(peer)].address}: {why}")
    return lines


def _dropped(report: Report) -> str:
    if not report.refused:
        return ""
    names = ", ".join(f"{count} {name}" for name, count in report.refused.items())
    more = ": are addresses translated on the way?" if Verdict.WRONG_ADDRESS.name in report.refused else ""
    return f"; it has refused packets ({names}){more}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_some(map(str, ranks))}"


def _some(names: Iterable[Any]) -> str:
    every = list(dict.fromkeys(names))
    return ", ".join(every[:8]) + (f" and {len(every) - 8} more" if len(every) > 8 else "")
