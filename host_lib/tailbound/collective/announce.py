"""READY packets: cold scales, abstaining, and telling marks whose packets were lost (clock-2, clock-17, clock-25).

Every rank sends every peer at least one packet per op; where rows do that, READY is only sent by a rank that asks for a
mark (``remind``) or that is asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailbound.collective import fanout
from tailbound.collective.job import Job
from tailbound.collective.maps import Maps
from tailbound.collective.messages import decode_ready, encode_ready
from tailbound.collective.op import Op, Sending
from tailbound.collective.retransmit import take_gone, take_request
from tailbound.wire import packets
from tailbound.wire.schema import Flag, PacketType, serial_distance


def announce(job: Job, op: Op, peers: Iterable[int], *, ask: bool) -> None:
    """Sends READY for ``op`` to ``peers``; with ``ask`` they answer with their own marks."""
    needs = op.needs.get(job.rank) if op.cold else None
    body = encode_ready(set(op.needs) | {job.rank}, needs)
    flags = Flag(0)
    if ask:
        flags |= Flag.REPEAT
    if op.abstains:
        flags |= Flag.ABSTAIN
        if op.label not in job.abstained:
            job.abstained.append(op.label)
    if op.outcome.late:
        flags |= Flag.LATE
    head = job.header(PacketType.READY, op.label, op.place.layout.tag, flags=flags)
    head["seq"] = op.place.result_seq
    for peer in peers:
        job.tell(peer, head, body)
        job.counters["ready_sent"] += 1


class Inbox:
    """Takes control packets and keeps what READY packets say of ops that are not launched here yet."""

    def __init__(self, job: Job, maps: Maps) -> None:
        self._job, self._maps = job, maps
        self._early: dict[int, dict[int, tuple[int, int, bytes]]] = {}  # label, sender: layout, flags, body

    def take(self, data: bytes, ops: dict[int, Op]) -> None:
        """Works on one control packet (UDP payload); the kernel has checked it, it is checked again here."""
        job = self._job
        parsed = packets.parse(data)
        if parsed is None:
            job.counters["control_refused"] += 1
            return
        head, body = parsed[0][0], parsed[1]
        sender, label = int(head["sender"]), int(head["op"])
        if int(head["cookie"]) != job.cookie or sender not in job.sender.peers or int(head["owner"]) != job.rank:
            job.counters["control_refused"] += 1
            return
        job.counters["control_taken"] += 1
        job.hear(sender)
        if head["type"] == PacketType.BYE:
            job.membership.bye(sender)
            job.publish_live()
        elif head["type"] == PacketType.MAP:
            self._maps.take(sender, body)
        elif head["type"] == PacketType.HOLD:
            if int(head["flags"]) & Flag.FLUSH:
                job.membership.unhold(sender)
            else:
                job.membership.hold(sender, job.now())
        elif head["type"] == PacketType.GROUP:
            fanout.take(job, head, body)
        elif head["type"] == PacketType.READY:
            flags = int(head["flags"])
            op = ops.get(label)
            if op is not None:
                if int(head["layout"]) == op.place.layout.tag:
                    self._ready(op, sender, flags, body)
            elif serial_distance(label, job.sequence.next_label) >= 0 and len(self._early) < 4096:
                self._early.setdefault(label, {})[sender] = (int(head["layout"]), flags, body)
        elif head["type"] == PacketType.REPAIR:
            if int(head["rows"]):
                take_request(job, head, body)
            else:
                self._answer(sender, label, int(head["layout"]))
        elif head["type"] == PacketType.GONE and label in ops:
            if int(head["flags"]) & Flag.ABSTAIN:
                ops[label].abstainers.add(sender)
            if int(head["rows"]):
                take_gone(ops[label], head)

    def adopt(self, op: Op) -> None:
        """Hands an op what was said of it before it was placed, and forgets older words."""
        for sender, (layout, flags, body) in self._early.pop(op.label, {}).items():
            if layout == op.place.layout.tag:
                self._ready(op, sender, flags, body)
        for label in [e for e in self._early if serial_distance(e, op.label) < 0]:
            del self._early[label]

    def _ready(self, op: Op, sender: int, flags: int, body: bytes) -> None:
        ready = decode_ready(body, op.place.layout.shape.groups)
        if ready is None:
            self._job.counters["control_refused"] += 1
            return
        if flags & Flag.ABSTAIN:
            op.abstainers.add(sender)
        if flags & Flag.LATE:
            op.stayed_out.add(sender)
        if ready.needs is not None:
            op.needs[sender] = ready.needs
        if self._job.rank in ready.heard:
            op.heard_by.add(sender)
        elif op.cold and op.sending == Sending.AGREEING and not self._job.contributed(sender, op.label):
            announce(self._job, op, [sender], ask=False)
        if flags & Flag.REPEAT:
            if op.launch and op.encoded and not op.published:
                announce(self._job, op, [sender], ask=False)
            else:
                self._answer(sender, op.label, op.place.layout.tag)

    def _answer(self, sender: int, label: int, layout: int) -> None:
        """Tells a rank that waits how far this one is: the marks say it. If not further, it says that this rank lives.

        That this rank abstained is said again, too: whoever asks may have missed the only packet that said it.
        """
        job = self._job
        flags = Flag.ABSTAIN if label in job.abstained else Flag(0)
        head = job.header(PacketType.GONE, label, layout, owner=sender, flags=flags)
        job.tell(sender, head)


def farewell(job: Job, label: int) -> None:
    """BYE, three times to every peer (clock-15)."""
    head = job.header(PacketType.BYE, label, 0)
    for _ in range(3):
        for peer in job.peers:
            job.tell(peer, head)
