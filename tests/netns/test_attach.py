"""Programs that are attached ahead: what is refused, who may use them, and what outlives a trainer that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab_team import said_by, told_by
from left_behind import nothing_more
from tailbound.datapath.xdp import XdpDatapath
from tailbound.kernel import net
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers"), pytest.mark.usefixtures("warm_start")]

#: A fresh interpreter, which finds what tests share.
OURS = ["env", "PYTHONPATH=" + ":".join(filter(None, sys.path)), sys.executable]

# -- ``tailbound attach`` ----------------------------------------------------------------------------------------------


REFUSED = """
import json, sys
from tailbound import cli
from tailbound.kernel import net

name = sys.argv[1]
options = (["--mtu", "9000"], ["--mtu", "100"], ["--ring", "0"], ["--group", "nosuch"])
print(json.dumps([cli.main(["attach", *case]) for case in (["nowhere0"], *([name, *o] for o in options))]))
assert net.xdp_on(name) is None
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with nothing_more(), Cluster(LabSpec(workers=2)) as made:
        yield made


def test_what_cannot_be_attached_is_said_in_one_line(lab: Cluster) -> None:
    statuses, _, errors = told_by(lab, REFUSED, lab.workers[0].interface)
    assert statuses == [2] * 5
    lines = errors.splitlines()
    assert len(lines) == 5
    for line, words in zip(lines, ("nowhere0", "MTU 9000", "MTU 100", "ring of 0.0 MiB", "nosuch"), strict=True):
        assert line.startswith("error: ")
        assert words in line


# -- ranks without privileges that name no interface, in a job with a key, over maps that root has pinned --------------


Make = Callable[..., Cluster]
#: An unprivileged user, with a group of the same number.
USER = 12345


@pytest.fixture
def key_file() -> Iterator[Path]:
    """Where other users can go, which pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="tailbound-test-") as folder:
        path = Path(folder, "key")
        path.touch(0o600)
        path.write_bytes(bytes(range(32)))
        Path(folder).chmod(0o755)
        yield path


# Root attaches, as the README says; the rank itself has the pins' group, the key file and the store, and names no
# interface: the program on the way to its peers is the one to use, whose interface has another address before its own.
UNPRIVILEGED = """
import os, sys
from datetime import timedelta

import numpy as np
from pyroute2 import IPRoute
from torch._C._distributed_c10d import TCPStore

from tailbound import cli
from support import PATIENCE, exact_mean, gradients, nmse, patient
from tailbound.collective.communicator import Communicator
from tailbound.transport.config import Config

RANKS, OPS, NUMEL = 2, 4, 64 * 64 * 8
name, rank, key_file, user = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with IPRoute() as route:
    (index,) = route.link_lookup(ifname=name)
    (was,) = route.get_addr(index=index, family=2)
    own = was.get_attr("IFA_LOCAL")
    route.addr("del", index=index, address=own, prefixlen=was["prefixlen"])
    for address, length in ((f"192.0.2.{rank + 1}", 32), (own, was["prefixlen"])):
        route.addr("add", index=index, address=address, prefixlen=length)
assert cli.main(["attach", name, "--ring", "1", "--group", str(user)]) == 0
for variable in ("TAILBOUND_INTERFACE", "TAILBOUND_PORT"):
    del os.environ[variable]


def train():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    status = open("/proc/self/status").read().split("\\n")
    assert {line.split()[1] for line in status if line.startswith(("CapEff", "CapPrm", "CapInh"))} == {"0" * 16}
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), RANKS, rank == 0,
                     timedelta(seconds=PATIENCE), wait_for_workers=False)
    net = Communicator(store, Config(rank, RANKS, **patient(width=0, key_file=key_file)), timeout=PATIENCE)
    assert net.job.datapath.endpoint[0] == own
    for op in range(OPS):
        inputs = gradients("U", RANKS, NUMEL, seed=op)
        out = inputs[rank].copy()
        done = net.allreduce(out).result(PATIENCE)
        assert done.error is None and done.delivered == done.expected and not done.missing, (op, done)
        assert nmse(out, exact_mean(inputs)) < 0.01
    stats = net.stats()
    tagged = int(net.job.store.control["tagged"][0])
    print("trained", os.geteuid(), net.datapath, stats["authenticated"], tagged, stats["rows_summed"], flush=True)
    assert not {"FORGED", "CORRUPT"} & set(stats["drops"]), stats["drops"]
    net.meet("trained")
    net.close()


if (pid := os.fork()) == 0:
    status = 1
    try:
        train()
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(status)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert cli.main(["detach", name]) == 0
sys.exit(code)
"""


@pytest.mark.needs("torch")
def test_ranks_without_privileges_average_over_pins_with_a_key(tailbound_lab: Make, key_file: Path) -> None:
    """Rules: auth-1, auth-2."""
    lab = tailbound_lab(workers=2)
    os.chown(key_file, USER, USER)
    script = ["env", "TAILBOUND_STATUS=off", *OURS, "-c", UNPRIVILEGED, lab.workers[0].interface]
    commands = [[*script, str(rank), str(key_file), str(USER)] for rank in range(2)]
    for text in said_by(lab, commands, 120.0, MASTER_ADDR=lab.workers[0].address):
        found = re.search(r"trained (\d+) (\w+) (\w+) (\d+) (\d+)", text)
        assert found, text
        assert found.groups()[:4] == (str(USER), "xdp", "on", "1")
        assert int(found[5]) > 0


# -- a restart while a forked child of the killed trainer lives on -----------------------------------------------------


PATIENCE = 60.0


TRAINER = """
import os, sys, time
from tailbound.datapath.xdp import XdpDatapath

path = XdpDatapath.attach("data0", 5515, 256, 64, 64)
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print("child", child, flush=True)
time.sleep(600)
"""


def test_a_killed_trainer_leaves_neither_program_nor_port_to_its_children(
    tailbound_lab: Callable[..., Cluster],
) -> None:
    """Rule: kernel-25."""
    lab = tailbound_lab(workers=1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    trainer = lab.popen(0, [sys.executable, "-c", TRAINER], **pipes)
    try:
        child = int(trainer.stdout.readline().split()[1])
        assert lab.run(0, net.xdp_on, "data0") is not None
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait(PATIENCE)
        os.kill(child, 0)  # it is there
        until = time.monotonic() + PATIENCE
        while lab.run(0, net.xdp_on, "data0") is not None:  # the kernel frees a link in its own time
            assert time.monotonic() < until
        lab.run(0, XdpDatapath.attach, "data0", 5515, 256, 64, 64, sysfs=True).close()
    finally:
        trainer.kill()
        trainer.stdin.close()
        trainer.stdout.close()
