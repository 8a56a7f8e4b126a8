"""The switch on real ports: copies reach every worker with addresses of its own, and trouble stays bounded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from switch_cases import Job, contribution, result
from tailbound.wire.schema import Flag
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Sockets = Callable[..., socket.socket]
ADDRESS = Link.DATA.switch_address()


class Rank:
    """A worker with a plain UDP socket."""

    def __init__(self, lab: Cluster, sockets: Sockets, rank: int, port: int) -> None:
        self.socket = sockets(lab, rank, port=port)
        self.port = port

    def send(self, *several: bytes) -> None:
        for packet in several:
            self.socket.sendto(packet, (ADDRESS, self.port))

    def take(self) -> bytes:
        """The next packet; it must come from the switch."""
        data, source = self.socket.recvfrom(4096)
        assert source == (ADDRESS, self.port)
        return data


class Team:
    """All workers of a lab with a switch, and its job in the terms of ``switch_cases``."""

    def __init__(self, lab: Cluster, sockets: Sockets) -> None:
        self.lab = lab
        entry = lab.switch.entry
        self.job = Job(entry.cookie, len(lab.workers), 0, entry.rows, entry.headroom, entry.port, ADDRESS)
        self.ranks = [Rank(lab, sockets, rank, entry.port) for rank in range(self.job.ranks)]

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def packet(self, rank: int, seq: int = 0, **fields: Any) -> bytes:
        return contribution(rank, job=self.job, seq=seq, **fields)

    def row(self, seq: int) -> None:
        """A row that all contribute to and receive."""
        sent = [self.packet(rank, seq) for rank in range(self.job.ranks)]
        for rank, packet in zip(self.ranks, sent, strict=True):
            rank.send(packet)
        for rank in range(self.job.ranks):
            assert self[rank].take() == result(sent[-1], sent, "mean", self.job), (seq, rank)

    def verdicts(self) -> dict[str, int]:
        return dict(self.lab.switch.status()["jobs"][0]["verdicts"])


@pytest.fixture
def team(tailbound_lab: Callable[..., Cluster], datagram_socket: Sockets) -> Callable[..., Team]:
    return lambda workers=3, **spec: Team(tailbound_lab(workers=workers, switch=True, **spec), datagram_socket)


@pytest.mark.parametrize("spec", [{}, {"cables": True}], ids=["veths", "cables"])
def test_copies_reach_all(team: Callable[..., Team], spec: dict[str, Any]) -> None:
    three = team(**spec)
    for seq in range(3):
        three.row(seq)
    again = three.packet(1, 1, flags=Flag.REPEAT)
    three[1].send(again)
    sent = [three.packet(rank, 1) for rank in range(3)]
    assert three[1].take() == result(again, sent, "mean", three.job)
    three.row(3)  # the others' next packet is this row's: nobody else was answered
    assert three.verdicts() == {"STORED": 4, "ADDED": 8, "ANSWERED": 1}
    ports = {port["name"]: port for port in three.lab.switch.status()["ports"]}
    assert [ports[f"data{rank}"]["results"] for rank in range(3)] == [4, 5, 4]
    assert ports["data1"]["answers"] == 1


def test_foreign_traffic_takes_the_bridge(team: Callable[..., Team], datagram_socket: Sockets) -> None:
    three = team()
    there, here = datagram_socket(three.lab, 2), datagram_socket(three.lab, 0)
    here.sendto(b"to a worker", there.getsockname())
    assert there.recvfrom(100) == (b"to a worker", here.getsockname())
    here.sendto(three.packet(0), (three.lab.workers[1].address, three.job.port))
    assert three[1].socket.recvfrom(4096) == (three.packet(0), here.getsockname())
    assert three.verdicts() == {}


def test_another_run_needs_another_cookie(team: Callable[..., Team]) -> None:
    three = team()
    three.row(40)
    three.lab.switch.renew()
    three[0].send(three.packet(0, 0))  # of the run before: nobody's job any more
    assert three.lab.environment(1)["TAILBOUND_COOKIE"] == f"{three.lab.switch.entry.cookie:#010x}"
    three.job = Job(three.lab.switch.entry.cookie, 3, 0, three.job.rows, three.job.headroom, three.job.port, ADDRESS)
    three.row(0)
    assert three.verdicts()["WRONG_COOKIE"] == 1


# One process, since its mount namespace takes the pins with it whatever happens.
STORY = """
import json, os, signal, sys, threading
from pyroute2 import IPRoute
from tailbound import cli
from tailbound.errors import AttachError
from tailbound.kernel import net, pin
from tailbound_lab.lab.passthrough import load
from tailbound.kernel.attach import attach
from tailbound.switch import pinned

