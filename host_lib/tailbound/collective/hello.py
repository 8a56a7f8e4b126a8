"""Before the first op, every rank shows that it hears every other: over UDP, both ways, wide rows, and bursts of them.

Where UDP is dropped (a firewall, a security group) or full rows are (an MTU on the path), training would run to its
end with nothing averaged. So every rank tries its path to every peer (``paths``). When it has heard all peers and knows
what they have heard, or ``LIMIT`` has passed, it writes what it lacks into the store. All ranks read all of it, so they
refuse alike, and name who does not hear whom. A rank goes on answering until every rank has written.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from tailbound.collective.job import Job, log
from tailbound.collective.paths import LIMIT, WIDE
from tailbound.errors import TransportError
from tailbound.transport import rendezvous
from tailbound.transport.config import DEFAULT_PORT
from tailbound.transport.rendezvous import Greeting, Store, spoken
from tailbound.wire.schema import FIRST_DROP, PacketType, Verdict

#: How long one wait for packets lasts at most, in ms.
_WAIT = 5
#: Lines of a refusal at most.
_LINES = 8
#: What a user may not know.
_PORTS = (
    "The udp datapath takes any free port, or one of 64 from TAILBOUND_PORT on where that is set; xdp has the port "
    f"that it was attached for ({DEFAULT_PORT})."
)


def prove(job: Job, store: Store, prefix: str, greetings: Sequence[Greeting], timeout: float) -> list[bytes]:
    """Shows that all ranks hear each other; to be called when all let packets in, before the transport thread starts.

    Args:
        timeout: seconds to wait for what the other ranks have to say.

    Returns:
        Control packets that were not for this: of peers that are through and have begun.

    Raises:
        TransportError: two ranks do not hear each other; the same on all ranks, naming them.
    """
    paths, begun, others = job.paths, job.now(), list[bytes]()
    ready = select.poll()
    ready.register(job.datapath.fds()[1], select.POLLIN)

    def read() -> None:
        for data in job.datapath.control_packets():
            parsed = job.unpack(data)
            if parsed is None:
                continue
            head, body = parsed
            if head.type != PacketType.HELLO:
                others.append(data)
            elif (head.cookie, head.owner) == (job.cookie, job.rank) and head.sender in paths.by_peer:
                paths.receive(head, body)

    def talk() -> None:
        for peer in paths.due(job.now()):
            paths.ask(peer, job.now())
            read()  # the tries of many ranks would overflow the socket's buffer
        if ready.poll(_WAIT):
            read()

    for peer in job.peers:
        paths.begin(peer, begun)
    while not paths.proven and job.now() < begun + LIMIT:
        talk()
    told: Future[list[str]] = Future()

    def tell() -> None:
        own = json.dumps(lacks(job, greetings))
        try:
            told.set_result(rendezvous.share(store, "heard", own, job.rank, job.ranks, prefix, timeout))
        except BaseException as error:
            told.set_exception(error)

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


def lacks(job: Job, greetings: Sequence[Greeting]) -> list[str]:
    """What this rank has not heard, with what to do, in lines; while all is well, none."""
    at, heard = greetings[job.rank], {peer: job.paths.by_peer[peer].heard for peer in sorted(job.peers)}
    deaf = [peer for peer, kinds in heard.items() if not kinds]
    narrow = [peer for peer, kinds in heard.items() if kinds and not kinds & WIDE]
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
    for peer, path in job.paths.by_peer.items():
        if path.refused and not path.told & WIDE:
            to, why = greetings[peer].address, os.strerror(path.refused)
            lines.append(f"rank {job.rank} cannot send to rank {peer} at {to}: {why}")
    return lines


def _refused(job: Job) -> str:
    drops = job.records.verdicts()[:, FIRST_DROP:].sum(axis=0)
    counts = {Verdict(FIRST_DROP + i).name: int(n) for i, n in enumerate(drops) if n}
    if not counts:
        return ""
    names = ", ".join(f"{count} {name}" for name, count in counts.items())
    more = ": are addresses translated on the way?" if Verdict.WRONG_ADDRESS.name in counts else ""
    return f"; it has refused packets ({names}){more}"


def _addresses(greetings: Sequence[Greeting], ranks: Iterable[int]) -> str:
    every = list(dict.fromkeys(greetings[rank].address for rank in ranks))
    return ", ".join(every[:8]) + (f" and {len(every) - 8} more" if len(every) > 8 else "")
