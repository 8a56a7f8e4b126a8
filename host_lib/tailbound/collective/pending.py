"""What is kept of an op that is over, until its stamps are read (clock-5)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pending:
    """An op that is over. Times are monotonic ns; 0: never.

    Attributes:
        start: of its stage clock.
        waited: from the own launch to ``start``, ns; None: it was launched later.
        sealed: when the own rows were sealed, or the switch was first asked to release rows.
        own: when the own rows were summed; 0: they did not take part.
        waited_for, suspects: ranks whose contributions were waited for, and those that were not since they are suspect.
        owners: ranks whose results were waited for.
        complete: when the last result was in, as far as this rank has noticed.
        present: results that were in.
        early: silence has closed a half.
        transfer_cut, results_cut: what deadlines cut off of the halves (``stage.cut``), ns.
        lost: share of the rows that a deadline cut off.
        switched: a switch summed its rows.
        partial: the switch released more than a few of its rows early.
    """

    label: int
    step: int
    flow_bytes: int
    start: int
    waited: int | None
    sealed: int
    own: int
    waited_for: tuple[int, ...]
    suspects: tuple[int, ...]
    owners: tuple[int, ...]
    complete: int
    present: int
    early: bool
    transfer_cut: int | None
    results_cut: int | None
    lost: float
    switched: bool
    partial: bool