first, second = "data0", "data1"
told = {}
rank = ["--rank", "198.18.0.1,02:7b:00:00:00:00,data0", "--rank", "198.18.0.2,02:7b:00:00:00:01,data1"]
up = ["switch", "up", first, second, "--address", "198.18.252.1", "--slots", "64"]
told["status_before"] = cli.main(["switch", "status"])
told["up"] = cli.main(up)
told["up_again"] = cli.main(up)
try:
    attach(load(), first)
except AttachError as error:
    print(error, file=sys.stderr)
told["job"] = cli.main(["switch", "job", "add", *rank, "--rows", "32", "--cookie", "0x4d"])
told["job_overlap"] = cli.main(["switch", "job", "add", *rank, "--rows", "64", "--cookie", "0x4e"])
told["job_nowhere"] = cli.main(["switch", "job", "add", "--rank", "198.18.0.1,02:7b:00:00:00:00,lo", "--rows", "32"])
told["status"] = cli.main(["switch", "status", "--json"])
one = ["switch", "job", "add", *rank, "--rows", "16", "--cookie", "0x50"]
adding = threading.Thread(target=lambda: told.update(job_meanwhile=cli.main(one)), daemon=True)
with pin.alone(folder=True):  # another command is at it
    adding.start()
    adding.join(0.3)
    told["waits"] = adding.is_alive()
adding.join()
told["swept"] = pin.sweep()
told["job_gone"] = cli.main(["switch", "job", "remove", "0x4d"])
told["down"] = cli.main(["switch", "down"])
told["free"] = [net.xdp_on(name) is None for name in (first, second)]
told["down_again"] = cli.main(["switch", "down"])

pid = os.fork()  # up, and killed before it is through
if pid == 0:
    pinned.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    cli.main(up)
os.waitpid(pid, 0)
told["left"] = [net.xdp_on(name) is not None for name in (first, second)]
told["up_after_crash"] = cli.main(up)
told["down_after_crash"] = cli.main(["switch", "down"])

program = load()
link = attach(program, second)
there = net.xdp_on(second)
told["foreign"] = cli.main(up)
told["kept"] = net.xdp_on(second) == there and net.xdp_on(first) is None
os.close(link)
told["end"] = [net.xdp_on(name) is None for name in (first, second)]
told["folder"] = pinned._folder().exists()
with IPRoute() as route:
    route.link("add", ifname="port0", kind="veth", peer={"ifname": "port1"})
    (index,) = route.link_lookup(ifname="port0")
    route.link("set", index=index, state="up")
    told["up_alone"] = cli.main(["switch", "up", "port0", "--address", "198.18.252.1", "--slots", "64"])
    folder = pinned._folder().name
    route.link("del", index=index)  # as with its namespace
told["swept_without_ports"] = pin.sweep() == [folder] and not pinned._folder().exists() and not pinned._file().exists()
print(json.dumps(told))
"""


def test_up_down_status(tailbound_lab: Callable[..., Cluster]) -> None:
    """The verbs on a box with two ports, here the switch's own namespace of a lab."""
    lab = tailbound_lab(workers=2)

    def inside() -> subprocess.CompletedProcess[str]:
        # a thread's own mount namespace gives the child a /run of its own too
        return subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, timeout=100, check=False)

    done = namespaces.call(lab.topology.switch, inside, sysfs=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    told = json.loads(lines[-1])
    assert told == {
        "status_before": 1,
        "up": 0,
        "up_again": 1,
        "job": 0,
        "job_overlap": 2,
        "job_nowhere": 2,
        "status": 0,
        "waits": True,
        "job_meanwhile": 0,
        "swept": [],
        "job_gone": 0,
        "down": 0,
        "free": [True, True],
        "down_again": 0,
        "left": [True, True],
        "up_after_crash": 0,
        "down_after_crash": 0,
        "foreign": 1,
        "kept": True,
        "end": [True, True],
        "folder": False,
        "up_alone": 0,
        "swept_without_ports": True,
    }
    assert "export TAILBOUND_COOKIE=0x0000004d" in lines
    status = json.loads(next(line for line in lines if line.startswith('{"address"')))
    assert [port["attached"] for port in status["ports"]] == [True, True]
    assert (status["jobs"][0]["base"], status["jobs"][0]["rows"]) == (0, 32)
    errors = done.stderr
    for words in (
        "a switch is up already at 198.18.252.1 on data0, data1",
        "data0 already carries Tailbound's tb_switch",
        "no 64 free slots",
        "which is no port of this switch",
        "which Tailbound never replaces",
    ):
        assert words in errors, errors
