"""Counting over slot records and presence, by the library (``host_lib/core/rows.c``): one pass each.

And what is judged by these numbers (``host_lib/core/close.c``).
"""

from __future__ import annotations

import ctypes

from tailbound.collective.known import Known
from tailbound.collective.op import Half, Op
from tailbound.collective.speaker import Speaker
from tailbound.kernel.core import core
from tailbound.transport.safeguard import WARN_OP, WARN_SMOOTHED, Limits
from tailbound.wire.packets import record_of
from tailbound.wire.schema import GUARD, Action, Stage, Verdict

#: A loss that there is not.
_NEVER = 2.0
#: Verdict on rows that come a second time by a request, by stage.
_TWICE = Verdict.DUPLICATE_REPAIR, Verdict.DUPLICATE_REPAIR_RESULT

#: s64[world], by rank.
Counts = ctypes.Array[ctypes.c_int64]


def summed_by(known: Known, op: Op) -> Counts:
    """Own rows that hold a contribution, by rank."""
    found = (ctypes.c_int64 * known.world)()
    core().fast.tb_summed(known.terms.pointer, ctypes.addressof(op), found)
    return found


class Safeguard(record_of(GUARD)):  # type: ignore[misc]
    """Judges one stage's ops in the order in which they end (``tb_judge_loss``).

    Attributes:
        smoothed: exponentially smoothed loss.
    """

    smoothed: float

    def __init__(self, limits: Limits) -> None:
        stop, skip = (_NEVER if limit is None else limit for limit in (limits.stop, limits.skip))
        super().__init__(stop, skip, WARN_OP, WARN_SMOOTHED)

    def judge(self, expected: int, taken: int) -> Action:
        """Judges one op.

        Args:
            expected, taken: rows of the ranks that took part, as they should be and as they came.
        """
        return Action(core().fast.tb_judge_loss(ctypes.addressof(self), expected, taken))

    def why(self, action: Action, expected: int, taken: int) -> str:
        """In words, what called for ``action`` when one op was judged."""
        loss = 1 - taken / expected if expected else 0.0
        limit = {Action.STOP: self.stop, Action.SKIP: self.skip}.get(action, WARN_OP)
        if loss > limit:
            return f"{loss:.1%} of an op's rows lost, more than {limit:.1%}"
        return f"{self.smoothed:.1%} of rows lost in the last ops, more than {WARN_SMOOTHED:.1%}"


def settle(job: Speaker, half: Half, stage: Stage) -> None:
    """Counts, at the end of a half, what repair has brought (clock-23)."""
    if not half.requested:  # as a rule
        return
    for flow in half.begun:
        if flow.again:
            rank, came = flow.rank, int(core().fast.tb_repaired(ctypes.addressof(half), flow.rank))
            job.repairs.came[stage, rank] += came
            job.counters["repair_rows_asked"] += flow.again
            job.counters["rows_repaired"] += came
            twice = job.records.count(rank, _TWICE[stage])
            job.repairs.paths[stage * job.world + rank].settled(flow.again, twice, probed=bool(flow.probed))
