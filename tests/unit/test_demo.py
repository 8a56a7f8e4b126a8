"""The demo's pure parts: the balance of packets, curves and figures, data and batches."""

from __future__ import annotations

from typing import Any

import pytest

from tailbound_lab.bench.train_rows import Record
from tailbound_lab.demo.ledger import balance
from tailbound_lab.demo.run import figures


def stats(sent: int, verdicts: dict[str, int], drops: dict[str, int]) -> dict[str, Any]:
    """One rank of two, as ``report.snapshot`` has it; ``verdicts`` there include the drops."""
    return {"sent": {"0": {"packets": sent}}, "verdicts": {**verdicts, **drops}, "drops": drops}


RANKS = [
    stats(100, {"STORED": 40, "ADDED": 30, "RESULT_TAKEN": 15, "CONTROL_PASSED": 5}, {"LATE": 2, "DUPLICATE": 1}),
    stats(90, {"STORED": 60, "RESULT_TAKEN": 33, "CONTROL_PASSED": 2}, {}),
]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({}, 0),
        ({"lost_on_purpose": 3}, 1),
        ({"lost_on_purpose": 6}, -2),
        ({"duplicated": 7}, 1),
        ({"lost_in_queues": 2}, 1),
    ],
)
def test_every_packet_has_gone_somewhere_and_one_too_many_or_too_few_shows(
    change: dict[str, int], difference: int
) -> None:
    right = {"lost_on_purpose": 4, "duplicated": 6, "lost_in_queues": 3, "socket_drops": 1}
    whole = balance(RANKS, **(right | change))
    assert (whole.sent, whole.dropped, whole.difference) == (190, 3, difference)
    assert whole.balanced == whole.as_dict()["balanced"] == (difference == 0)


def test_a_sum_that_is_replaced_counts_its_packet_once() -> None:
    """ABANDONED is counted besides the verdict of the packet that replaces the sum."""
    replaced = {"sent": {"1": {"packets": 2}}, "drops": {"LATE": 1, "ABANDONED": 1},
                "verdicts": {"STORED": 1, "LATE": 1, "ABANDONED": 1}}  # fmt: skip
    assert balance([replaced]).balanced


def test_the_figures_of_a_training() -> None:
    record = Record([0.3, 0.2, 0.2], [0.3, 0.4, 0.6], [(0.0, 0.1), (0.1, 0.2), (0.4, 0.9), (0.5, 0.96), (0.6, 0.94)])
    found = figures(record)
    assert (found["iter_p50_ms"], found["iter_p99_ms"], found["iter_max_ms"]) == (200, 300, 300)
    assert (found["training_s"], found["time_to_accuracy_s"], found["accuracy"]) == (0.6, 0.5, 0.94)
    assert found["settled_accuracy"] == pytest.approx((0.9 + 0.96 + 0.94) / 3)
