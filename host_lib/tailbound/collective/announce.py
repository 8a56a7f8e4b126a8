"""READY packets: scales for a switch, abstaining, and acknowledgements that were lost (clock-2, clock-17, clock-25).

Every rank sends every peer at least one packet per op. Where rows do that, READY is only sent by a rank that is asked
for its mark (clock-30).

READY names an op without bringing rows: this rank has launched it. Body: for a cold op, of a switch, the scale that
each group needs, s16[groups], in network byte order. With REPEAT it asks for that of the receiver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.kernel.core import core
from tailbound.wire.schema import Flag, PacketType


def encode_needs(needs: NDArray[np.int16] | None) -> bytes:
    """The body of a READY packet; ``needs`` is i16[groups] for a cold op, else None."""
    return b"" if needs is None else needs.astype(">i2").tobytes()


def decode_needs(body: bytes, groups: int) -> NDArray[np.int16] | None:
    """The needs in a READY packet; None if it has none, or too few."""
    return np.frombuffer(body, ">i2", groups).astype(np.int16) if len(body) >= 2 * groups else None


def announce(job: Speaker, op: Op, peers: Iterable[int], *, asks: bool = False) -> None:
    """Sends READY for ``op`` to ``peers``, and ``asks`` for theirs."""
    body = encode_needs(op.needs.get(job.rank) if op.cold else None)
    flags = int(Flag.ABSTAIN if op.abstains else 0)
    if op.outcome.overflowed:
        flags |= Flag.OVERFLOW
    if flags:
        core().fast.tb_remember(ctypes.addressof(job.voice), op.label, flags)  # peers that missed the word ask
    if op.outcome.late:
        flags |= Flag.LATE
    if asks:
        flags |= Flag.REPEAT
    head = job.header(PacketType.READY, op.label, op.place.tag, flags=flags, seq=op.place.result_seq)
    for peer in peers:
        job.tell(peer, head, body)
        job.voice.ready_sent += 1


def farewell(job: Speaker, label: int) -> None:
    """BYE, three times to every peer (clock-15)."""
    head = job.header(PacketType.BYE, label, 0)
    for _ in range(3):
        for peer in job.peers:
            job.tell(peer, head)


def hold(job: Speaker, *, over: bool) -> list[bytes]:
    """HOLD to every peer: this rank is between steps, or (``over``) no longer (clock-16). The packets, by peer."""
    head = job.header(PacketType.HOLD, job.sequence.upcoming, 0, flags=Flag.FLUSH if over else 0)
    return [job.tell(peer, head) for peer in job.peers]
