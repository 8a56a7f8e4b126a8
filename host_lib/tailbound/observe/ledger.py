"""The ledger of one rank: what became of the rows that its peers should have brought, by peer and stage. Pure.

``expected = taken + late + lost + refused + absent``: ``wire.schema.Fate`` has the meaning of each, and every verdict
of the datapath its fate. The host counts here, op by op, what was taken; the datapath counts what it refused, by sender
and verdict. Late is not lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.wire.packets import record_of
from tailbound.wire.schema import BOOKS, MISSING, Fate, Stage, Verdict

#: What ``tailbound top`` shows of a peer's ledger.
ROWS: tuple[str, ...] = ("expected", *(fate.value for fate in (Fate.TAKEN, *MISSING)), "repaired")
_LINE: Any = record_of(BOOKS)


class Ledger:
    """Rows of one rank, a line (``tb_books``) for each peer and stage; nothing grows.

    The library enters what an op's stage came to when it is over (``tb_account``).

    Attributes:
        lines: by stage and peer, which is the sender of contributions or the owner of results.
    """

    def __init__(self, ranks: int) -> None:
        self.lines = (_LINE * ranks * 2)()

    def lost(self, peer: int, verdicts: NDArray[np.uint64]) -> tuple[int, int]:
        """Rows expected of ``peer`` in both stages together, and those lost on the way, repaired ones among them."""
        entries = [self.entry(stage, peer, verdicts) for stage in Stage]
        return sum(each["expected"] for each in entries), sum(each["lost"] + each["repaired"] for each in entries)

    def entry(self, stage: Stage, peer: int, verdicts: NDArray[np.uint64]) -> dict[str, int]:
        """What became of the rows of ``peer``, in plain types.

        Args:
            verdicts: u64[VERDICTS], what the datapath made of this peer's packets.

        Returns:
            ``ops``, ``expected``, ``missing`` (the sum of ``MISSING``), ``repaired``, and rows by fate.
        """
        line = self.lines[stage][peer]
        gaps, left = int(line.gaps), int(line.open)
        refused = min(self._refused(stage, peer, verdicts), gaps + left)
        lost = gaps - min(refused, gaps)
        left -= refused - (gaps - lost)
        late = min(_sum(verdicts, Fate.LATE, stage), left)
        fates = {
            Fate.TAKEN: line.taken,
            Fate.LATE: late,
            Fate.LOST: lost,
            Fate.REFUSED: refused,
            Fate.ABSENT: left - late,
            Fate.DUPLICATED: _sum(verdicts, Fate.DUPLICATED, stage),
        }
        return {
            "ops": line.ops,
            "expected": line.expected,
            "missing": sum(fates[fate] for fate in MISSING),
            "repaired": line.repaired,
            **{fate.value: rows for fate, rows in fates.items()},
        }

    def _refused(self, stage: Stage, peer: int, verdicts: NDArray[np.uint64]) -> int:
        """Refused rows of ``peer``. Those that may be of either stage fill what contributions lack first."""
        own, either = _sum(verdicts, Fate.REFUSED, stage), _sum(verdicts, Fate.REFUSED, *Stage)
        if stage == Stage.CONTRIBUTIONS:
            return own + either
        line = self.lines[Stage.CONTRIBUTIONS][peer]
        lacked = int(line.gaps + line.open) - _sum(verdicts, Fate.REFUSED, Stage.CONTRIBUTIONS)
        return own + max(0, either - max(0, lacked))


_OF = {(v.fate, v.stages): [u for u in Verdict if (u.fate, u.stages) == (v.fate, v.stages)] for v in Verdict}


def _sum(verdicts: NDArray[np.uint64], fate: Fate, *stages: Stage) -> int:
    """Packets of a fate that concern exactly these stages."""
    return sum(int(verdicts[v]) for v in _OF[fate, stages])
