"""Results that leave once for all peers, by fan-out and by multicast, between namespaces: bits, books, fabrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
from pyroute2 import IPRoute

from lab_team import chosen, lab_team
from left_behind import nothing_more
from support import Team, gradients, hasty, patient, whole
from tailbound.transport.batch import burst_packets
from tailbound.transport.sockets import ports_of
from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
NUMEL = 8 * 64 * 1408
WIDE: dict[str, Any] = {"width": 1408, "ring_mib": 8.0, "share_rows": False}


def steady(job: Team, ops: int) -> list[np.ndarray]:
    """All-reduces in which nothing may be missing and all ranks get the same; rank 0's averages."""
    outs = []
    for op in range(ops):
        results = job.allreduce(gradients("U", len(job), NUMEL, seed=op))
        whole(results)
        outs.append(results[0][0])
    return outs


def ports(lab: Cluster, ranks: Collection[int], *, flood: bool) -> None:
    """Whether the switch lets multicast that nobody has asked for out of the ports towards ``ranks``."""

    def change() -> None:
        with IPRoute() as ip:
            for rank in ranks:
                ip.brport("set", index=ip.link_lookup(ifname=Link.DATA.port(rank))[0], mcast_flood=int(flood))

    namespaces.call(lab.topology.switch, change)


def snoop(lab: Cluster) -> None:
    """The switch goes by who has joined (IGMP snooping), asks for members itself, and floods nothing."""

    def change() -> None:
        with IPRoute() as ip:
            index = ip.link_lookup(ifname=Link.DATA.bridge)[0]
            # a bridge goes by what it has heard once its first query must have been answered: in half a second, not 10
            ip.link("set", index=index, kind="bridge", br_mcast_query_response_intvl=50)
            ip.link("set", index=index, kind="bridge", br_mcast_snooping=1, br_mcast_querier=1)

    namespaces.call(lab.topology.switch, change)
    ports(lab, range(len(lab.workers)), flood=False)


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    """Three workers; tests leave it as they find it."""
    with nothing_more(), Cluster(LabSpec(workers=3)) as made:
        yield made


def test_the_bits_are_those_of_a_send_to_each_peer(tailbound_lab: Make) -> None:
    """Over cables that take packets of a wire's size alone; other tests here send super-frames. Rule: kernel-8."""
    ranks, ops = 4, 3
    lab = tailbound_lab(workers=ranks, wire=True)
    bits: dict[str, list[np.ndarray]] = {}
    for result in ("peers", "fanout", "multicast"):
        with lab_team(lab, patient(**WIDE, result=result), cookie=0xC0DE) as job:
            chosen(job, *[result] * ranks)
            bits[result] = steady(job, ops)
            for member in job.communicators:
                stats = member.stats()
                counters, choice = stats["counters"], stats["choice"]
                assert choice["result"] == result
                assert counters["results_sent"] == ops * NUMEL // 1408 // ranks * (ranks - 1)
                assert counters.get("results_at_once", 0) == (0 if result == "peers" else ops)
                assert not set(stats["drops"]) - {"STALE_RESULT"}
                sources = {sock.getsockname()[1] for sock in member.job.sender.sockets}
                assert len(sources) == 1 + ports_of(3) * (3 + len(member.job.sender.shared))
                if result != "peers":
                    assert choice["channels"][result]["packets"] == ops * NUMEL // 1408 // ranks
                    # a burst leaves once, and not once a peer; a full socket may take one in parts
                    calls = choice["channels"][result]["calls"]
                    assert calls <= ops * (1 - (-NUMEL // 1408 // ranks // burst_packets(1408 + HEADER_BYTES)))
                    assert choice["clones_failed"] == {}
    for result in ("fanout", "multicast"):
        for ours, theirs in zip(bits[result], bits["peers"], strict=True):
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_multicast_passes_a_switch_that_snoops(tailbound_lab: Make) -> None:
    """Nothing is flooded: what arrives does so because every rank has joined."""
    lab = tailbound_lab(workers=3)
    snoop(lab)
    with lab_team(lab, patient(**WIDE, result="multicast")) as job:
        choices = chosen(job, "multicast", "multicast", "multicast")
        assert len({choice["group"] for choice in choices}) == 1
        steady(job, 3)
        assert all(member.stats()["counters"]["results_at_once"] == 3 for member in job.communicators)
    # they have left: a job of its own group needs its own members
    with lab_team(lab, patient(**WIDE, result="multicast", group="239.200.1.2"), name="other") as job:
        assert {choice["group"] for choice in chosen(job, *["multicast"] * 3)} == {"239.200.1.2"}
        steady(job, 2)


def test_multicast_that_is_not_delivered_is_done_without(lab: Cluster) -> None:
    """A switch that leaves out one port: results for it come on request, and every rank decides for its own packets."""
    ports(lab, [2], flood=False)
    with lab_team(lab, patient(**WIDE, result="multicast")) as job:
        chosen(job, "multicast", "multicast", "multicast")
        steady(job, 4)
        choices = chosen(job, "fanout", "fanout", "multicast")
        assert all("does not reach 2" in choice["reason"] for choice in choices[:2])
        ports(lab, [2], flood=True)
        steady(job, 2)
        chosen(job, "fanout", "fanout", "multicast")


def test_multicast_that_stops_being_delivered_is_given_up(lab: Cluster) -> None:
    """Rank 1 complains of missing rows: those that are requested again, by themselves, are too few."""
    with lab_team(lab, hasty(**WIDE, result="multicast", repair=False)) as job:
        chosen(job, "multicast", "multicast", "multicast")
        steady(job, 1)
        ports(lab, [1], flood=False)
        for op in range(10):
            job.allreduce(gradients("U", 3, NUMEL, seed=op))
        choices = chosen(job, "fanout", "multicast", "fanout")
        assert "does not reach 1" in choices[0]["reason"]
        steady(job, 2)
    ports(lab, [1], flood=True)


def test_a_burst_does_not_wait_for_the_host_of_a_lead_that_is_gone(tailbound_lab: Make) -> None:
    """Nobody answers for its address any more: what is sent to it waits for a neighbour, and no copy of it leaves.

    Rule: kernel-23.
    """
    ranks, victim = 4, 3
    lab = tailbound_lab(workers=ranks)
    others = range(victim)

    def forget() -> None:
        with IPRoute() as ip:
            index = ip.link_lookup(ifname=Link.DATA.interface)[0]
            ip.neigh("del", dst=lab.workers[victim].address, ifindex=index)

    with lab_team(lab, hasty(**WIDE, result="fanout")) as job:
        for op in range(3):
            job.allreduce(gradients("U", ranks, NUMEL, seed=op))
        assert job[0].job.channels.fanout.lead == victim
        lab.set_link(victim, up=False, link=Link.DATA)
        for rank in others:
            lab.run(rank, forget)
        whole_ops, own = 0, NUMEL // 1408 // ranks
        for op in range(40):
            results = job.allreduce(gradients("U", ranks, NUMEL, seed=op % 4), ranks=others)
            # contributions and results of both peers; a loaded machine may hold up somebody
            whole_ops += all(outcome.delivered >= 2 * 2 * own for _, outcome in results)
            if whole_ops == 3:
                break
        assert whole_ops == 3
        assert job[0].job.channels.fanout.lead == 2
        lab.set_link(victim, up=True, link=Link.DATA)
