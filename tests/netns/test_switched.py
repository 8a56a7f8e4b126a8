"""All-reduces through the lab's summing switch, over xdp and udp workers: bits, faults, restarts, bytes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fault_rows import contributors
from lab_team import lab_team
from support import MS, Team, exact_mean, gradients, hasty, nmse, patient
from tailbound.settings.table import switch_of
from tailbound.transport.backoff import Policy
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
NUMEL = 2 * 64 * 1408


def through(lab: Cluster, settings: dict[str, Any], **options: Any) -> Any:
    """A job whose rows go to the lab's switch."""
    where = switch_of(None, lab.switch.environment)
    return lab_team(lab, settings | {"switch": where}, cookie=lab.switch.entry.cookie, **options)


def set_port(lab: Cluster, rank: int, state: str) -> None:
    """A port of the switch goes down or up: unlike a blocked bridge port it stops what XDP forwards, too."""
    argv = ["ip", "link", "set", Link.DATA.port(rank), state]
    namespaces.call(lab.topology.switch, lambda: subprocess.run(argv, check=True), patient=True)


def steady(job: Team, ops: int, numel: int = NUMEL) -> list[Any]:
    """All-reduces in which nothing may be missing; results of each, those of rank 0."""
    outs = []
    for op in range(ops):
        inputs = gradients("U", len(job), numel, seed=op)
        results = job.allreduce(inputs)
        for out, outcome in results:
            assert outcome.delivered == outcome.expected
            assert not outcome.late
            np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
        assert nmse(results[0][0], exact_mean(inputs)) <= 5e-3
        outs.append(results[0][0])
    return outs


def settle(job: Team, ops: int = 3) -> None:
    """Until so many ops running were whole: deadlines are short here, and a thread may well not run for as long."""
    seen = 0
    for op in range(20):
        results = job.allreduce(gradients("U", len(job), NUMEL, seed=op))
        if any(o.delivered < o.expected or o.late for _, o in results):
            seen = 0
            continue
        for out, _ in results:
            np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
        seen += 1
        if seen == ops:
            return
    pytest.fail("never whole")


def test_the_mean_and_its_bits_over_both_datapaths(tailbound_lab: Make) -> None:
    lab, found = tailbound_lab(workers=3, switch=True), list[list[Any]]()
    for datapath in ("xdp", "udp"):
        lab.switch.restart()
        with through(lab, patient(width=1408, ring_mib=16.0), datapath=datapath) as job:
            assert {member.datapath for member in job.communicators} == {f"switch-{datapath}"}
            found.append(steady(job, 3))
            larger = [10 * x for x in gradients("U", 3, NUMEL, seed=1)]
            assert all(outcome.clipped > 0 for _, outcome in job.allreduce(larger))  # beyond the headroom of its scales
            results = job.allreduce(larger)
            assert all(outcome.clipped == 0 for _, outcome in results)
            assert nmse(results[0][0], exact_mean(larger)) <= 5e-3
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_losses_in_the_cables_are_made_good(tailbound_lab: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # a row's repeats are over soon, and a thread that does not run meanwhile would answer none of them
    monkeypatch.setattr("tailbound.transport.flush.PATIENCE", 100 * MS)
    lab = tailbound_lab(workers=3, switch=True, loss=0.02, seed=3)
    with through(lab, patient(width=1408, ring_mib=16.0, quiet=5 * MS)) as job:
        steady(job, 6)
        counters = [member.stats()["counters"] for member in job.communicators]
        assert sum(c.get("rows_sent_again", 0) for c in counters) > 0
        assert sum(c.get("seal_deadline_hits", 0) for c in counters) == 0


def test_a_switch_that_restarts_costs_a_bounded_time_and_no_wrong_sum(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=3, switch=True)
    with through(lab, hasty(width=1408, ring_mib=16.0, rotate=False)) as job:
        settle(job)
        for op in range(20):
            inputs = gradients("U", 3, NUMEL, seed=op)
            begun = time.monotonic()
            if op == 1:
                lab.switch.restart()
            results = job.allreduce(inputs)
            assert time.monotonic() - begun < job[0].config.bound / 1e9 + 2
            found = [contributors(out, inputs, {0, 1, 2}, job[0]._row_width) for out, _ in results]
            if op > 1 and all(set(rows) == {frozenset({0, 1, 2})} for rows in found):
                return
        pytest.fail("never whole again")


def test_a_port_that_is_down_leaves_out_one_worker_and_holds_up_nobody(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=3, switch=True)
    with through(lab, hasty(width=1408, ring_mib=16.0)) as job:
        settle(job)
        set_port(lab, 2, "down")
        for op in range(20):
            inputs = gradients("U", 3, NUMEL, seed=op)
            (one, its), (other, others), _ = job.allreduce(inputs)
            if its.missed or others.missed:
                continue
            np.testing.assert_array_equal(one, other)
            # nobody waits for it any more
            if its.deadline_hits == others.deadline_hits == 0 and nmse(one, exact_mean(inputs[:2])) <= 5e-3:
                break
        else:
            pytest.fail("it is still waited for")
        set_port(lab, 2, "up")
        for op in range(20):
            inputs = gradients("U", 3, NUMEL, seed=op)
            results = job.allreduce(inputs)
            if all(nmse(out, exact_mean(inputs)) <= 5e-3 for out, _ in results):
                return
        pytest.fail("the worker does not come back")


def test_a_job_that_the_switch_has_lost_goes_on_rank_to_rank_and_comes_back(
    tailbound_lab: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailbound.transport.switch.RESTS", Policy(1500 * MS))
    lab = tailbound_lab(workers=3, switch=True)
    with through(lab, hasty(width=1408, ring_mib=16.0)) as job:
        settle(job)
        assert lab.switch.remove(lab.switch.entry.cookie)
        end = time.monotonic() + 60

        def until(owners: tuple[int, ...]) -> None:
            op, error = 0, 1.0
            while job[0].job.sequence.map.owners != owners or error > 5e-3:
                assert time.monotonic() < end, (job[0].job.sequence.map, error)
                inputs = gradients("U", 3, NUMEL, seed=op)
                error, op = nmse(job.allreduce(inputs)[0][0], exact_mean(inputs)), op + 1

        until((0, 1, 2))
        lab.switch.restart()
        until((3,))
