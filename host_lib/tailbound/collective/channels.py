"""One burst to all peers: opens what can do it, tries it, follows the live set, and says what is done instead.

Nothing here fails a job: what cannot be had is a fact for ``transport.choose``, told by an event and in ``stats()``.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.job import Job
from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel.fanout import Fanout, Peer
from tailbound.kernel.neighbours import next_hops
from tailbound.transport.choose import WORKS, Choice, Tried, worth_trying
from tailbound.transport.config import MS
from tailbound.transport.multicast import GroupMember, group_of, prepare
from tailbound.transport.reach import Reach, Say
from tailbound.transport.sender import Shared
from tailbound.transport.sockets import neighbouring_sockets, ports_of, room_of, sending_socket
from tailbound.transport.steps import Steps, step_of
from tailbound.wire import packets
from tailbound.wire.schema import Flag, PacketType

#: What an answer says: a bitmap of 64 packets, made up to a whole step of bytes.
_ANSWER = struct.Struct(">QQ")
#: How often failed clones are taken off what counts as sent.
_COUNT_EVERY = 50 * MS
#: Bytes in flight that the socket of a group has room for.
_GROUP_ROOM = 512 << 10


def open_channels(job: Job, address: str, endpoints: Mapping[int, tuple[str, int]], *, alone: bool) -> None:
    """Opens the channels that ``job`` may use; called once, before its thread starts.

    Args:
        address: own IPv4 address.
        endpoints: (IPv4 address, UDP port) of the peers by rank.
        alone: no rank is on the udp datapath.
    """
    config, channels = job.config, job.channels
    name = job.datapath.name if alone else "udp"
    fanout, multicast = worth_trying(config.result, job.ranks, name)
    for kind, wanted, open_one in (("fanout", fanout, _open_fanout), ("multicast", multicast, _open_multicast)):
        if not wanted or job.switch is not None:
            continue
        try:
            with contextlib.ExitStack() as opened:
                open_one(job, address, endpoints, opened)
                opened.pop_all()
        except (CapabilityError, AttachError) as error:
            channels.learn(**{kind: Tried(False, str(error))})
        else:
            channels.learn(**{kind: WORKS})
    channels.learn(datapath=name, switch=job.switch is not None)
    follow(job, job.now())
    _say(job, channels.choice, wanted=channels.choice.result == config.result or config.result == "auto")


def _open_fanout(
    job: Job, address: str, endpoints: Mapping[int, tuple[str, int]], opened: contextlib.ExitStack
) -> None:
    interface: str = getattr(job.datapath, "interface", "")
    ports = ports_of(len(endpoints), job.config.source_ports)
    socks = tuple(neighbouring_sockets(address, ports, room_of(len(endpoints) * ports)))
    for sock in socks:
        opened.callback(sock.close)
    fanout = _attach(interface, socks[0].getsockname()[1], len(socks), len(endpoints))
    opened.callback(fanout.close)
    macs = next_hops(interface, [host for host, _ in endpoints.values()])
    fanout.set_peers(job.rank, [Peer(r, host, port, macs[host]) for r, (host, port) in endpoints.items()])
    job.channels.fanout = fanout
    job.sender.share(Shared("fanout", socks))


def _attach(interface: str, port: int, ports: int, peers: int) -> Fanout:
    """The program of this process, or the one that ``tailbound attach`` has left for processes without privileges."""
    try:
        return Fanout.attach(interface, port, ports=ports, peers=peers)
    except CapabilityError as error:
        try:
            return Fanout.open(interface, port, ports)
        except (AttachError, CapabilityError):
            raise error from None


def _open_multicast(
    job: Job, address: str, endpoints: Mapping[int, tuple[str, int]], opened: contextlib.ExitStack
) -> None:
    port = job.datapath.endpoint[1]
    group = group_of(job.cookie, job.config.group)
    ports = ports_of(len(endpoints), job.config.source_ports)
    socks = tuple(sending_socket(address, _GROUP_ROOM // ports) for _ in range(ports))
    for sock in socks:
        opened.callback(sock.close)
        prepare(sock, address)
    job.channels.member = GroupMember(group, port, address)
    job.store.control["group"] = packets.packed(group)
    job.channels.reach = Reach(job.peers)
    job.sender.share(Shared("multicast", socks, (group, port), local=False))


def runs(job: Job, rows: NDArray[np.uint8]) -> list[tuple[int, NDArray[np.uint8]]]:
    """``rows`` (u8[count, stride], headers finished, the same for all) as runs for the send queue."""
    follow(job, job.now())
    number = job.channels.number()
    if number is not None:
        channel, queue = job.sender.shared[number], job.flow.queue
        # receivers that take few senders at once are to be sent to in turns, and one behind a slow link by itself: a
        # burst to all is as slow as the slowest
        together = queue.limit >= len(channel.ranks) >= 2
        together &= job.channels.wanted != "auto" or queue.pacer.even(channel.ranks)
        if together and not channel.broken:
            job.counters["results_at_once"] += 1
            return [(number, rows)]
        job.counters["results_apart"] += 1
    return [(peer, rows) for peer in job.channels.live]


def _beyond(job: Job, rank: int) -> bool:
    """Whether ``rank`` is so far behind that its kernel takes no results of the present any more."""
    its = int(job.records.peer_states[rank]["newest"])
    return Steps(its, job.sequence.upcoming, job.sequence.op_rows, job.store.result_rows).lost


def follow(job: Job, now: int) -> None:
    """Lets results go to who is there: not to who has said goodbye, nor to who is dead as far as one can tell.

    A rank that is only stopped is taken to be dead soon, but finds what its kernel has received when it goes on; so
    one that is dead gets results as long as there is room for them.
    """
    channels = job.channels
    dead = job.membership.dead(step_of(job.sequence.upcoming))
    live = tuple(p for p in job.membership.here if not (p in dead and _beyond(job, p)))
    if live == channels.live:
        return
    channels.live = live
    for channel in channels.opened:
        channel.ranks, channel.broken = live, False
    if channels.fanout is not None:
        channels.fanout.live(live)
        if (lead := channels.fanout.lead) is not None and (clones := channels.channel("fanout")) is not None:
            clones.target = job.sender.peers[lead]
    if channels.reach is not None:
        channels.reach.hurry(now)
        _judge(job)


def turn(job: Job, now: int) -> int:
    """Once a turn: listens to the group, tries it, and counts; returns when to look again (0: on arrival)."""
    channels = job.channels
    if not channels.opened:
        return 0
    follow(job, now)
    if now >= channels.looked_at + _COUNT_EVERY:
        channels.looked_at = now
        _take_back(job)
        _judge_broken(job)
    reach = channels.reach
    if reach is None:
        return 0
    rounds = reach.rounds
    for say in reach.turn(now, channels.live):
        _tell(job, say)
    if reach.rounds != rounds:
        _judge(job)
    return reach.look if channels.live else 0


def listen(job: Job) -> None:
    """Takes what has come to the group: packets that try whether it reaches this rank."""
    member = job.channels.member
    if member is None:
        return
    for data in member.packets():
        parsed = packets.parse(data)
        if parsed is None:
            job.counters["control_refused"] += 1
            continue
        head = parsed[0][0]
        sender = int(head["sender"])
        ours = int(head["cookie"]) == job.cookie and sender in job.sender.peers and int(head["owner"]) == sender
        if not ours or head["type"] != PacketType.GROUP:
            job.counters["control_refused"] += 1
            continue
        job.counters["control_taken"] += 1
        job.channels.ears.hear(sender, int(head["seq"]))


def take(job: Job, head: np.void, body: bytes) -> None:
    """Takes a GROUP packet that came to this rank alone: a question about the sender's trials, or an answer."""
    sender, number = int(head["sender"]), int(head["seq"])
    if int(head["flags"]) & Flag.REPEAT:
        answer = _header(job, sender, number)
        job.tell(sender, answer, _ANSWER.pack(job.channels.ears.answer(sender, number), 0))
    elif len(body) >= _ANSWER.size and job.channels.reach is not None:
        job.channels.reach.answer(sender, number, _ANSWER.unpack_from(body)[0], job.now())
        _judge(job)


