"""What a new user types: `tailbound attach` on every host, then trainers that name no interface.

Attaching and training share a process tree here, since its mount namespace takes the pins with it whatever happens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab_team import all_said, served_store
from tailbound_lab.lab.cluster import Cluster

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers"), pytest.mark.usefixtures("warm_start")]

#: As the README says, but for the folder: attach as root, then train without any capability.
HOST = """
import os, subprocess, sys
from pyroute2 import IPRoute
from tailbound import cli

with IPRoute() as route:
    (index,) = route.link_lookup(ifname="data0")
    (was,) = route.get_addr(index=index, family=2)
    for what in ("del", "add"):
        if what == "add":
            route.addr("add", index=index, address=os.environ["FIRST_ADDRESS"], prefixlen=32)
        route.addr(what, index=index, address=was.get_attr("IFA_LOCAL"), prefixlen=was["prefixlen"])
assert cli.main(["attach", "data0", "--ring", "8", "--group", "root"]) == 0
bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
for name in ("TAILBOUND_INTERFACE", "TAILBOUND_PORT"):
    del os.environ[name]
try:
    sys.exit(subprocess.run([*bare, sys.executable, *sys.argv[1:]]).returncode)
finally:
    cli.main(["detach", "data0"])
"""

TRAINER = """
import os, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from lab_team import connect
from tailbound.collective.communicator import Communicator
from tailbound.kernel import syscalls
from tailbound.transport.config import Config

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = Config(rank=rank, ranks=ranks, ring_mib=8.0, deadline_1=10**9, deadline_2=10**9)
with Communicator(connect(sys.argv[2]), config) as job:
    assert job.datapath == "xdp", job.datapath
    assert job.job.datapath.endpoint[0] == os.environ["ADDRESS"]
    for op in range(3):
        data = np.full(100_000, 1.0 + rank, np.float32)
        outcome = job.allreduce(data).result(60)
        assert outcome.delivered == outcome.expected > 0
        assert abs(data.mean() - (1 + ranks) / 2) < 0.05
    job.meet("over")
"""


@pytest.mark.timeout(150)
def test_trainers_that_name_no_interface_use_the_program_on_the_way_to_their_peers(
    tailbound_lab: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Another address stands first on their interfaces, which is not the way."""
    lab = tailbound_lab(workers=2)
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)
    way = {"MASTER_ADDR": lab.workers[0].address}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    tests = str(Path(__file__).parents[1] / "worlds")
    with served_store(tmp_path / "store.sock") as store:
        argv = [sys.executable, "-c", HOST, str(trainer), tests, store]
        ways = [
            way | {"FIRST_ADDRESS": f"192.0.2.{rank + 1}", "ADDRESS": lab.workers[rank].address} for rank in range(2)
        ]
        all_said([lab.popen(rank, argv, env=ways[rank], **pipes) for rank in range(2)], 120)


REFUSED = """
import grp, json, os, sys
from tailbound import cli
from tailbound.datapath.select import open_datapath
from tailbound.errors import TailboundError
from tailbound.transport.config import Config

towards = sys.argv[1]
told = {}

def attempt(name, user=0, datapath="auto", **settings):
    # as that user, in a process of its own; what it says comes back by a pipe
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if user:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            try:
                config = Config(rank=0, ranks=2, ring_mib=1.0, **settings)
                path = open_datapath(datapath, None, config, towards)
                said = [path.name, *path.endpoint]
                path.close()
            except TailboundError as error:
                said = [type(error).__name__, str(error)]
            os.write(theirs, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    told[name] = json.loads(os.read(ours, 1 << 16))
    os.waitpid(pid, 0)

attempt("nothing attached")
assert cli.main(["attach", "data0", "--ring", "1"]) == 0
attempt("attached for root", user=65534)
attempt("usable")
path = open_datapath("auto", None, Config(rank=0, ranks=2), towards)
attempt("another job")
path.close()
attempt("udp beside it", datapath="udp", port=path.endpoint[1])
assert cli.main(["detach", "data0"]) == 0
assert cli.main(["attach", "data0", "--ring", "1", "--group", grp.getgrgid(1).gr_name]) == 0
attempt("attached for others", user=65534)
assert cli.main(["detach", "data0"]) == 0
print(json.dumps(told))
"""


def test_an_attached_program_that_may_not_be_used_is_an_error_with_what_to_type(
    tailbound_lab: Callable[..., Cluster],
) -> None:
    lab = tailbound_lab(workers=2)
    argv = [sys.executable, "-c", REFUSED, lab.workers[1].address]
    process = lab.popen(0, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    told: dict[str, list[Any]] = json.loads(out.splitlines()[-1])
    own = lab.workers[0].address
    assert told["nothing attached"][:2] == ["udp", own]
    assert told["usable"] == ["xdp", own, 5515]
    kind, why = told["attached for root"]
    assert kind == "CapabilityError"
    assert "attached for root alone" in why
    assert "attach data0 --group nogroup" in why
    kind, why = told["another job"]
    assert kind == "ConfigError"
    assert "one rank and one job an interface" in why
    assert told["udp beside it"] == ["udp", own, 5516]
    kind, why = told["attached for others"]
    assert kind == "CapabilityError"
    assert "usermod -aG daemon $USER" in why
    assert why.endswith("TAILBOUND_DATAPATH=udp")
