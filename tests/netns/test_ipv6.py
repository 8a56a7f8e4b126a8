"""Jobs over IPv6 between namespaces: the bits of IPv4's, over both datapaths; and a switch that sums over either."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lab_team import lab_team, told_by
from support import MS, Reference, gradients, patient, whole
from tailbound.errors import ConfigError
from tailbound.switch.job import JobSpec, RankSpec
from tailbound.switch.p4.switch import open_p4
from tailbound.transport.switch import Switch, parse
from tailbound.wire.schema import op_label
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

RANKS, COOKIE, WIDTH = 3, 0xBEEF, 1344
#: A question after an op may cross its end, and is stale then.
STRAY = {"STALE_RESULT"}


def test_the_bits_are_those_of_the_reference(tailbound_lab: Callable[..., Cluster]) -> None:
    """Sums in the kernel with checks and with tags, results by fan-out, sums of sockets; and what goes beside."""
    lab = tailbound_lab(workers=RANKS, ipv6=True, wire=True)  # veths pass on what XDP_TX sends them
    ops = [gradients("U", RANKS, 60 * WIDTH + 13, seed=op) for op in range(2)]
    expected = Reference(RANKS, WIDTH, COOKIE)
    wanted = [expected.allreduce(inputs, op_label(op, 0)) for op, inputs in enumerate(ops)]
    for datapath, authenticate in (("xdp", "off"), ("xdp", "on"), ("udp", "off")):
        settings = patient(width=0, ring_mib=8.0, authenticate=authenticate)
        with lab_team(lab, settings, datapath=datapath, cookie=COOKIE, name=f"{datapath} {authenticate}") as job:
            assert {member.datapath for member in job.communicators} == {datapath}
            at = [member.job.datapath.endpoint[0] for member in job.communicators]
            assert at == ["fd7b::1", "fd7b::2", "fd7b::3"]
            assert job[0].config.width == WIDTH
            for inputs, mean in zip(ops, wanted, strict=True):
                for out, outcome in job.allreduce(inputs):
                    assert outcome.delivered == outcome.expected
                    np.testing.assert_array_equal(out.view(np.uint32), mean.view(np.uint32))
            for member in job.communicators:
                assert set(member.stats()["drops"]) <= STRAY
                at_once = member.job.counters["results_at_once"]
                assert at_once > 0 if datapath == "xdp" else at_once == 0, member.job.channels.choice
            if (datapath, authenticate) == ("xdp", "off"):
                for _ in range(20):  # a probe follows a fifth of a MiB
                    job.allreduce(gradients("U", RANKS, 600 * WIDTH, seed=0))
                    measured = {member.stats()["traffic"]["rtt_by"] for member in job.communicators}
                    if "nobody" not in measured:
                        break
                assert measured == {"kernel"}
            job[0].reliable.serve("word", lambda request: [request])
            assert lab.run(2, job[2].reliable.pull, 0, "word", b"well", 10) == b"well"


STORY = """
import json, os, sys
from pyroute2 import IPRoute
from tailbound import cli
from tailbound.datapath.select import open_datapath
from tailbound.doctor.interfaces import leads_to_peers
from tailbound.errors import TailboundError
from tailbound.transport.config import Config
from tailbound.transport.switch import Switch

there, told = sys.argv[1], {}
for name in ("TAILBOUND_INTERFACE", "TAILBOUND_PORT"):
    del os.environ[name]

def opened(datapath="auto", towards=there, interface=None, **settings):
    try:
        path = open_datapath(datapath, interface, Config(rank=0, ranks=2, ring_mib=1.0, **settings), towards)
    except TailboundError as error:
        return [type(error).__name__, str(error)]
    said = [path.name, path.endpoint[0], path.store.width]
    path.close()
    return said

os.environ["MASTER_ADDR"] = there
told["doctor"] = leads_to_peers()
told["udp"] = opened()
told["named"] = opened("udp", interface="data0", mtu=1300)
told["switch"] = opened("udp", switch=Switch("198.18.252.1"))
with IPRoute() as route:
    route.addr("add", index=route.link_lookup(ifname="data0")[0], address="198.18.0.1", prefixlen=16)
