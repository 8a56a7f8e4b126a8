"""``tailbound bench bytes``: what ranks send by bits of codes, counted in runs of the real engine in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailbound.wire.bits import BITS, Bits, bits_told
from tailbound.wire.packets import offset_of
from tailbound.wire.schema import PacketType
from tailbound_lab.bench.save import save
from tailbound_lab.simulate.engine import Plan
from tailbound_lab.simulate.fabric import Burst
from tailbound_lab.simulate.world import World

Row = dict[str, Any]
_TYPE = offset_of("type")
_WIDTH, _STEPS = 1408, 3
#: Four groups of 64 rows of 1408 codes.
_ENTRIES = 4 * 64 * 1408


class _Counting(World):
    """``bits`` in every step; ``sent``: bytes by type of packet, headers included, of all ranks to each peer."""

    def __init__(self, ranks: int, bits: Bits) -> None:
        self._bits, self.sent = bits, Counter[int]()
        super().__init__(ranks, plan=Plan((_ENTRIES,)), steps=_STEPS, width=_WIDTH)

    def bits_of(self, step: int) -> Bits:
        return self._bits

    def take(self, burst: Burst) -> None:
        self.sent[burst.data[_TYPE]] += len(burst.data)
        super().take(burst)


def run(json_path: Path | None = None, *, ranks: int = 4, bits: Sequence[Bits] = BITS) -> list[Row]:
    """What a rank sends for an op, nothing lost.

    Returns:
        Rows ``bits, ranks, entries, contributions, results, sent, cloned``: bytes of contributions; of results to
        one peer; of both where results go to every peer, and where they are sent once and cloned; and ``share,
        cloned_share``, of those of 8 bits.
    """
    rows: list[Row] = []
    for each in (8, *(b for b in bits if b != 8)):
        with _Counting(ranks, each) as job:
            job.run()
            contributions, results = (
                job.sent[kind] / (ranks * _STEPS) for kind in (PacketType.CONTRIBUTION, PacketType.RESULT)
            )
        sent, cloned = contributions + results, contributions + results / (ranks - 1)
        rows.append(
            {
                "bits": bits_told(each), "ranks": ranks, "entries": _ENTRIES,
                "contributions": contributions, "results": results / (ranks - 1), "sent": sent, "cloned": cloned,
            }
        )  # fmt: skip
    first = rows[0].copy()
    for row in rows:
        row |= {"share": row["sent"] / first["sent"], "cloned_share": row["cloned"] / first["cloned"]}
    save(rows, json_path)
    return rows


def table(rows: Sequence[Row]) -> list[Row]:
    """A line for each row."""
    return [
        {
            "bits": row["bits"], "ranks": row["ranks"], "contributions": f"{row['contributions']:.0f}",
            "results, to each": f"{row['results']:.0f}", "sent": f"{row['sent']:.0f} ({row['share']:.1%})",
            "sent, results cloned": f"{row['cloned']:.0f} ({row['cloned_share']:.1%})",
        }
        for row in rows
    ]  # fmt: skip
