"""Two countings of one network: what ranks book, and what cables, queues and programs count by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lab_team import lab_team
from support import MS, PATIENCE, Team, balanced, gradients, patient
from tailbound.demo.ledger import Balance, balance, rows
from tailbound.lab.cluster import Cluster
from tailbound.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
NUMEL = 8 * 64 * 1408
WIDE: dict[str, Any] = {"width": 1408, "ring_mib": 8.0, "quiet": 20 * MS, "share_rows": False}


def at_rest(lab: Cluster, job: Team) -> tuple[list[dict[str, Any]], Balance]:
    """Reads all counters until both sides are equal, or until that can no longer be hoped for."""
    until = time.monotonic() + PATIENCE
    while True:
        stats = [member.stats() for member in job.communicators]
        faults = lab.fault_counts(link=Link.DATA)
        queues = sum(entry.lost for entry in lab.drops() if entry.interface.startswith(Link.DATA.value))
        whole = balance(stats, lost_on_purpose=faults.lost, duplicated=faults.duplicated, lost_in_queues=queues)
        if whole.balanced or time.monotonic() > until:
            return stats, whole


@pytest.mark.parametrize("repair", [False, True], ids=["plain", "repair"])
@pytest.mark.parametrize(
    # what is lost on its way to the switch counts once, however many copies of it there would have been: multicast is
    # calm here
    ("result", "faults"),
    # a cable takes what a program sends back (echoes) only where its end has a program too: wire-size mode, or faults
    [
        ("peers", {"wire": True}),
        ("fanout", {"wire": True}),
        ("multicast", {"wire": True}),
        ("peers", {"loss": 0.01}),
        ("fanout", {"loss": 0.01}),
        ("fanout", {"loss": 0.01, "duplicate": 0.02}),
    ],
    ids=["calm", "calm, fan-out", "calm, multicast", "loss", "loss, fan-out", "loss+duplicates, fan-out"],
)
def test_books_and_counters_agree(tailbound_lab: Make, faults: dict[str, Any], repair: bool, result: str) -> None:
    """Rule: kernel-21."""
    ranks = 3
    lab = tailbound_lab(workers=ranks, seed=11, **faults)
    # where nothing is lost every op ends by being whole, however long rows wait for a thread
    quiet = {} if "loss" in faults else {"quiet": 2000 * MS}
    with lab_team(lab, patient(**WIDE | quiet, repair=repair, result=result)) as job:
        for op in range(6):
            job.allreduce(gradients("U", ranks, NUMEL, seed=op))
        assert all(job.each(lambda c: c.drain(PATIENCE)))
        stats, whole = at_rest(lab, job)
    assert whole.difference == 0, whole
    for one in stats:
        for stage in one["ledger"].values():
            assert all(balanced(entry) for entry in stage.values())
        assert one["rows_summed"] == sum(e["taken"] for e in one["ledger"]["contributions"].values())
    books = rows(stats)
    assert books.balanced, books
    # a mark may come in front of rows: what then comes when its stage is over is in the books as lost, too
    late = sum(one["verdicts"].get(name, 0) for one in stats for name in ("LATE", "STALE_OP", "STALE_RESULT"))
    assert books.lost <= whole.lost_on_purpose + whole.lost_in_queues + late + books.entered - books.taken
    if not repair:
        assert books.sent == books.expected  # every row that should have been sent was, once
        assert books.repaired == 0
    if "loss" not in faults:
        assert books.taken == books.expected
    else:
        assert whole.lost_on_purpose > 50
        assert books.repaired > 10 if repair else books.lost > 50
    if "duplicate" in faults:
        assert 0 < books.duplicated <= whole.duplicated + books.sent - books.expected
