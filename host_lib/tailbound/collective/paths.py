"""Whether rows reach the peers, where small packets do: paths are tried before the first op, and later in doubt.

A try of a path is a burst of packets as wide as rows, by segmentation offload as rows leave, one such packet alone, and
a small one. A trial repeats it until the answers tell enough:

- Bursts arrive: all is well.
- Wide packets arrive, bursts do not: some kernels and drivers take a burst and send nothing. Rows leave one by one
  until the job ends.
- Small packets alone arrive: the MTU of the path is below a row, and all ranks end with an error.

Before the first op every rank tries its path to every peer (``prove``). Where UDP is dropped (a firewall, a security
group) or full rows are (an MTU on the path), training would else run to its end with nothing averaged. Later a receiver
that lacks most rows of a rank, op after op, complains, and the rank tries its path.

Fields of a HELLO: ``row`` numbers the trial, ``rows`` is the packet's place in a burst, from 1 on (0: a single one).
Every packet also answers the receiver's newest trial: ``count`` is its number, ``seq`` the kinds that have arrived.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tailbound.collective.speaker import Speaker
from tailbound.datapath.protocol import Datapath
from tailbound.errors import TransportError
from tailbound.kernel.core import core
from tailbound.transport import rendezvous
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.config import DEFAULT_PORT, MS
from tailbound.transport.control import Header
from tailbound.transport.rendezvous import Greeting, Store, spoken
from tailbound.transport.sender import FULL
from tailbound.transport.sockets import burst_packets
from tailbound.wire.schema import FIRST_DROP, HEADER_BYTES, Flag, PacketType, Verdict

log = logging.getLogger("tailbound")

#: What can arrive, as bits: a small packet, one as wide as a row, half of a burst.
SMALL, WIDE, BURST = 1, 2, 4
#: How long a path is tried, in ns: at a loss of one half each way, all tries fail once in 10^8.
LIMIT = 10_000 * MS
#: How a path is tried again.
TRIES = Policy(20 * MS, 320 * MS)
#: Answers that tell of wide packets and of no burst, after which offload counts as broken. The first try has two.
ANSWERS = 5
#: Tries of which small packets arrive and wide ones do not, so that it is the MTU; where the own system refuses them.
_NARROW_TRIES, _REFUSED_TRIES = 8, 2
#: Packets in the bursts to all peers together, about, and of one at least and at most.
_ALL, _LEAST, _MOST = 128, 4, 64
#: ns between two complaints about one peer.
_COMPLAIN_EVERY = 1_000 * MS
#: A trial tells within so many ns what is wrong, as a rule; a peer that does not answer is waited for again later.
_TOLD, _WAIT_EVERY = 3_000 * MS, 30_000 * MS
#: How refusals are told of again.
_LATER = Policy(30_000 * MS, 600_000 * MS)
#: What to do about what a system refuses to send, by errno.
_REMEDIES = {
    errno.EPERM: "a firewall on this host refuses them (nft list ruleset, iptables -L OUTPUT), or a limit of its "
    "connection tracking",
    errno.EMSGSIZE: "the MTU of {interface} has become smaller than a row: ip link show {interface}",
    errno.ENETUNREACH: "there is no route to them any more: ip route",
    errno.EHOSTUNREACH: "their hosts do not answer at the link: ip neigh, ip route",
    errno.ENETDOWN: "{interface} is down: ip link show {interface}",
}

#: How long one wait for packets lasts at most while paths are proved, ms; lines of a refusal at most.
_WAIT, _LINES = 5, 8
#: What a user may not know.
_PORTS = (
    "The udp datapath takes any free port, or one of 64 from TAILBOUND_PORT on where that is set; xdp has the port "
    f"that it was attached for ({DEFAULT_PORT})."
)


@dataclass
class Path:
    """The path to one peer, and the one from it, as far as tries have told; times in ns."""

    trial: int = 0  #: number of the newest trial
    begun: int = 0  #: when it began
    tries: Backoff = field(default_factory=lambda: Backoff(TRIES))
    told: int = 0  #: kinds that the peer says have arrived
    answers: int = 0  #: of the peer
    refused: int = 0  #: errno of what refused the last try
    peers_trial: int = 0  #: the peer's newest trial
    heard: int = 0  #: kinds that have arrived of it
    places: int = 0  #: of these in bursts, as bits
    complained: int = -_COMPLAIN_EVERY  #: when this rank last complained of the peer
    doubted: int = -_WAIT_EVERY  #: since when a burst is waited for, by which the peer answers


class Paths:
    """The paths of one rank's rows.

    Args:
        job: of the rank.
        interface: name of the interface that they leave by.

    Attributes:
        by_peer: by rank.
        burst: packets of a burst; half of them have to arrive.
        tried: those under trial, by rank.
    """

    def __init__(self, job: Speaker, interface: Callable[[], str]) -> None:
        self._job, self._interface = job, interface
        self.by_peer = {peer: Path() for peer in job.peers}
        stride = HEADER_BYTES + job.store.width
        self.burst = min(burst_packets(stride), _MOST, max(_LEAST, _ALL // max(1, len(job.peers))))
        self.tried: dict[int, Path] = {}
        self._plain: set[int] = set()  # destinations without bursts, told of
        self._said: dict[int, Backoff] = {}  # refusals, by errno
        #: with which the job ends; None: it does not
        self.error: TransportError | None = None

    # -- before the first op ------------------------------------------------------------------------------------------

    def prove(
        self, datapath: Datapath, store: Store, prefix: str, greetings: Sequence[Greeting], timeout: float
    ) -> list[bytes]:
        """Shows that all ranks hear each other; for when all let packets in, before the transport thread starts.

        When it has heard all peers and knows what they have heard, or ``LIMIT`` has passed, a rank writes what it lacks
        into the store. All read all of it, so they refuse alike. A rank goes on answering until every rank has written.

        Args:
            timeout: seconds to wait for what the other ranks have to say.

        Returns:
            Control packets that were not for this: of peers that have begun.

        Raises:
            TransportError: two ranks do not hear each other; the same on all ranks, naming them.
        """
        job, others, ready = self._job, list[bytes](), select.poll()
        begun, told = job.now(), Future[list[str]]()
        ready.register(datapath.fds()[1], select.POLLIN)

        def read() -> None:
            core().fast.tb_serve(ctypes.addressof(job.voice), job.now())
            for data in job.letters():
                parsed = job.unpack(data)
                if parsed is None:
                    continue
                head, body = parsed
                if head.type != PacketType.HELLO:
                    others.append(data)
                elif (head.cookie, head.owner) == (job.cookie, job.rank) and head.sender in self.by_peer:
                    self.receive(head, body)

        def talk() -> None:
            for peer in self.due(job.now()):
                self.ask(peer, job.now())
                read()  # the tries of many ranks would overflow the socket's buffer
            if ready.poll(_WAIT):
                read()

        def tell() -> None:
            try:
                own = json.dumps(self.lacks(greetings))
                told.set_result(rendezvous.share(store, "heard", own, job.rank, job.ranks, prefix, timeout))
            except BaseException as error:
                told.set_exception(error)

        for peer in job.peers:
            self.begin(peer, begun)
        while job.now() < begun + LIMIT and (self.tried or not all(p.heard & WIDE for p in self.by_peer.values())):
            talk()
        threading.Thread(target=tell, name="tailbound-hello", daemon=True).start()
        while not told.done():  # a peer may still lack an answer
            talk()
        if lines := [line for text in told.result() for line in json.loads(text)]:
            more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
            raise TransportError(
                f"rank {job.rank}: UDP does not pass between all ranks, let firewalls pass it:\n  "
                + "\n  ".join([*lines[:_LINES], *more, _PORTS])
            )
        if job.switch is not None and job.sender.plain == set(job.peers):
            job.sender.plain.add(job.switch)  # it does not answer tries
        log.info("rank %d: hears all peers over UDP, after %.1f ms", job.rank, (job.now() - begun) / 1e6)
        return others

    def lacks(self, greetings: Sequence[Greeting]) -> list[str]:
        """What this rank has not heard, with what to do, in lines; while all is well, none."""
        job, at = self._job, greetings[self._job.rank]
        deaf = [peer for peer, path in sorted(self.by_peer.items()) if not path.heard]
        narrow = [peer for peer, path in sorted(self.by_peer.items()) if path.heard and not path.heard & WIDE]
        lines, refused = [], _refused(job) if deaf or narrow else ""
        if deaf:
            lines.append(
                f"rank {job.rank} does not hear {spoken(deaf)}: nothing from {_addresses(greetings, deaf)} came to UDP "
                f"port {at.port} of {at.address}; let it in (firewall, security group, routes){refused}"
            )
        if narrow:
            lines.append(
                f"rank {job.rank} hears {spoken(narrow)}, but no packets of {job.row_bytes} bytes from "
                f"{_addresses(greetings, narrow)}: the path's MTU is below that of the interfaces; lower theirs on all "
                f"hosts (ip link set dev INTERFACE mtu ...; with xdp: tailbound attach --mtu ...){refused}"
            )
        for peer, path in self.by_peer.items():
            if path.refused and not path.told & WIDE:
                to, why = greetings[peer].address, os.strerror(path.refused)
                lines.append(f"rank {job.rank} cannot send to rank {peer} at {to}: {why}")
        return lines

    # -- trials -------------------------------------------------------------------------------------------------------

    def begin(self, peer: int, now: int) -> None:
        """Begins a trial of the path to ``peer``, unless one is under way."""
        if peer in self.by_peer.keys() - self.tried.keys() - self._job.membership.gone and self.error is None:
            path = self.tried[peer] = self.by_peer[peer]
            path.trial, path.begun, path.tries = now // MS % 0xFFFF + 1, now, Backoff(TRIES, now)
            path.told = path.answers = 0

    def due(self, now: int) -> list[int]:
        """Peers that are to be tried now."""
        return [peer for peer, path in self.tried.items() if path.tries.due <= now]

    def poll(self, now: int) -> int:
        """Says what is new and tries what is due; returns when to look again (0: on arrival).

        Once a turn, while paths are ``tried``, the sender has been ``refused``, or bursts do not reach all.
        """
        sender = self._job.sender
        if sender.refused:
            refused, sender.refused = sender.refused, {}
            for number, ranks in refused.items():
                self._say_refused(number, sorted(ranks), now)
        if not sender.plain <= self._plain:
            self._say_plain()
        if not self.tried:  # nearly always
            return 0
        for peer in self.due(now):
            path = self.tried[peer]
            asked, too_long = path.tries.asked, path.refused == errno.EMSGSIZE
            heard = 2 * path.answers >= asked >= _NARROW_TRIES
            if not path.told & WIDE and (heard or (too_long and asked >= _REFUSED_TRIES)):
                for each in self._job.peers * 3:
                    self._tell(each, Flag.STOP, peer)
                self._end(peer)
                return 0
            if now > path.begun + LIMIT:  # nothing is known: it may be stopped
                del self.tried[peer]
            else:
                self.ask(peer, now)
        return min((path.tries.due for path in self.tried.values()), default=0)

    def ask(self, peer: int, now: int) -> None:
        """Sends the packets of one try, the small one last: its answer covers the others, if they have come before."""
        job, path, sender = self._job, self.by_peer[peer], self._job.sender
        path.tries.ask(now)
        wide, ports = bytes(job.store.width), sender.ports[sender.channel[peer]]
        port = ports[path.tries.asked % len(ports)]
        self._send(port, peer, [self._packet(path, peer, place + 1, wide) for place in range(self.burst)])
        numbers = [
            self._send(port, peer, [self._packet(path, peer, 0, wide)]),
            self._send(0, peer, [self._packet(path, peer, 0)]),
        ]
        # a full socket is as good as a loss
        path.refused = next((each for each in numbers if each not in (0, *FULL)), 0)

    def _packet(self, path: Path, peer: int, place: int, body: bytes = b"", *, ask: bool = True) -> bytes:
        job = self._job
        head = job.header(
            PacketType.HELLO, job.marks.contributed, 0, flags=Flag.REPEAT if ask else 0,
            row=path.trial, rows=place, count=path.peers_trial, seq=path.heard,
        )  # fmt: skip
        return job.word(peer, head, body)

    def _send(self, port: int, peer: int, packets: list[bytes]) -> int:
        """Sends ``packets``, of one length, in one burst; returns 0 or the errno of what refused it."""
        sender, data = self._job.sender, b"".join(packets)
        stride = len(packets[0]) if len(packets) > 1 else 0
        number = sender.sockets[port].send_one(data, sender.peers[peer], stride)
        if not number:
            sender.took(peer, len(packets), len(data), 1)
        return number

    # -- what comes ---------------------------------------------------------------------------------------------------

    def receive(self, head: Header, body: bytes) -> None:
        """Takes a HELLO packet of a peer."""
        peer, flags, now = head.sender, head.flags, self._job.now()
        if flags & Flag.STOP:
            self._end(head.count, f"rank {peer} says that ")
        elif flags & Flag.COMPLAINT:
            self.begin(peer, now)
        elif (path := self.by_peer.get(peer)) is not None:
            if flags & Flag.REPEAT:
                self._answer(peer, path, head, body)
            if peer in self.tried and head.count == path.trial:
                path.told |= head.seq
                path.answers += not flags & Flag.REPEAT
                if path.told & BURST:
                    del self.tried[peer]
                elif path.told & WIDE and path.answers >= ANSWERS:
                    del self.tried[peer]
                    self._job.sender.plain.add(peer)

    def _answer(self, peer: int, path: Path, head: Header, body: bytes) -> None:
        """Notes a packet of a peer's trial, and answers it where there is something to tell."""
        if head.row != path.peers_trial:
            path.peers_trial, path.heard, path.places = head.row, 0, 0
        before, place = path.heard, head.rows
        path.heard |= WIDE if len(body) >= self._job.store.width else SMALL
        if place:
            path.places |= 1 << place - 1
            if 2 * path.places.bit_count() >= self.burst:
                path.heard |= BURST
                path.doubted = -_WAIT_EVERY
        if path.heard != before or not body:
            self._send(0, peer, [self._packet(path, peer, 0, ask=False)])

    # -- doubts -------------------------------------------------------------------------------------------------------

    def complain(self, peer: int) -> None:
        """Most rows of ``peer`` do not come although it has sent them: it is to try its path."""
        now, path = self._job.now(), self.by_peer[peer]
        if now < path.complained + _COMPLAIN_EVERY:
            return
        path.complained = now
        if now >= path.doubted + _WAIT_EVERY:
            path.doubted = now
        self._tell(peer, Flag.COMPLAINT)
        self._job.counters["complaints"] += 1

    def trying(self) -> bool:
        """Whether a trial, here or of a peer that was asked for one, has still to tell why rows do not come."""
        begun = [path.begun if peer in self.tried else path.doubted for peer, path in self.by_peer.items()]
        return self._job.now() < max(begun, default=-_TOLD) + _TOLD

    def _tell(self, peer: int, flag: Flag, count: int = 0) -> None:
        job = self._job
        job.tell(peer, job.header(PacketType.HELLO, job.marks.contributed, 0, flags=flag, count=count))

    # -- what is said -------------------------------------------------------------------------------------------------

    def _say_plain(self) -> None:
        """Peers have become such that get no bursts."""
        sender = self._job.sender
        for number in [each for each in sender.plain if each in sender.shared]:
            sender.plain.update(sender.shared[number].ranks)
        ranks = sorted(each for each in sender.plain - self._plain if each < sender.ranks)
        self._plain |= sender.plain
        interface = self._interface() or "INTERFACE"
        names = ", ".join("the switch" if each == self._job.switch else str(each) for each in ranks)
        kernel = os.uname().release
        text = (
            f"bursts by UDP segmentation offload do not reach rank(s) {names}, single packets do "
            f"(kernel {kernel}, {interface}): packets leave one by one, which takes more processor time. Switch the "
            f"interface's own offload off (ethtool -K {interface} tx-udp-segmentation off) and start this rank again, "
            "or take another kernel (Linux 7.0 to 7.1.4 corrupt such bursts)"
        )
        self._job.events.emit("bursts_lost", text, peers=ranks, kernel=kernel, interface=interface)

    def _say_refused(self, number: int, ranks: list[int], now: int) -> None:
        """This host's system has refused to send to ``ranks``, with this errno."""
        if number == errno.EMSGSIZE:
            for rank in ranks:
                self.begin(rank, now)
        said = self._said.setdefault(number, Backoff(_LATER))
        if now < said.due:
            return
        said.ask(now)
        name = errno.errorcode.get(number, str(number))
        remedy = _REMEDIES.get(number, "look at this host: ip -s link, nft list ruleset")
        text = (
            f"this host refuses to send to rank(s) {', '.join(map(str, ranks))}: {os.strerror(number)} ({name}): "
            f"{remedy.format(interface=self._interface() or 'the interface')}"
        )
        self._job.events.emit("cannot_send", text, errno=name, peers=ranks)

    def _end(self, peer: int, says: str = "") -> None:
        """Rows to ``peer`` pass no more, so that nothing would be averaged: the job ends."""
        if self.error is not None:
            return
        self.tried.clear()
        interface = self._interface() or "INTERFACE"
        self.error = TransportError(
            f"rank {self._job.rank}: {says}packets of {self._job.row_bytes} bytes, as rows are, no longer reach rank "
            f"{peer}, and small ones do: the MTU of the path has become smaller. Give the path its MTU back, or all "
            f"ranks' interfaces a smaller one (ip link set dev {interface} mtu ...; with xdp: tailbound attach "
            "--mtu ...), and start the job again"
        )


def _refused(job: Speaker) -> str:
    drops = job.records.verdicts()[:, FIRST_DROP:].sum(axis=0)
    told = [f"{n} {v.name}: {v.advice}" for v, n in zip(list(Verdict)[FIRST_DROP:], drops.tolist(), strict=False) if n]
    return f"; it has refused packets ({'; '.join(told)})" if told else ""


def _addresses(greetings: Sequence[Greeting], ranks: Iterable[int]) -> str:
    every = list(dict.fromkeys(greetings[rank].address for rank in ranks))
    return ", ".join(every[:8]) + (f" and {len(every) - 8} more" if len(every) > 8 else "")
