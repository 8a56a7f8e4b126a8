"""Switches that sum: the verbs on a box with two ports, and jobs over one; packets are in ``kernel/test_switch``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from lab_team import lab_team
from support import MS, patient, whole
from tailbound.errors import ConfigError
from tailbound.switch.job import JobSpec, RankSpec
from tailbound.switch.p4.switch import open_p4
from tailbound.transport.config import Switch, parse_switch
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

# One process, since its mount namespace takes the pins with it whatever happens. ``holds`` says where it goes wrong.
STORY = """
import os, signal, sys, threading
from pyroute2 import IPRoute
from tailbound import cli
from tailbound.errors import AttachError
from tailbound.kernel import net, pin
from tailbound_lab.lab.passthrough import load
from tailbound.kernel.attach import attach
from tailbound.switch import pinned

first, second = "data0", "data1"
rank = ["--rank", "198.18.0.1,02:7b:00:00:00:00,data0", "--rank", "198.18.0.2,02:7b:00:00:00:01,data1"]
up = ["up", first, second, "--address", "198.18.252.1", "--slots", "64"]

def switch(*words):
    return cli.main(["switch", *words])

def attached():
    return [net.xdp_on(name) is not None for name in (first, second)]

assert switch("status") == 1
assert (switch(*up), switch(*up)) == (0, 1)
try:
    attach(load(), first)
except AttachError as error:
    print(error, file=sys.stderr)
assert switch("job", "add", *rank, "--rows", "32", "--cookie", "0x4d") == 0
assert switch("job", "add", *rank, "--rows", "64", "--cookie", "0x4e") == 2
assert switch("job", "add", "--rank", "198.18.0.1,02:7b:00:00:00:00,lo", "--rows", "32") == 2
assert switch("status", "--json") == 0
meanwhile = []
one = ["job", "add", *rank, "--rows", "16", "--cookie", "0x50"]
adding = threading.Thread(target=lambda: meanwhile.append(switch(*one)), daemon=True)
with pin.alone(folder=True):  # another command is at it
    adding.start()
    adding.join(0.3)
    assert adding.is_alive()
adding.join()
assert meanwhile == [0]
assert pin.sweep() == []
assert switch("job", "remove", "0x4d") == 0
assert (switch("down"), attached(), switch("down")) == (0, [False, False], 0)

pid = os.fork()  # up, and killed before it is done
if pid == 0:
    pinned.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    switch(*up)
os.waitpid(pid, 0)
assert attached() == [True, True]
assert (switch(*up), switch("down")) == (0, 0)

program = load()
link = attach(program, second)
there = net.xdp_on(second)
assert switch(*up) == 1
assert net.xdp_on(second) == there and net.xdp_on(first) is None
os.close(link)
assert attached() == [False, False] and not pinned._folder().exists()
with IPRoute() as route:
    route.link("add", ifname="port0", kind="veth", peer={"ifname": "port1"})
    (index,) = route.link_lookup(ifname="port0")
    route.link("set", index=index, state="up")
    assert switch("up", "port0", "--address", "198.18.252.1", "--slots", "64") == 0
    folder = pinned._folder().name
    route.link("del", index=index)  # as with its namespace
assert pin.sweep() == [folder] and not pinned._folder().exists() and not pinned._file().exists()
"""


def test_up_down_status(tailbound_lab: Callable[..., Cluster]) -> None:
    """The verbs on a box with two ports, here the switch's own namespace of a lab."""

    def inside() -> subprocess.CompletedProcess[str]:
        # a thread's own mount namespace gives the child a /run of its own too
        return subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, timeout=100, check=False)

    done = namespaces.call(tailbound_lab(workers=2).topology.switch, inside, sysfs=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("export TAILBOUND_SWITCH=198.18.252.1,") and "cookie=77" in line for line in lines)
    status = json.loads(next(line for line in lines if line.startswith('{"address"')))
    assert [port["attached"] for port in status["ports"]] == [True, True]
    assert (status["jobs"][0]["base"], status["jobs"][0]["rows"]) == (0, 32)
    for words in (
        "a switch is up already at 198.18.252.1 on data0, data1",
        "data0 already carries Tailbound's tb_switch",
        "no 64 free slots",
        "which is no port of this switch",
        "which Tailbound never replaces",
    ):
        assert words in done.stderr, done.stderr


@pytest.mark.parametrize("ipv6", [True, False], ids=["IPv6", "IPv4"])
def test_a_switch_sums_for_both_datapaths(tailbound_lab: Callable[..., Cluster], ipv6: bool) -> None:
    """Of these sockets look at UDP's checksum; and with losses rows come by asking again."""
    lab = tailbound_lab(workers=3, ipv6=ipv6, switch=True, cables=True)
    bits = []
    for datapath in ("xdp", "udp"):
        lab.switch.restart()
        where = parse_switch(lab.switch.environment["TAILBOUND_SWITCH"])
        assert where.address == ("fd7b::fc01" if ipv6 else "198.18.252.1")
        settings = patient(width=0, ring_mib=8.0, switch=where, quiet=300 * MS)  # after which rows are asked for
        with lab_team(lab, settings, datapath=datapath, cookie=lab.switch.entry.cookie) as job:
            assert {member.datapath for member in job.communicators} == {f"switch-{datapath}"}
            assert job[0].config.width == (1344 if ipv6 else 1408)
            inputs, results = job.averaged(60 * 1344, 1)
            whole(results, inputs, 5e-3)
            bits.append(results[0][0].tobytes())
            assert min(port["results"] for port in lab.switch.status()["ports"]) >= 60  # of each row, at each port
            if datapath == "xdp":
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
    for make, words in (
        (lambda: lab.switch.add(JobSpec(mixed, 7, rows=64)), r"rank 1 has an address of IPv4 .*sums packets of IPv6"),
        (lambda: open_p4(["data0"], "fd7b::fc01"), r"address fd7b::fc01: the P4 switch sums packets of IPv4"),
        (lambda: Switch("fd7b::fc01", form="sums"), "that one is for IPv4"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