told["towards both"] = [opened("udp", towards)[1] for towards in (there, "198.18.0.2")]
told["by name"] = [opened("udp", towards, interface="data0")[1] for towards in (there, "198.18.0.2", "")]
del os.environ["MASTER_ADDR"]
attach = ["attach", "data0", "--ring", "1", "--ipv6", "--loader", "clang"]
told["attach"] = cli.main(attach)
told["again"] = cli.main([*attach, "--replace"])
told["xdp"] = [opened(towards=towards) for towards in (there, "198.18.0.2")]
told["detach"] = cli.main(["detach", "data0"])
print(json.dumps(told))
"""


@pytest.mark.needs("clang", "libbpf")
@pytest.mark.usefixtures("warm_start")
def test_the_family_is_that_of_the_way_to_the_peers(tailbound_lab: Callable[..., Cluster]) -> None:
    lab = tailbound_lab(workers=2, ipv6=True)
    told, out, _ = told_by(lab, STORY, lab.workers[1].address)
    assert "UDP port 5515 of IPv6: rows of 1344 codes" in out
    assert told["doctor"] == ["data0", "it is the way to MASTER_ADDR=fd7b::2"]
    assert told["udp"] == ["udp", "fd7b::1", 1344]
    assert told["named"] == ["udp", "fd7b::1", 1152]  # 1300 bytes hold 1188 codes
    assert told["switch"][0] == "ConfigError"
    assert "sums packets of IPv4, and this rank talks over IPv6" in told["switch"][1]
    assert told["towards both"] == ["fd7b::1", "198.18.0.1"]
    assert told["by name"] == ["fd7b::1", "198.18.0.1", "fd7b::1"]
    assert told["xdp"] == [["xdp", "fd7b::1", 1344]] * 2  # as it was attached
    assert (told["attach"], told["again"], told["detach"]) == (0, 0, 0)
    assert "attached already as asked" in out


@pytest.mark.parametrize("ipv6", [True, False], ids=["IPv6", "IPv4"])
def test_the_switch_sums(tailbound_lab: Callable[..., Cluster], ipv6: bool) -> None:
    """Over both datapaths, of which sockets look at UDP's checksum; and with losses rows come by asking again."""
    lab = tailbound_lab(workers=RANKS, ipv6=ipv6, switch=True, cables=True)
    bits = []
    for datapath in ("xdp", "udp"):
        lab.switch.restart()
        where = parse(lab.switch.environment["TAILBOUND_SWITCH"])
        assert where.address == ("fd7b::fc01" if ipv6 else "198.18.252.1")
        settings = patient(width=0, ring_mib=8.0, switch=where, quiet=300 * MS)  # after which rows are asked for
        with lab_team(lab, settings, datapath=datapath, cookie=lab.switch.entry.cookie) as job:
            assert {member.datapath for member in job.communicators} == {f"switch-{datapath}"}
            assert job[0].config.width == (WIDTH if ipv6 else 1408)
            inputs, results = job.averaged(60 * WIDTH, 1)
            whole(results, inputs, 5e-3)
            bits.append(results[0][0].tobytes())
            assert min(port["results"] for port in lab.switch.status()["ports"]) >= 60  # of each row, at each port
            if datapath == "udp":
                continue
            lab.set_faults(Fault(loss=0.02), link=Link.DATA)
            found = [
                all(outcome.delivered == outcome.expected for _, outcome in job.allreduce(inputs)) for _ in range(3)
            ]
            lab.set_faults(Fault(), link=Link.DATA)
            assert sum(found) >= 2
            assert lab.fault_counts(link=Link.DATA).lost > 0
    assert bits[0] == bits[1]


def test_a_switch_and_its_workers_are_of_one_family(tailbound_lab: Callable[..., Cluster]) -> None:
    lab = tailbound_lab(workers=2, ipv6=True, switch=True)
    mixed = (RankSpec("fd7b::1", "02:7b:00:00:00:00", "data0"), RankSpec("198.18.0.2", "02:7b:00:00:00:01", "data1"))
    with pytest.raises(ConfigError, match=r"rank 1 has an address of IPv4 .*sums packets of IPv6"):
        lab.switch.add(JobSpec(mixed, 7, rows=64))
    with pytest.raises(ConfigError, match=r"address fd7b::fc01: the P4 switch sums packets of IPv4"):
        open_p4(["data0"], "fd7b::fc01")
    with pytest.raises(ConfigError, match="that one is for IPv4"):
        Switch("fd7b::fc01", form="sums")
