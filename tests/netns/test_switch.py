"""The switch on real ports: copies reach every worker with addresses of its own, and trouble stays bounded."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pyroute2 import IPRoute

from support import PATIENCE
from switch_cases import Job, contribution, result
from tailbound.errors import ConfigError
from tailbound.switch.job import JobSpec, RankSpec
from tailbound.wire import packets
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

    def row(self, seq: int, ranks: Sequence[int] | None = None) -> None:
        """A row that all contribute to and ``ranks`` are to receive."""
        sent = [self.packet(rank, seq) for rank in range(self.job.ranks)]
        for rank, packet in zip(self.ranks, sent, strict=True):
            rank.send(packet)
        for rank in range(self.job.ranks) if ranks is None else ranks:
            assert self[rank].take() == result(sent[-1], sent, "mean", self.job), (seq, rank)

    def verdicts(self) -> dict[str, int]:
        return dict(self.lab.switch.status()["jobs"][0]["verdicts"])


@pytest.fixture
def team(tailbound_lab: Callable[..., Cluster], datagram_socket: Sockets) -> Callable[..., Team]:
    return lambda workers=3, **spec: Team(tailbound_lab(workers=workers, switch=True, **spec), datagram_socket)


def _set_link(name: str, state: str) -> None:
    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname=name)[0], state=state)


def _delete(name: str) -> None:
    with IPRoute() as ip:
        ip.link("del", index=ip.link_lookup(ifname=name)[0])


@pytest.mark.parametrize("spec", [{}, {"rate": 10**9}, {"cables": True}], ids=["veths", "shaped", "cables"])
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


def test_troubled_cables(team: Callable[..., Team]) -> None:
    """Loss, doubles, disorder and flipped bits both ways: retries alone bring every rank the one right answer."""
    three = team(loss=0.2, duplicate=0.1, corrupt=0.1, reorder=0.1, seed=3)
    rows = range(40)
    sent = {(rank, seq): three.packet(rank, seq) for rank in range(3) for seq in rows}
    got: list[dict[int, bytes]] = [{}, {}, {}]
    for each in three.ranks:
        each.socket.settimeout(0.05)
    end = time.monotonic() + PATIENCE
    while any(len(answers) < len(rows) for answers in got):
        assert time.monotonic() < end, f"of {len(rows)} rows these are answered: {[sorted(answers) for answers in got]}"
        for rank, answers in enumerate(got):
            three[rank].send(*(sent[rank, seq] for seq in rows if seq not in answers))
        for rank, answers in enumerate(got):
            with contextlib.suppress(TimeoutError):
                while True:
                    data = three[rank].take()
                    parsed = packets.parse(data)
                    if parsed is not None:
                        answers.setdefault(int(parsed[0]["seq"][0]), data)
                        assert answers[int(parsed[0]["seq"][0])] == data
    for seq in rows:
        packed = [sent[rank, seq] for rank in range(3)]
        assert {answers[seq] for answers in got} == {result(packed[0], packed, "mean", three.job)}, seq
    counts, verdicts = three.lab.fault_counts(), three.verdicts()
    assert min(counts.lost, counts.corrupted, counts.duplicated) > 0
    assert (verdicts["STORED"], verdicts["ADDED"]) == (len(rows), 2 * len(rows))
    assert verdicts["CORRUPT"] > 0
    assert verdicts["ANSWERED"] > 0


def test_restart(team: Callable[..., Team]) -> None:
    """Half-summed rows are forgotten, not mixed: what is sent again makes whole rows."""
    three = team()
    three.row(0)
    three[0].send(three.packet(0, 1))
    three[1].send(three.packet(1, 1))
    three.lab.switch.restart()
    three.row(1)
    three[0].send(three.packet(0, 0, flags=Flag.REPEAT))  # final before, unknown now: a flush releases it
    flush = three.packet(0, 0, flags=Flag.FLUSH | Flag.REPEAT)
    three[0].send(flush)
    for rank in range(3):
        assert three[rank].take() == result(flush, [three.packet(0, 0)], "mean", three.job)


def test_port_down(team: Callable[..., Team]) -> None:
    """The others get their copies; the one behind the port is answered when it asks again."""
    three = team()
    three.row(0)
    sent = [three.packet(rank, 1) for rank in range(3)]
    for rank in (2, 1):
        three[rank].send(sent[rank])
    namespaces.call(three.lab.topology.switch, _set_link, "data2", "down")
    three[0].send(sent[0])
    for rank in (0, 1):
        assert three[rank].take() == result(sent[0], sent, "mean", three.job)
    namespaces.call(three.lab.topology.switch, _set_link, "data2", "up")
    again = three.packet(2, 1, flags=Flag.REPEAT)
    end = time.monotonic() + PATIENCE
    while True:  # the port's carrier comes back in its own time
        assert time.monotonic() < end, "the port is up, and who is behind it is not answered"
        three[2].send(again)
        three[2].socket.settimeout(0.2)
        try:
            assert three[2].take() == result(again, sent, "mean", three.job)
            break
        except TimeoutError:
            continue


def test_worker_disappears(team: Callable[..., Team]) -> None:
    """A flush first; then the others say for how many they wait, and rows complete without it."""
    three = team()
    three.row(0)
    namespaces.call(three.lab.topology.switch, _delete, "data2")
    sent = [three.packet(rank, 1) for rank in range(2)]
    for rank in range(2):
        three[rank].send(sent[rank])
    flush = three.packet(1, 1, flags=Flag.FLUSH | Flag.REPEAT)
    three[1].send(flush)
    for rank in range(2):
        assert three[rank].take() == result(flush, sent, "mean", three.job)
    sent = [three.packet(rank, 2, count=2) for rank in range(2)]
    for rank in range(2):
        three[rank].send(sent[rank])
    for rank in range(2):
        assert three[rank].take() == result(sent[1], sent, "mean", three.job)
    assert three.verdicts() == {"STORED": 3, "ADDED": 4, "FLUSHED": 1}


def test_a_job_that_never_finishes(team: Callable[..., Team]) -> None:
    """One rank runs round its ring alone: its rows are abandoned and counted, the other job's are none the worse."""
    three = team(switch_rows=16)
    ranks = [RankSpec(w.address, w.mac, f"data{w.rank}") for w in three.lab.workers]
    entry = three.lab.switch.add(JobSpec(tuple(ranks), 77, three.job.port, 16))
    other = Job(77, 3, entry.base, 16, entry.headroom, three.job.port, ADDRESS)
    sent = [contribution(rank, job=other, seq=5) for rank in range(3)]
    three[0].send(sent[0])
    three[0].send(*(three.packet(0, seq) for seq in range(48)))
    for rank in (1, 2):
        three[rank].send(sent[rank])
    for rank in range(3):
        assert three[rank].take() == result(sent[2], sent, "mean", other)
    status = three.lab.switch.status()["jobs"]
    assert [job["slots"] for job in status] == [
        {"final": 0, "open": 16, "abandoned": 32},
        {"final": 1, "open": 0, "abandoned": 0},
    ]


def test_two_jobs_with_the_same_slots(team: Callable[..., Team]) -> None:
    three = team(switch_rows=16)
    ranks = tuple(RankSpec(w.address, w.mac, f"data{w.rank}") for w in three.lab.workers)
    first = three.job.cookie
    with pytest.raises(ConfigError, match=rf"slots 8..15 of job 0x0000004d overlap 0..15.*{first:#010x}"):
        three.lab.switch.add(JobSpec(ranks, 77, rows=8, base=8))
    with pytest.raises(ConfigError, match=rf"job {first:#010x} is in the switch already"):
        three.lab.switch.add(JobSpec(ranks, first, rows=8))
    with pytest.raises(ConfigError, match="no 32 free slots"):
        three.lab.switch.add(JobSpec(ranks, 77, rows=32))
    assert three.lab.switch.add(JobSpec(ranks, 77, rows=8)).base == 16
    three.row(0)


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
