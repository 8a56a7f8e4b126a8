"""The ledger of one rank: what became of the rows that its peers should have brought, by peer and stage. Pure.

``expected = taken + late + lost + refused + absent``: ``wire.schema.Fate`` has the meaning of each, and every verdict
of the datapath its fate. The host counts here, op by op, what was taken; the datapath counts what it refused, by sender
and verdict. Late is not lost (clock-24).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.wire.schema import MISSING, Fate, Stage, Verdict

#: What ``tailbound top`` shows of a peer's ledger.
ROWS: tuple[str, ...] = ("expected", *(fate.value for fate in (Fate.TAKEN, *MISSING)), "repaired")
#: Columns of the ledger.
_OPS, _EXPECTED, _TAKEN, _GAPS, _OPEN, _COLUMNS = range(6)


class Ledger:
    """Rows of one rank, a line for each peer and stage. Every call is one addition; nothing grows."""

    def __init__(self, ranks: int) -> None:
        # by stage and peer; plain numbers, since one of an array takes five times as long to add to
        self._lines = [[[0] * _COLUMNS for _ in range(ranks)] for _ in range(2)]

    def close(self, stage: Stage, peer: int, expected: int, taken: int, *, finished: bool) -> None:
        """Enters one op's stage that is over.

        Args:
            peer: sender (contributions) or owner (results).
            expected: rows that the peer should have brought.
            taken: rows that were in when the stage ended.
            finished: whether the peer's finished mark covered the op then.
        """
        line = self._lines[stage][peer]
        missing = expected - taken
        line[_OPS] += 1
        line[_EXPECTED] += expected
        line[_TAKEN] += taken
        line[_GAPS if finished else _OPEN] += missing

    def lost(self, peer: int, verdicts: NDArray[np.uint64]) -> tuple[int, int]:
        """Rows expected of ``peer`` in both stages together, and those of them that were lost on the way."""
        entries = [self.entry(stage, peer, verdicts) for stage in Stage]
        return sum(each["expected"] for each in entries), sum(each["lost"] for each in entries)

    def entry(self, stage: Stage, peer: int, verdicts: NDArray[np.uint64], repaired: int = 0) -> dict[str, int]:
        """What became of the rows of ``peer``, in plain types.

        Args:
            verdicts: u64[VERDICTS], what the datapath made of this peer's packets.
            repaired: rows among those taken that had been asked for again.

        Returns:
            ``ops``, ``expected``, ``missing`` (the sum of ``MISSING``), ``repaired``, and rows by fate.
        """
        line = self._lines[stage][peer]
        gaps, left = line[_GAPS], line[_OPEN]
        refused = min(self._refused(stage, peer, verdicts), gaps + left)
        lost = gaps - min(refused, gaps)
        left -= refused - (gaps - lost)
        late = min(_sum(verdicts, Fate.LATE, stage), left)
        fates = {
            Fate.TAKEN: line[_TAKEN],
            Fate.LATE: late,
            Fate.LOST: lost,
            Fate.REFUSED: refused,
            Fate.ABSENT: left - late,
            Fate.DUPLICATED: _sum(verdicts, Fate.DUPLICATED, stage),
        }
        return {
            "ops": line[_OPS],
            "expected": line[_EXPECTED],
            "missing": sum(fates[fate] for fate in MISSING),
            "repaired": repaired,
            **{fate.value: rows for fate, rows in fates.items()},
        }

    def _refused(self, stage: Stage, peer: int, verdicts: NDArray[np.uint64]) -> int:
        """Refused rows of ``peer``. Those that may be of either stage fill what contributions lack first."""
        own, either = _sum(verdicts, Fate.REFUSED, stage), _sum(verdicts, Fate.REFUSED, *Stage)
        if stage == Stage.CONTRIBUTIONS:
            return own + either
        line = self._lines[Stage.CONTRIBUTIONS][peer]
        lacked = line[_GAPS] + line[_OPEN] - _sum(verdicts, Fate.REFUSED, Stage.CONTRIBUTIONS)
        return own + max(0, either - max(0, lacked))


_OF = {(v.fate, v.stages): [u for u in Verdict if (u.fate, u.stages) == (v.fate, v.stages)] for v in Verdict}


def _sum(verdicts: NDArray[np.uint64], fate: Fate, *stages: Stage) -> int:
    """Packets of a fate that concern exactly these stages."""
    return sum(int(verdicts[v]) for v in _OF[fate, stages])
