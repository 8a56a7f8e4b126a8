"""What the lab says at the end of a run with faults."""

from __future__ import annotations

from tailbound.lab.faults import FaultCounts


def test_counts_are_a_sentence() -> None:
    counts = FaultCounts(seen=20_000, lost=200, duplicated=3, corrupted=2, passed=9, reordered=1, lost_other=7)
    assert (
        str(counts) == "of 20000 packets 200 lost (1.00 %), 7 of them not UDP; 3 duplicated, 2 corrupted, 1 reordered"
    )
    assert str(FaultCounts()) == "of 0 packets 0 lost; 0 duplicated, 0 corrupted, 0 reordered"
