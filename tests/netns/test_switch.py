"""The verbs of the switch on a box with two ports; what it does to packets is in ``kernel/test_switch``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

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
    assert any(line.startswith("export TAILBOUND_SWITCH=198.18.252.1,") and "cookie=77" in line for line in lines)
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
