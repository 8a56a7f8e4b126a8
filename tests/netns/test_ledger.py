"""Two countings of one network: what ranks book, and what cables, queues and programs count by themselves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lab_team import chosen, lab_team
from support import MS, PATIENCE, Team, balanced, gradients, patient
from tailbound.wire.schema import MISSING
from tailbound_lab.demo.ledger import Balance, balance
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

RANKS = 3
NUMEL = 8 * 64 * 1408
WIDE: dict[str, Any] = {"width": 1408, "ring_mib": 8.0, "quiet": 20 * MS, "share_rows": False}
#: What cables do. They take what a program sends back (echoes) only where their ends have programs too: in wire-size
#: mode, and where there are faults.
CALM: dict[str, Any] = {"wire": True}
DOUBLING: dict[str, Any] = {"loss": 0.01, "duplicate": 0.02}


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One for all cases of the same cables."""
    with Cluster(LabSpec(workers=RANKS, seed=11, **request.param)) as made:
        yield made
    assert not any(namespaces.exists(name) for name in made.topology.namespaces)


def counted(lab: Cluster) -> Counter[str]:
    """What the network itself counts of the data link, since the lab is there."""
    faults = lab.fault_counts(link=Link.DATA)
    queues = sum(entry.lost for entry in lab.drops() if entry.interface.startswith(Link.DATA.value))
    return Counter(lost_on_purpose=faults.lost, duplicated=faults.duplicated, lost_in_queues=queues)


def rows(stats: list[dict[str, Any]]) -> Counter[str]:
    """Rows of all ranks: by how receivers have entered them, ``sent`` by senders, ``entered`` by datapaths."""
    found = Counter[str]()
    for one in stats:
        counters, verdicts = one["counters"], one["verdicts"]
        found["sent"] += sum(counters.get(n, 0) for n in ("contributions_sent", "results_sent", "repair_rows_sent"))
        found["entered"] += sum(verdicts.get(n, 0) for n in ("STORED", "ADDED", "RESULT_TAKEN"))
        for stage in one["ledger"].values():
            for entry in stage.values():
                found.update(entry)
    return found


def at_rest(lab: Cluster, job: Team, before: Counter[str]) -> tuple[list[dict[str, Any]], Balance]:
    """Reads all counters until both sides are equal, or until that can no longer be hoped for."""
    until = time.monotonic() + PATIENCE
    while True:
        stats = [member.stats() for member in job.communicators]
        now = counted(lab)
        whole = balance(stats, **{name: now[name] - before[name] for name in now})
        if whole.balanced or time.monotonic() > until:
            return stats, whole


# what is lost on its way to the switch counts once, however many copies of it there would have been: multicast is calm
CASES = [("multicast", CALM, True), ("peers", DOUBLING, False), ("fanout", DOUBLING, True)]


@pytest.mark.parametrize(("result", "lab", "repair"), CASES, ids=["calm", "loss", "repair"], indirect=["lab"])
def test_books_and_counters_agree(lab: Cluster, repair: bool, result: str) -> None:
    """Rule: kernel-21."""
    faults, before = Fault.of(lab.spec), counted(lab)
    if faults.loss:
        lab.set_faults(Fault())  # TCP, which nobody counts here, connects before packets are lost
    # where nothing is lost every op ends by being whole, however long rows wait for a thread
    quiet = {} if faults.loss else {"quiet": 2000 * MS}
    with lab_team(lab, patient(**WIDE | quiet, repair=repair, result=result)) as job:
        chosen(job, *[result] * RANKS)
        if faults.loss:
            lab.set_faults(faults)  # the same fates in every case
        for op in range(6):
            job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
        assert all(job.each(lambda c: c.drain(PATIENCE)))
        stats, whole = at_rest(lab, job, before)
    assert whole.difference == 0, whole
    for one in stats:
        for stage in one["ledger"].values():
            assert all(balanced(entry) for entry in stage.values())
        assert one["rows_summed"] == sum(e["taken"] for e in one["ledger"]["contributions"].values())
    books = rows(stats)
    missing = sum(books[fate] for fate in MISSING)
    assert books["expected"] == books["taken"] + missing, books
    assert books["taken"] <= books["entered"], books
    # a mark may come in front of rows: what then comes when its stage is over is in the books as lost, too
    late = sum(one["verdicts"].get(name, 0) for one in stats for name in ("LATE", "STALE_OP", "STALE_RESULT"))
    assert books["lost"] <= whole.lost_on_purpose + whole.lost_in_queues + late + books["entered"] - books["taken"]
    if not repair:
        assert books["sent"] == books["expected"]  # every row that should have been sent was, once
        assert books["repaired"] == 0
    if not faults.loss:
        assert books["taken"] == books["expected"]
    else:
        assert whole.lost_on_purpose > 50
        assert books["repaired"] > 10 if repair else books["lost"] > 50
    if faults.duplicate:
        assert 0 < books["duplicated"] <= whole.duplicated + books["sent"] - books["expected"]
