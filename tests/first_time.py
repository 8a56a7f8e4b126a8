"""Trouble on the first way alone, for tests of repair."""

from __future__ import annotations

from support import Trouble
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import Flag

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
