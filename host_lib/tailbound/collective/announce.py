"""READY packets: cold scales, abstaining, and acknowledgements that were lost (clock-2, clock-17, clock-25).

Every rank sends every peer at least one packet per op. Where rows do that, READY is only sent by a rank that asks how
far another one is (``transport.tail_probe``), or that is asked.

READY names an op without bringing rows: this rank has launched it, and has heard the scales of these ranks. Body: a
bitmap of the ranks heard, 32 bytes, then for a cold op the scale that each group needs, s16[groups], in network byte
order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.collective import channels
from tailbound.collective.job import Job
from tailbound.collective.maps import Maps
from tailbound.collective.op import Op, Sending
from tailbound.collective.retransmit import take_gone, take_request
from tailbound.wire import packets
from tailbound.wire.schema import MAX_RANKS, Flag, PacketType, serial_distance

#: Bytes of a READY body before the needs: the bitmap.
READY_BYTES = MAX_RANKS // 8


class Ready(NamedTuple):
    """Body of a READY packet."""

    heard: frozenset[int]
    needs: NDArray[np.int16] | None


def encode_ready(heard: set[int], needs: NDArray[np.int16] | None) -> bytes:
    """The body of a READY packet; ``needs`` is i16[groups] for a cold op, else None."""
    bitmap = sum(1 << rank for rank in heard).to_bytes(READY_BYTES, "big")
    return bitmap if needs is None else bitmap + needs.astype(">i2").tobytes()


def decode_ready(body: bytes, groups: int) -> Ready | None:
    """The body of a READY packet; None if it is too short to hold ``groups`` needs or, without any, the bitmap."""
    if len(body) < READY_BYTES:
        return None
    bitmap = int.from_bytes(body[:READY_BYTES], "big")
    heard = frozenset(rank for rank in range(MAX_RANKS) if bitmap >> rank & 1)
    rest = body[READY_BYTES:]
    if not rest:
        return Ready(heard, None)
    if len(rest) < 2 * groups:
        return None
    return Ready(heard, np.frombuffer(rest, ">i2", groups).astype(np.int16))


def announce(job: Job, op: Op, peers: Iterable[int], *, ask: bool) -> None:
    """Sends READY for ``op`` to ``peers``; with ``ask`` they answer with their own marks."""
    body = encode_ready(set(op.needs) | {job.rank}, op.needs.get(job.rank) if op.cold else None)
    flags = Flag.REPEAT if ask else Flag(0)
    if op.abstains:
        flags |= Flag.ABSTAIN
        if op.label not in job.abstained:
            job.abstained.append(op.label)
    if op.outcome.late:
        flags |= Flag.LATE
    head = job.header(PacketType.READY, op.label, op.place.layout.tag, flags=flags, seq=op.place.result_seq)
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
        if label in ops:
            ops[label].stirred = True
        flags = int(head["flags"])
        if head["type"] == PacketType.BYE:
            job.membership.bye(sender)
            job.publish_live()
        elif head["type"] == PacketType.MAP:
            self._maps.take(sender, body)
        elif head["type"] == PacketType.HOLD:
            if flags & Flag.FLUSH:
                job.membership.unhold(sender)
            else:
                job.membership.hold(sender, job.now())
        elif head["type"] == PacketType.GROUP:
            channels.take(job, head, body)
        elif head["type"] == PacketType.READY:
            if (op := ops.get(label)) is not None:
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
            if flags & Flag.ABSTAIN:
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
        elif op.cold and op.sending == Sending.AGREEING and not self._job.records.contributed(sender, op.label):
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


def hold(job: Job, over: bool) -> list[bytes]:
    """HOLD to every peer: this rank is between steps, or (``over``) no longer (clock-16). The packets, by peer."""
    head = job.header(PacketType.HOLD, job.sequence.upcoming, 0, flags=Flag.FLUSH if over else Flag(0))
    return [job.tell(peer, head) for peer in job.peers]
