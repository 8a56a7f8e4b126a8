"""What ``step`` says is to be done for an op. ``execute`` does it.

A ``Move`` ends a phase of the op: what follows from it is asked of ``step`` again, once it has been done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Abstain:
    """Take part without rows, and say so."""


@dataclass(frozen=True, slots=True)
class StayOut:
    """No rank takes the own rows: say so instead of sending them.

    They come too late for all (clock-17), or a switch takes other scales, which this rank does not know (codec-5).
    """


@dataclass(frozen=True, slots=True)
class Measure:
    """Find the scales that the own rows need at a switch, and tell them (codec-5)."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Code the own rows and hand them to the send queue.

    Attributes:
        scales: of its groups where a switch sums, i16[G].
        late: no rank waits for them any more, but they still serve to ask a switch for results.
    """

    scales: NDArray[np.int16] | None = field(default=None, compare=False)
    late: bool = False


@dataclass(frozen=True, slots=True)
class Collect:
    """Take the own rows' codes, which a device has made by now, and hand them to the send queue."""


@dataclass(frozen=True, slots=True)
class Agree:
    """Settle the scales of a cold op from what ranks have told, and encode.

    Attributes:
        incomplete: some rank has not told what it needs.
    """

    incomplete: bool


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell ``peers`` the own state by READY (clock-25)."""

    peers: tuple[int, ...]


Move = Abstain | StayOut | Measure | Encode | Collect | Agree
Action = Move | Tell
#: To be asked with the type of an action: that takes a tenth of ``isinstance`` with so many.
MOVES: frozenset[type[Action]] = frozenset(get_args(Move))
