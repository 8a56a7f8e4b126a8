"""Jobs between namespaces: the reference's bits over every network and way, results that leave once, marks, hosts."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyroute2 import IPRoute

from lab_team import chosen, lab_team, said_by
from support import Reference, Team, gradients, hasty, patient, whole
from tailbound.transport.sockets import burst_packets, ports_of
from tailbound.wire.schema import HEADER_BYTES, op_label
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]
COOKIE = 0xBEEF
#: A question after an op may cross its end, and is stale then.
STRAY = {"STALE_RESULT"}
#: Scales that jump up and down.
FACTORS = (1.0, 10.0, 1.0)


# -- networks and ways -------------------------------------------------------------------------------------------------


def measured(job: Team, width: int) -> set[str]:
    """By whom the time to a peer and back is measured; a probe follows a fifth of a MiB."""
    for _ in range(20):
        job.allreduce(gradients("U", len(job), 600 * width, seed=0))
        found = {member.stats()["traffic"]["rtt_by"] for member in job.communicators}
        if "nobody" not in found:
            break
    return found


@pytest.mark.parametrize(
    ("network", "settings", "ways", "most"),
    [
        pytest.param({}, {}, {"xdp": 1408, "udp": 1408}, None, id="packets of 1500 bytes"),
        pytest.param({"mtu": 9000}, {}, {"xdp": 3392, "udp": 8896}, None, id="packets of 9000 bytes"),
        # veths of wire size pass on what XDP_TX sends them
        pytest.param({"ipv6": True, "wire": True}, {}, {"xdp": 1344, "udp": 1344}, None, id="IPv6"),
        pytest.param({"ipv6": True}, {"key_file": "drawn"}, {"xdp": 1344}, None, id="IPv6 with a key"),
        # planes are put together by the host; half bytes are taken apart by the kernel
        pytest.param({}, {"bits": 16, "width": 1408}, {"xdp": 1408, "udp": 1408}, 2e-7, id="codes of 16 bits"),
        pytest.param({}, {"bits": (4, 8), "width": 1408}, {"xdp": 1408, "udp": 1408}, 0.015, id="codes of 4 bits"),
    ],
)
def test_every_way_gives_the_same_bits(
    tailbound_lab: Make,
    network: dict[str, Any],
    settings: dict[str, Any],
    ways: dict[str, int],
    most: float | None,
) -> None:
    """With codes of 8 bits those of the reference: kernel sums, sums of sockets and numpy agree."""
    lab = tailbound_lab(workers=3, **network)
    wanted: dict[tuple[int, int], np.ndarray] = {}  # by width and op
    for datapath, width in ways.items():
        given = patient(**{"width": 0, "ring_mib": 8.0} | settings)
        with lab_team(lab, given, datapath=datapath, cookie=COOKIE, name=datapath) as job:
            assert {member.datapath for member in job.communicators} == {datapath}
            at = [member.job.datapath.endpoint[0] for member in job.communicators]
            assert at == [worker.address for worker in lab.workers]
            assert job[0].config.width == width
            ops = [
                [x * factor for x in gradients("U", 3, 60 * width + 13, seed=op)] for op, factor in enumerate(FACTORS)
            ]
            found = [job.allreduce(inputs) for inputs in ops]
            for member in job.communicators:
                assert set(member.stats()["drops"]) <= STRAY
                at_once = member.job.counters["results_at_once"]
                assert at_once > 0 if datapath == "xdp" else at_once == 0, member.job.channels.reason
            if datapath == "xdp" and network.get("wire"):
                assert measured(job, width) == {"kernel"}
            job[0].reliable.serve("word", lambda request: [request])
            assert lab.run(2, job[2].reliable.pull, 0, "word", b"well", 10) == b"well"
        for op, (inputs, results) in enumerate(zip(ops, found, strict=True)):  # when no rank waits for this process
            whole(results, inputs, most or 2e-3)
            if most is None and (width, op) not in wanted:
                wanted[width, op] = Reference(3, width, COOKIE).allreduce(inputs, op_label(op, 0))
            mean = wanted.setdefault((width, op), results[0][0])
            np.testing.assert_array_equal(results[0][0].view(np.uint32), mean.view(np.uint32))


def test_marks_of_a_shallow_queue_come_back_and_slow_senders(tailbound_lab: Make) -> None:
    """Rules: clock-24, kernel-26."""
    mbit = 10**6
    lab = tailbound_lab(workers=3, rate=100 * mbit, queue=64 << 10, ecn=True)
    settings = patient(width=1408, ring_mib=8.0, rate=100 * mbit / 8, dscp=11)
    with lab_team(lab, settings) as job:
        classes = {sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for one in job for sock in one.job.sender.sockets}
        assert classes == {11 << 2 | 2}  # DSCP, and ECT(0)
        for seed in range(300):  # until two senders have met at a port: patience, and no bound
            job.allreduce(gradients("U", 3, 1 << 19, seed=seed))
            seen = [member.stats()["traffic"] for member in job.communicators]
            if all(any(of[name] for of in seen) for name in ("marked", "marked_there", "slowed")):
                break
        else:
            raise AssertionError("no mark has slowed a sender")
        assert lab.fault_counts().marked >= sum(of["marked"] for of in seen) > 0
        assert {of["rtt_by"] for of in seen} == {"kernel"}


# -- results that leave once for all peers -----------------------------------------------------------------------------

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


def switch_does(lab: Cluster, *, flood: bool, snoop: bool = False) -> None:
    """Whether the switch lets multicast that rank 2, or with ``snoop`` nobody, has asked for out of its port.

    A switch that snoops (IGMP) sends to ports whose rank joined, and asks for members itself.
    """

    def change() -> None:
        with IPRoute() as ip:
            for rank in range(3) if snoop else [2]:
                ip.brport("set", index=ip.link_lookup(ifname=Link.DATA.port(rank))[0], mcast_flood=int(flood))
            if snoop:
                index = ip.link_lookup(ifname=Link.DATA.bridge)[0]
                # a bridge goes by what it has heard once its first query must have been answered: in half a second
                ip.link("set", index=index, kind="bridge", br_mcast_query_response_intvl=50)
                ip.link("set", index=index, kind="bridge", br_mcast_snooping=1, br_mcast_querier=1)

    namespaces.call(lab.topology.switch, change)


def test_results_that_leave_once_have_the_bits_of_a_send_to_each_peer(tailbound_lab: Make) -> None:
    """Over cables that take packets of a wire's size alone; other tests here send super-frames. Rule: kernel-8."""
    ranks, ops, own = 4, 3, NUMEL // 1408 // 4
    lab = tailbound_lab(workers=ranks, wire=True)
    bits: dict[str, list[bytes]] = {}
    for result in ("peers", "fanout", "multicast"):
        with lab_team(lab, patient(**WIDE, result=result), cookie=COOKIE) as job:
            chosen(job, *[result] * ranks)
            bits[result] = [out.tobytes() for out in steady(job, ops)]
            for member in job.communicators:
                stats = member.stats()
                counters, choice = stats["counters"], stats["choice"]
                assert counters["results_sent"] == ops * own * (ranks - 1)
                assert counters.get("results_at_once", 0) == (0 if result == "peers" else ops)
                assert set(stats["drops"]) <= STRAY
                sources = {sock.getsockname()[1] for sock in member.job.sender.sockets}
                assert len(sources) == 1 + ports_of(3) * 3 + len(member.job.sender.shared)
                if result != "peers":
                    channel = choice["channels"][result]
                    assert (channel["packets"], choice["clones_failed"]) == (ops * own, {})
                    # a burst leaves once, and not once a peer; a full socket may take one in parts
                    assert channel["calls"] <= ops * (1 - (-own // burst_packets(1408 + HEADER_BYTES)))
    assert bits["fanout"] == bits["multicast"] == bits["peers"]


def test_multicast_passes_a_switch_that_snoops(tailbound_lab: Make) -> None:
    """Nothing is flooded: what arrives does so because every rank has joined. Another group has members of its own."""
    lab = tailbound_lab(workers=3)
    switch_does(lab, flood=False, snoop=True)
    for cookie in (1, 2):
        with lab_team(lab, patient(**WIDE, result="multicast"), cookie=cookie, name=f"job{cookie}") as job:
            assert {choice["group"] for choice in chosen(job, *["multicast"] * 3)} == {f"239.192.0.{cookie}"}
            steady(job, 3)
            assert all(member.stats()["counters"]["results_at_once"] == 3 for member in job.communicators)


def test_multicast_that_stops_being_delivered_is_given_up(tailbound_lab: Make) -> None:
    """A switch that leaves out one port: results for it come on request, and every rank decides for its own packets."""
    lab = tailbound_lab(workers=3)
    with lab_team(lab, patient(**WIDE, result="multicast")) as job:
        chosen(job, "multicast", "multicast", "multicast")
        steady(job, 1)
        switch_does(lab, flood=False)
        steady(job, 4)
        choices = chosen(job, "fanout", "fanout", "multicast")
        assert all("does not reach 2" in choice["reason"] for choice in choices[:2])
        switch_does(lab, flood=True)
        steady(job, 2)
        chosen(job, "fanout", "fanout", "multicast")


def test_a_burst_does_not_wait_for_the_host_of_a_lead_that_is_gone(tailbound_lab: Make) -> None:
    """Nobody answers for its address any more: what is sent to it waits for a neighbour, and no copy of it leaves.

    Rule: kernel-23.
    """
    ranks, victim = 4, 3
    lab, own = tailbound_lab(workers=ranks), NUMEL // 1408 // ranks

    def forget() -> None:
        with IPRoute() as ip:
            index = ip.link_lookup(ifname=Link.DATA.interface)[0]
            ip.neigh("del", dst=lab.workers[victim].address, ifindex=index)

    with lab_team(lab, hasty(**WIDE, result="fanout")) as job:
        for op in range(3):
            job.allreduce(gradients("U", ranks, NUMEL, seed=op))
        assert job[0].job.channels.fanout.lead == victim
        lab.set_link(victim, up=False, link=Link.DATA)
        for rank in range(victim):
            lab.run(rank, forget)
        whole_ops = 0
        for op in range(40):
            results = job.allreduce(gradients("U", ranks, NUMEL, seed=op % 4), ranks=range(victim))
            # contributions and results of both peers; a loaded machine may hold up somebody
            whole_ops += all(outcome.delivered >= 2 * 2 * own for _, outcome in results)
            if whole_ops == 3:
                break
        assert (whole_ops, job[0].job.channels.fanout.lead) == (3, 2)
        lab.set_link(victim, up=True, link=Link.DATA)


# -- two hosts of two ranks --------------------------------------------------------------------------------------------

SHARING = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from tailbound_lab.bench.link import link_bytes
from tailbound.torch import register

ENTRIES, SETTLED, STEPS = 1 << 20, 4, 3
torch.set_num_threads(1)
dist.init_process_group("gloo")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(ENTRIES // 4) for _ in range(4))

    def forward(self, values):
        return sum((part * values[k]).sum() for k, part in enumerate(self.parts))

def carried(node_group):  # between barriers, as what is measured is in any benchmark
    net = DDP(Net(), bucket_cap_mb=1)
    random = torch.Generator().manual_seed(dist.get_rank())
    patient = {"patience": 26.0, "advanced": {"deadline_ms": (4000.0, 10_000.0)}}
    with register(net, node_group=node_group, datapath="udp", timeout=60.0, **patient) as state:
        for step in range(SETTLED + STEPS):
            if step == SETTLED:
                dist.barrier()
                before = link_bytes()
                dist.barrier()
            net(torch.randn(4, ENTRIES // 4, generator=random)).backward()
            net.zero_grad()
        dist.barrier()
        after, stats = link_bytes(), state.stats()
        dist.barrier()
    return {"bytes": (after - before) / STEPS, "delivered": stats["delivered"], "ranks": stats["ranks"]}

print("said " + json.dumps([carried("off"), carried("auto")]), flush=True)
dist.destroy_process_group()
"""

SHARDED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from fsdp_jobs import grid, held, same, sharded
from tailbound.torch import fsdp
from torch_jobs import BOUND, PATIENT, gradient, nmse, passes

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = grid()
ours, theirs = sharded(mesh["shard"]), sharded(mesh)
interfaces = "data0,plain0"
state = fsdp.register(ours, mesh["replicate"], **{**PATIENT, "datapath": "xdp", "interface": interfaces})
for step in range(4):
    passes((ours, theirs), dist.get_rank(), step)
    assert nmse(gradient(ours), gradient(theirs)) <= 3 * BOUND
    assert same(held(ours, gradients=True), mesh)
stats = state.stats()
assert (stats["datapath"], stats["delivered"], stats["ranks"]) == ("xdp", 1.0, 2), stats
state.close()
dist.destroy_process_group()
"""


def said_on_hosts(lab: Cluster, script: str, tmp_path: Path) -> list[str]:
    """What four ranks on two hosts say that run ``script``; jobs of PyTorch are there for it."""
    file = tmp_path / "worker.py"
    file.write_text(script)
    command = [sys.executable, str(file), str(Path(__file__).parents[1] / "jobs")]
    return said_by(lab, [command] * 4, 110, places=2)


@pytest.mark.needs("torch")
@pytest.mark.usefixtures("warm_start")
@pytest.mark.timeout(150)  # what workers have to say must come out before
def test_a_host_sends_a_half_of_what_it_would_alone(tailbound_lab: Make, tmp_path: Path) -> None:
    """1/L of the bytes of a flat job, and 5 % at most on top."""
    for said in said_on_hosts(tailbound_lab(workers=2), SHARING, tmp_path):
        (line,) = (text for text in said.splitlines() if text.startswith("said "))
        flat, shared = json.loads(line.removeprefix("said "))
        assert (flat["ranks"], shared["ranks"]) == (4, 2)
        assert flat["delivered"] == shared["delivered"] == 1.0
        # contributions and results, both ways, half of them own
        assert 2 * 2 * (1 << 20) * 0.5 < shared["bytes"] <= 1.05 / 2 * flat["bytes"]


@pytest.mark.needs("torch")
@pytest.mark.usefixtures("warm_start")
@pytest.mark.timeout(150)
def test_two_jobs_on_a_host_take_an_interface_each(tailbound_lab: Make, tmp_path: Path) -> None:
    said_on_hosts(tailbound_lab(workers=2), SHARDED, tmp_path)
