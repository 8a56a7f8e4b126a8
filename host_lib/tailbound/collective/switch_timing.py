"""What deadlines learn from an op whose rows a switch owns (clock-4, clock-5, clock-11).

There is no first half that this rank could see. D1 is the time after which it releases rows with what is in, learned
from when the last rank showed up to when the last result came; D2 is what the release itself may take.
"""

from __future__ import annotations

from typing import Any

from tailbound.collective.job import Job
from tailbound.transport.deadline import Sample
from tailbound.wire.schema import MAX_RANKS, op_slot

#: Part of an op's rows that may have been released early without making its times those of a deadline.
PARTIAL = 0.02


def sample(job: Job, one: Any, record: Any) -> Sample:
    """The sample of ``one`` (``timing.Pending``), from its ``record`` and arrival stamps."""
    assert job.switch is not None
    opened, at = int(record["opened_ns"]), op_slot(one.label) * MAX_RANKS
    heard, stamps = record["heard"].tolist(), job.store.arrivals[at : at + job.world]
    latest = one.start + job.deadlines.skew_max

    def came(rank: int, stamp: str) -> int:
        us = int(stamps[rank][stamp]) if heard[rank >> 6] >> (rank & 63) & 1 else 0
        return opened + 1000 * (us - 1) if us else 0

    shown = [came(p, "first_us") for p in one.waited_for]
    shown += [t for p in one.suspects if 0 < (t := came(p, "first_us")) <= latest]
    shown = [t for t in (*shown, one.own) if t]
    last_shown = max(shown, default=0)
    last = max(came(job.switch, "published_us"), one.complete)
    flushed = one.sealed < last  # rows were released: how long results take without that is not seen
    transfer: int | None = None
    if one.transfer_cut is not None:
        transfer = one.transfer_cut
    elif last and last_shown and not one.partial:
        transfer = max(0, last - max(one.start, min(last, last_shown)))
    # a release of everything takes as long as everything
    second = one.results_cut if one.results_cut is not None else last - one.sealed if flushed else transfer
    first = max(0, last_shown - one.start) if last_shown else None
    whole = None if first is None or transfer is None or second is None else first + transfer + second
    return Sample(
        one.flow_bytes, first, transfer, second, False, False, one.lost, one.step, whole, one.waited
    )  # fmt: skip
