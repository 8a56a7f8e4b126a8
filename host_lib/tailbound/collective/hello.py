"""Before the first op, every rank shows that it hears every other: over UDP, both ways, wide rows, and bursts of them.

Where UDP is dropped (a firewall, a security group) or full rows are (an MTU on the path), training would run to its
end with nothing averaged. So every rank tries the way to every peer (``trials``), again until the peer says what it has
heard. When it has heard all peers and knows what they have heard, or ``LIMIT`` has passed, it writes what it lacks into
the store, and all ranks read all of it: they refuse alike, and name who does not hear whom. Peers that single packets
reach and bursts do not are sent to without segmentation offload (``paths`` says so).

All of it is sent before the transport thread starts; who is through goes on answering until everybody has written.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailbound.collective.job import Job, log
from tailbound.collective.trials import ANSWERS, BURST, LIMIT, TRIES, WIDE
from tailbound.errors import TransportError
from tailbound.transport import rendezvous
from tailbound.transport.backoff import Backoff
from tailbound.transport.config import DEFAULT_PORT, MS
from tailbound.transport.rendezvous import Greeting, Store, spoken
from tailbound.wire.address import ip_bytes
from tailbound.wire.schema import FIRST_DROP, HEADER_BYTES, UDP_BYTES, PacketType, Verdict

#: The only trial before the first op.
FIRST = 1
#: Lines of a refusal at most.
_LINES = 8


class Hello:
    """Whom to try when, and what was heard; pure, with the time passed in (ns).

    Args:
        peers: ranks to hear, in the order in which to try them.
        now: when it begins.
    """

    def __init__(self, peers: Iterable[int], now: int) -> None:
        self.heard = dict.fromkeys(peers, 0)  #: bits, of what has come from a peer
        self.told = dict.fromkeys(self.heard, 0)  #: bits, of what a peer has said to have come from here
        self._answers = dict.fromkeys(self.heard, 0)
        self._tries = {peer: Backoff(TRIES, now) for peer in self.heard}

    @property
    def complete(self) -> bool:
        """Whether rows come from every peer, and whether bursts reach every peer is known."""
        return all(bits & WIDE and self._knows(p) for p, bits in self.heard.items())

    @property
    def due(self) -> int:
        """When to call ``poll`` again; 0: there is nothing to send unless something comes."""
        return min((self._tries[p].due for p in self.heard if not self._settled(p)), default=0)

    @property
    def plain(self) -> set[int]:
        """Peers that bursts have not reached."""
        return {p for p, bits in self.told.items() if not bits & BURST}

    def _knows(self, peer: int) -> bool:
        """Whether bursts reach ``peer``, or never will."""
        told = self.told[peer]
        return bool(told & BURST) or (bool(told & WIDE) and self._answers[peer] >= ANSWERS)

    def _settled(self, peer: int) -> bool:
        return bool(self.heard[peer] & self.told[peer] & WIDE) and self._knows(peer)

    def poll(self, now: int) -> list[int]:
        """Peers that are to be tried now."""
        due = [p for p in self.heard if not self._settled(p) and self._tries[p].due <= now]
        for peer in due:
            self._tries[peer].ask(now)
        return due

    def receive(self, peer: int, heard: int, says: int, *, answer: bool = True) -> None:
        """A packet of ``peer`` has come, of kind ``heard``, and says what has come there from here; bits.

        ``answer``: to a try, and not one of the peer's own.
        """
        self.heard[peer] |= heard
        self.told[peer] |= says
        self._answers[peer] += answer


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


def prove(job: Job, store: Store, prefix: str, greetings: Sequence[Greeting], timeout: float) -> list[bytes]:
    """Shows that all ranks hear each other; to be called when all let packets in, before the transport thread starts.

    Args:
        timeout: seconds to wait for what the other ranks have to say.

    Returns:
        Control packets that were not for this: of peers that are through and have begun.

    Raises:
        TransportError: two ranks do not hear each other; the same on all ranks, naming them.
    """
    talk, begun = _Talk(job), job.now()
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
        talk.poll(begun + LIMIT)
    teller = threading.Thread(target=tell, name="tailbound-hello", daemon=True)
    teller.start()
    while not talk.stopped:  # a peer may still lack an answer
        talk.poll(job.now() + TRIES.most)
    teller.join()
    talk.close()
    if failed:
        raise failed[0]
    lines = complaints(greetings, reports, job.store.width)
    if lines:
        more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        raise TransportError(
            "\n  ".join(
                [
                    f"rank {job.rank}: UDP does not pass between all ranks, let firewalls pass it:",
                    *lines[:_LINES],
                    *more,
                    _PORTS,
                ]
            )
        )
    job.sender.plain |= talk.hello.plain
    if job.switch is not None and talk.hello.plain == set(job.peers):
        job.sender.plain.add(job.switch)  # it does not answer tries
    log.info("rank %d: hears all peers over UDP, after %.1f ms", job.rank, (job.now() - begun) / 1e6)
    return talk.others


#: What a user may not know.
_PORTS = (
    "The udp datapath takes any free port, or one of 64 from TAILBOUND_PORT on where that is set; xdp has the port "
    f"that it was attached for ({DEFAULT_PORT})."
)


class _Talk:
    """Sends and receives for ``prove``."""

    def __init__(self, job: Job) -> None:
        self._job, self._trials = job, job.paths.trials
        self._unsent: dict[int, str] = {}
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        for fd in (job.datapath.fds()[1], self._wake):
            self._poll.register(fd, select.POLLIN)
        self.stopped = False
        self.others: list[bytes] = []
        self.hello = Hello(job.peers, job.now())

    def poll(self, until: int) -> None:
        """Sends what is due, and takes what has come, waiting for it until ``until`` (ns) at most.

        What comes meanwhile is taken after each peer: the tries of many ranks would overflow the socket's buffer.
        A turn that hears the last peer in this way ends at once, since no packet may come that ends its wait.
        """
        job, before = self._job, self.hello.complete
        for peer in self.hello.poll(job.now()):
            self._trials.ask(peer, FIRST)
            if number := self._trials.refused[peer]:
                self._unsent[peer] = os.strerror(number)
            self._read()
        if self.hello.complete and not before:
            return
        look = min(self.hello.due or until, until)
        if self._poll.poll(max(0, look - job.now()) / MS):
            self._read()

    def _read(self) -> None:
        for data in self._job.datapath.control_packets():
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        job = self._job
        parsed = job.unpack(data)
        if parsed is None:
            return
        head, body = parsed[0][0], parsed[1]
        if head["type"] != PacketType.HELLO:
            self.others.append(data)
            return
        known = int(head["sender"]) in self.hello.heard and int(head["owner"]) == job.rank
        if known and int(head["cookie"]) == job.cookie:
            said = self._trials.receive(head, body)
            self.hello.receive(said.peer, said.heard, said.told if said.trial == FIRST else 0, answer=said.answer)

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
                f"rank {rank} does not hear {spoken(report.deaf)}: nothing from {them} came to UDP port {at.port} of "
                f"{at.address}; let it in (firewall, security group, routes){_dropped(report)}"
            )
        if report.narrow:
            them = _some(greetings[p].address for p in report.narrow)
            lines.append(
                f"rank {rank} hears {spoken(report.narrow)}, but no packets of {size} bytes from {them}: the path's "
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


def _some(names: Iterable[Any]) -> str:
    every = list(dict.fromkeys(names))
    return ", ".join(every[:8]) + (f" and {len(every) - 8} more" if len(every) > 8 else "")