def close(job: Job) -> None:
    """Detaches and leaves; may be called twice, when nobody sends any more."""
    channels = job.channels
    if channels.fanout is not None:
        _take_back(job)
        channels.fanout.close()
        channels.fanout = None
    if channels.member is not None:
        channels.member.close()
    for channel in channels.opened:
        for sock in channel.sockets:
            sock.close()


def _header(job: Job, owner: int, number: int, flags: int = 0) -> NDArray[Any]:
    # an op that it may name: one begun
    return job.header(PacketType.GROUP, job.marks.contributed, 0, owner=owner, seq=number, flags=flags)


def _tell(job: Job, say: Say) -> None:
    if say.kind == "question":
        job.tell(say.rank, _header(job, say.rank, say.number, int(Flag.REPEAT)))
        return
    channel = job.channels.channel("multicast")
    assert channel is not None
    packet = packets.packet(_header(job, job.rank, say.number), b"")
    try:
        channel.sockets[0].sendto(packet, channel.target)
    except OSError:  # full, or refused: not heard, which is what counts
        channel.lose(job.sender.counts, 1)
    else:
        channel.took(job.sender.counts, 1, len(packet), 1)
    job.counters["group_tried"] += 1


def _judge(job: Job) -> None:
    reach = job.channels.reach
    if reach is not None and reach.decided:
        _learn(job, unreached=tuple(reach.missing(job.channels.live)))


def _judge_broken(job: Job) -> None:
    """A channel whose bursts are refused is none, until the live set changes."""
    for name in ("fanout", "multicast"):
        channel = job.channels.channel(name)
        if channel is not None:
            errors = ", ".join(channel.counts.errors)
            _learn(job, **{name: Tried(False, f"bursts are refused ({errors})") if channel.broken else WORKS})


def _learn(job: Job, **facts: Any) -> None:
    before = job.channels.choice
    if job.channels.learn(**facts):
        after = job.channels.choice
        _say(job, after, wanted=before.result == "peers" or (before.result, after.result) == ("fanout", "multicast"))


def _say(job: Job, choice: Choice, *, wanted: bool) -> None:
    job.events.emit(
        "results_by",
        f"results leave by {choice.result}: {choice.reason}",
        level=logging.INFO if wanted else logging.WARNING,
        result=choice.result, collective=choice.collective, reason=choice.reason,
    )  # fmt: skip
    if not wanted:
        job.counters["result_fallbacks"] += 1


def _take_back(job: Job) -> None:
    """Clones that could not be made had been counted as sent."""
    channels, channel = job.channels, job.channels.channel("fanout")
    if channels.fanout is None or channel is None:
        return
    news = []
    size = channel.counts.bytes // max(1, channel.counts.packets)
    for rank, counts in channels.fanout.counts().items():
        more = counts.packets_failed - channels.failed.get(rank, 0)
        if more and rank in job.sender.counts:
            channels.failed[rank] = counts.packets_failed
            news.append((rank, more, more * size))
    channel.take_back(job.sender.counts, news)
