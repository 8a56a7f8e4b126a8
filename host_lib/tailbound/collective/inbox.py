"""What comes in control packets: it goes to whom it concerns, and early READY packets wait for their op."""

from __future__ import annotations

import ctypes

from tailbound.collective.channels import Channels
from tailbound.collective.maps import Maps
from tailbound.collective.op import Op
from tailbound.collective.paths import Paths
from tailbound.collective.speaker import Speaker
from tailbound.kernel.core import core
from tailbound.transport.control import decode_needs
from tailbound.transport.keys import Word
from tailbound.wire.ranks import mark
from tailbound.wire.schema import Flag, PacketType, serial_distance


class Inbox:
    """Takes control packets that the library leaves to Python; keeps what READY packets say of ops to come here."""

    def __init__(self, job: Speaker, maps: Maps, channels: Channels, paths: Paths) -> None:
        self._job, self._maps, self._channels, self._paths = job, maps, channels, paths
        self._early: dict[int, dict[int, tuple[int, int, bytes]]] = {}  # label, sender: layout, flags, body

    def receive(self, data: bytes, ops: dict[int, Op]) -> bool:
        """Works on one control packet (UDP payload); the kernel has checked it, it is checked again here.

        Returns:
            Whether ops may move on by it: not by a question.
        """
        job = self._job
        parsed = job.unpack(data)
        if parsed is None:
            job.voice.control_refused += 1
            return False
        head, body = parsed
        sender, label = head.sender, head.op
        if head.cookie != job.cookie or sender not in job.sender.peers or head.owner != job.rank:
            job.voice.control_refused += 1
            return False
        word = job.fresh(head)
        if word == Word.OLD:
            job.voice.control_replayed += 1
            return False
        if job.keys is None or head.type != PacketType.HELLO:  # that may be a recorded one
            job.hear(sender, job.now())
        flags = head.flags
        if head.type in (PacketType.REPAIR, PacketType.GONE):
            op = ops.get(label)
            if op is not None and head.type == PacketType.GONE:
                op.outcome.overflowed |= bool(flags & Flag.OVERFLOW)
            elif op is not None and not head.rows and (op.switched or op.empty) and op.encoded and not op.published:
                job.announce(op, [sender])
                return False
            return bool(core().fast.tb_heed(ctypes.addressof(job.voice), data, len(data)))
        if label in ops:
            ops[label].stirred = True
        if head.type == PacketType.BYE:
            job.membership.bye(sender, label)
            job.publish_live()
        elif head.type == PacketType.MAP:
            self._maps.receive(sender, body)
        elif head.type == PacketType.HOLD:
            if flags & Flag.FLUSH:
                job.membership.unhold(sender)
            else:
                job.membership.hold(sender, job.now(), again=word == Word.AGAIN)
        elif head.type == PacketType.HELLO:
            if not (flags & Flag.COMPLAINT and self._channels.complained(sender)):
                self._paths.receive(head, body)
        elif head.type == PacketType.READY:
            if (op := ops.get(label)) is not None:
                if head.layout == op.place.tag:
                    self._ready(op, sender, flags, body)
            elif serial_distance(label, job.sequence.next_label) >= 0 and len(self._early) < 4096:
                self._early.setdefault(label, {})[sender] = (head.layout, flags, body)
        return True

    def adopt(self, op: Op) -> None:
        """Hands an op what was said of it before it was placed, and forgets older words."""
        for sender, (layout, flags, body) in self._early.pop(op.label, {}).items():
            if layout == op.place.tag:
                self._ready(op, sender, flags, body)
        for label in [e for e in self._early if serial_distance(e, op.label) < 0]:
            del self._early[label]

    def _ready(self, op: Op, sender: int, flags: int, body: bytes) -> None:
        job, needs = self._job, decode_needs(body, op.place.layout.shape.groups)
        if body and needs is None:
            job.voice.control_refused += 1
            return
        if flags & Flag.ABSTAIN:
            mark(op.abstained, sender)
        op.outcome.overflowed |= bool(flags & Flag.OVERFLOW)
        if flags & Flag.LATE:
            mark(op.stayed, sender)
        if needs is not None:
            op.needs[sender] = needs
        elif not flags & (Flag.ABSTAIN | Flag.LATE):
            op.warm.add(sender)
        if flags & Flag.REPEAT and op.launch is not None and (job.rank in op.needs or op.encoded):
            job.announce(op, [sender])
