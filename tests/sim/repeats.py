"""What tests of repair share: trouble on the first way alone, and counts."""

from __future__ import annotations

from sim.team import SimTeam
from support import Trouble
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import Flag, PacketType

_FLAGS_AT = HEADER_DTYPE.fields["flags"][1]


class FirstTime(Trouble):
    """Trouble for packets on their first way only: what is sent again gets through."""

    def meet(self, rank: int, packets: list[bytes]) -> list[bytes]:
        out = []
        for packet in packets:
            out += [packet] if _again(packet) else super().meet(rank, [packet])
        return out


def _again(packet: bytes) -> bool:
    return bool(int.from_bytes(packet[_FLAGS_AT : _FLAGS_AT + 2], "big") & Flag.REPEAT)


def total(job: SimTeam, counter: str) -> int:
    """One of the counters of ``stats()``, of all ranks together."""
    return sum(int(member.stats()["counters"].get(counter, 0)) for member in job.communicators)


def dropped(troubles: list[Trouble], kind: PacketType) -> int:
    """Packets of ``kind`` that were lost on purpose."""
    return sum(count for t in troubles for (_, what), count in t.dropped.items() if what == kind)
