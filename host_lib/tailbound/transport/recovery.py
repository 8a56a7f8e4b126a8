"""Loss detection within a flow, and requests for lost rows (clock-23). Times are passed in, ns.

A flow is the rows of one op from one sender to one receiver, in an order that both know. A row is lost when a row
behind it arrived a reordering window ago. The receiver requests lost rows while the flow still runs. A requested row
takes a new place behind all others, so that a lost retransmission is detected like a lost row.

Only the end of a flow needs a timer, the probe timeout (PTO, RFC 9002 section 6.2) of its sender. It doubles with each
expiry, and returns to its length when a row arrives. If the last row was lost, and with it the mark that says that
nothing more will come, the sender is asked for its mark (clock-30).

Who has not begun is computing, as a rule: it is asked late and ever more rarely, and once more shortly before the
deadline, to say that it lives. Of many senders whose marks are missing nearly all are late, so few are asked together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tailbound.kernel.core import core
from tailbound.wire.packets import record_of
from tailbound.wire.schema import ANSWERS


class Path(record_of(ANSWERS)):  # type: ignore[misc]
    """What requests to one peer have taught: the time of an answer, and how far rows overtake (``tb_answers``).

    Args:
        floor: the shortest deadline.

    Attributes:
        window: the reordering window. It doubles where more than half of the requested rows came twice, and shrinks
            slowly where fewer did.
    """

    window: int
    twice: int

    def __init__(self, floor: int) -> None:
        super().__init__(floor, floor // 5, floor // 40)

    @property
    def pto(self) -> int:
        """The probe timeout: a fifth of the floor before the first answer, then a tenth of it to five."""
        return int(core().fast.tb_pto(ctypes.addressof(self)))

    def answered(self, took: int, first: int = 0) -> None:
        """An answer came ``took`` after its request, and ``first`` after the first one of several.

        Where there were several, it may be to any of them: it took the usual time and twice what that varies, within
        these bounds.
        """
        core().fast.tb_answered(ctypes.addressof(self), took, first)

    def settled(self, requested: int, twice: int, *, probed: bool) -> None:
        """A half is over that requested so many rows.

        Args:
            requested: rows.
            twice: rows that ever came a second time by a request.
            probed: a probe timeout has expired, which may be what made them come twice.
        """
        new = twice - self.twice
        self.twice = twice
        if 2 * new > requested and not probed:
            self.window = min(self.floor, 2 * self.window)
        else:
            self.window = max(self.floor // 40, self.window - self.window // 16)


def paths(ranks: int, floor: int) -> Sequence[Path]:
    """Those of so many peers, in one piece of memory."""
    kind: Any = Path
    found: Sequence[Path] = (kind * ranks)(*(Path(floor) for _ in range(ranks)))
    return found
