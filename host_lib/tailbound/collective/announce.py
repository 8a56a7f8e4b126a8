"""READY packets: scales for a switch, abstaining, and acknowledgements that were lost (clock-2, clock-17, clock-25).

Every rank sends every peer at least one packet per op. Where rows do that, READY is only sent by a rank that is asked
for its mark (clock-30).

READY names an op without bringing rows: this rank has launched it. Body: a bitmap of the ranks whose scales it has
heard, 32 bytes, then for a cold op, of a switch, the scale that each group needs, s16[groups], in network byte order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.wire.schema import MAX_RANKS, Flag, PacketType

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
    bits = np.unpackbits(np.frombuffer(body, np.uint8, READY_BYTES)[::-1], bitorder="little")
    heard = frozenset(np.flatnonzero(bits).tolist())
    rest = body[READY_BYTES:]
    if not rest:
        return Ready(heard, None)
    if len(rest) < 2 * groups:
        return None
    return Ready(heard, np.frombuffer(rest, ">i2", groups).astype(np.int16))


def announce(job: Speaker, op: Op, peers: Iterable[int]) -> None:
    """Sends READY for ``op`` to ``peers``."""
    body = encode_ready(set(op.needs) | {job.rank}, op.needs.get(job.rank) if op.cold else None)
    flags = Flag.ABSTAIN if op.abstains else Flag(0)
    if op.outcome.overflowed:
        flags |= Flag.OVERFLOW
    if flags:
        job.remember(op.label, flags)
    if op.outcome.late:
        flags |= Flag.LATE
    head = job.header(PacketType.READY, op.label, op.place.layout.tag, flags=flags, seq=op.place.result_seq)
    for peer in peers:
        job.tell(peer, head, body)
        job.counters["ready_sent"] += 1


def acknowledge(job: Speaker, label: int, layout: int, peers: Iterable[int]) -> None:
    """Tells ``peers`` by GONE how far this rank is: the marks say it. And that it abstained: a word may be lost."""
    flags = job.said.get(label, Flag(0))
    head = job.header(PacketType.GONE, label, layout, flags=flags)
    for peer in peers:
        job.tell(peer, head)


def farewell(job: Speaker, label: int) -> None:
    """BYE, three times to every peer (clock-15)."""
    head = job.header(PacketType.BYE, label, 0)
    for _ in range(3):
        for peer in job.peers:
            job.tell(peer, head)


def hold(job: Speaker, *, over: bool) -> list[bytes]:
    """HOLD to every peer: this rank is between steps, or (``over``) no longer (clock-16). The packets, by peer."""
    head = job.header(PacketType.HOLD, job.sequence.upcoming, 0, flags=Flag.FLUSH if over else Flag(0))
    return [job.tell(peer, head) for peer in job.peers]
