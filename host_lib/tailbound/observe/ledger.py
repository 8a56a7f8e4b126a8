"""Who owes whom how many rows: the ledger of one rank, by peer and stage. Pure.

Every row that a peer should have brought is taken or missing (``expected = taken + missing``), and every missing row
is one of these, since late is not lost (clock-24):

- **lost**: missing although its sender had marked the op as fully sent, a gap below the finished mark;
- **late**: not there at the end of the stage, its sender not finished; the kernel has seen and refused it afterwards;
- **refused**: the kernel has refused it for another reason than lateness (another scale, map, layout ...);
- **absent**: neither came in time nor late: its sender was slow, stopped or gone.

What was taken is counted here op by op; what the kernel refused is counted there, by sender and reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tailbound.wire.schema import Verdict


class Stage(IntEnum):
    """Half of an op: contributions to the own rows, by sender; results of the others' rows, by owner."""

    CONTRIBUTIONS = 0
    RESULTS = 1


#: Verdicts on rows that came when their stage was over, that were there already, and that did not fit, by stage.
LATE = {Stage.CONTRIBUTIONS: (Verdict.LATE, Verdict.STALE_OP), Stage.RESULTS: (Verdict.STALE_RESULT,)}
DUPLICATE = {
    Stage.CONTRIBUTIONS: (Verdict.DUPLICATE, Verdict.DUPLICATE_REPAIR),
    Stage.RESULTS: (Verdict.DUPLICATE_RESULT, Verdict.DUPLICATE_REPAIR_RESULT),
}
REFUSED = {
    Stage.CONTRIBUTIONS: (Verdict.SCALE_MISMATCH, Verdict.BAD_SHIFT, Verdict.FUTURE_OP, Verdict.ABANDONED),
    Stage.RESULTS: (Verdict.FUTURE_RESULT,),
}
#: The same in either stage, and counted for both together.
REFUSED_IN_BOTH = (Verdict.WRONG_MAP, Verdict.LAYOUT_MISMATCH, Verdict.SLOT_OUT_OF_RANGE, Verdict.NOT_FOR_THIS_RANK)
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

    def totals(self, stage: Stage, peers: Iterable[int]) -> tuple[int, int, int]:
        """Rows of ``peers`` together: expected, taken, gaps below finished marks."""
        some = [self._lines[stage][peer] for peer in peers]
        expected, taken, gaps = (sum(line[column] for line in some) for column in (_EXPECTED, _TAKEN, _GAPS))
        return expected, taken, gaps

    def lost(self, peer: int, verdicts: NDArray[np.uint64]) -> tuple[int, int]:
        """Rows expected of ``peer`` in both stages together, and those of them that were lost on the way."""
        entries = [self.entry(stage, peer, verdicts) for stage in Stage]
        return sum(each["expected"] for each in entries), sum(each["lost"] for each in entries)

    def entry(self, stage: Stage, peer: int, verdicts: NDArray[np.uint64], repaired: int = 0) -> dict[str, int]:
        """What became of the rows of ``peer``, in plain types.

        Args:
            verdicts: u64[VERDICTS], what the kernel made of this peer's packets.
            repaired: rows among those taken that had been asked for again.

        Returns:
            ``ops, expected, taken, missing, late, lost, refused, absent, repaired, duplicated``, with
            ``expected = taken + missing`` and ``missing = late + lost + refused + absent``.
        """
        line = self._lines[stage][peer]
        gaps, left = line[_GAPS], line[_OPEN]
        refused = min(self._refused(stage, peer, verdicts), gaps + left)
        lost = gaps - min(refused, gaps)
        left -= refused - (gaps - lost)
        late = min(_sum(verdicts, LATE[stage]), left)
        return {
            "ops": line[_OPS],
            "expected": line[_EXPECTED],
            "taken": line[_TAKEN],
            "missing": line[_GAPS] + line[_OPEN],
            "late": late,
            "lost": lost,
            "refused": refused,
            "absent": left - late,
            "repaired": repaired,
            "duplicated": _sum(verdicts, DUPLICATE[stage]),
        }

    def _refused(self, stage: Stage, peer: int, verdicts: NDArray[np.uint64]) -> int:
        """Rows of ``peer`` that the kernel has refused: what may be of both stages is what contributions lack first."""
        own, either = _sum(verdicts, REFUSED[stage]), _sum(verdicts, REFUSED_IN_BOTH)
        if stage == Stage.CONTRIBUTIONS:
            return own + either
        line = self._lines[Stage.CONTRIBUTIONS][peer]
        lacked = line[_GAPS] + line[_OPEN] - _sum(verdicts, REFUSED[Stage.CONTRIBUTIONS])
        return own + max(0, either - max(0, lacked))


def _sum(verdicts: NDArray[np.uint64], which: Iterable[Verdict]) -> int:
    return sum(int(verdicts[v]) for v in which)


class Recent:
    """The last ``size`` durations, for a median and a tail."""

    def __init__(self, size: int = 512) -> None:
        self._values = np.zeros(size, np.int64)
        self._count = 0

    def add(self, value: int) -> None:
        """Takes one value, forgetting the oldest of a full window."""
        self._values[self._count % len(self._values)] = value
        self._count += 1

    def percentiles(self, *percent: float) -> tuple[float, ...]:
        """Percentiles of what is in the window; zeros while it is empty."""
        filled = self._values[: min(self._count, len(self._values))]
        if not len(filled):
            return (0.0,) * len(percent)
        return tuple(float(x) for x in np.percentile(filled, percent))
