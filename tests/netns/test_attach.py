"""Programs that are attached ahead, and the way to the peers: what is refused, and who may use them until when."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab_team import said_by, told_by
from support import await_that
from tailbound.datapath.xdp import XdpDatapath
from tailbound.kernel import net
from tailbound.kernel.pin import Receiver
from tailbound_lab.lab.cluster import Cluster

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers"), pytest.mark.usefixtures("warm_start")]

Make = Callable[..., Cluster]

# -- stories of one process, since its mount namespace takes the pins with it whatever happens -------------------------

PRELUDE = """
import grp, json, os, sys
from pyroute2 import IPRoute
from tailbound import cli
from tailbound.datapath.select import open_datapath
from tailbound.doctor.interfaces import leads_to_peers
from tailbound.errors import TailboundError
from tailbound.kernel import net
from tailbound.transport.config import Config
from tailbound.transport.config import Switch

there, told = sys.argv[1], {}
for name in ("TAILBOUND_INTERFACE", "TAILBOUND_PORT"):
    os.environ.pop(name, None)

def command(*words):
    assert cli.main([*words]) == 0

def opened(datapath="auto", towards=there, interface=None, user=0, **settings):
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
                path = open_datapath(datapath, interface, config, towards)
                said = [path.name, *path.endpoint, path.store.width]
                path.close()
            except TailboundError as error:
                said = [type(error).__name__, str(error)]
            os.write(theirs, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    said = json.loads(os.read(ours, 1 << 16))
    os.waitpid(pid, 0)
    return said
"""


def story(lab: Cluster, text: str) -> tuple[Any, str, str]:
    """As ``told_by``, of a script that tells what is in ``told``."""
    return told_by(lab, f"{PRELUDE}\n{text}\nprint(json.dumps(told))", lab.workers[1].address)


REFUSED = """
cases = ["nowhere0"], *(["data0", *each] for each in (
    ["--mtu", "9000"], ["--mtu", "100"], ["--ring", "0"], ["--group", "nosuch"]))
told["refused"] = [cli.main(["attach", *case]) for case in cases]
assert net.xdp_on("data0") is None
told["nothing attached"] = opened()
command("attach", "data0", "--ring", "1")
told["attached for root"] = opened(user=65534)
told["usable"] = opened()
path = open_datapath("auto", None, Config(rank=0, ranks=2), there)
told["another job"] = opened()
path.close()
told["udp beside it"] = opened("udp", port=path.endpoint[1])
command("detach", "data0")
command("attach", "data0", "--ring", "1", "--group", grp.getgrgid(1).gr_name)
told["attached for others"] = opened(user=65534)
command("detach", "data0")
"""


def test_an_attached_program_is_used_or_an_error_says_what_to_type(tailbound_lab: Make) -> None:
    """On the way to the peers, for a rank that names no interface; and what cannot be attached is said in one line."""
    lab = tailbound_lab(workers=2)
    told, _, errors = story(lab, REFUSED)
    own = lab.workers[0].address
    assert told["refused"] == [2] * 5
    for line, words in zip(
        errors.splitlines(), ("nowhere0", "MTU 9000", "MTU 100", "ring of 0.0 MiB", "nosuch"), strict=True
    ):
        assert line.startswith("error: ")
        assert words in line
    assert told["nothing attached"][:2] == ["udp", own]
    assert told["usable"][:3] == ["xdp", own, 5515]
    assert told["udp beside it"][:3] == ["udp", own, 5516]
    for name, kind, words in (
        ("attached for root", "CapabilityError", ("for root alone", "attach data0 --replace --group nogroup")),
        ("another job", "ConfigError", ("one rank and one job an interface",)),
        ("attached for others", "CapabilityError", ("usermod -aG daemon $USER", "TAILBOUND_DATAPATH=udp")),
    ):
        assert told[name][0] == kind
        assert all(part in told[name][1] for part in words), told[name]


FAMILIES = """
both = there, "198.18.0.2"
os.environ["MASTER_ADDR"] = there
told["doctor"] = leads_to_peers()
told["udp"] = opened()
told["named"] = opened("udp", interface="data0", mtu=1300)
told["switch"] = opened("udp", switch=Switch("198.18.252.1"))
with IPRoute() as route:
    route.addr("add", index=route.link_lookup(ifname="data0")[0], address="198.18.0.1", prefixlen=16)
told["towards both"] = [opened("udp", towards)[1] for towards in both]
told["by name"] = [opened("udp", towards, interface="data0")[1] for towards in (*both, "")]
del os.environ["MASTER_ADDR"]
attach = ["attach", "data0", "--ring", "1", "--ipv6", "--loader", "clang"]
command(*attach)
command(*attach, "--replace")
told["xdp"] = [opened(towards=towards) for towards in both]
command("detach", "data0")
"""


@pytest.mark.needs("clang", "libbpf")
def test_the_family_is_that_of_the_way_to_the_peers(tailbound_lab: Make) -> None:
    told, out, _ = story(tailbound_lab(workers=2, ipv6=True), FAMILIES)
    assert "UDP port 5515 of IPv6: rows of 1344 codes" in out
    assert "attached already as asked" in out
    assert told["doctor"] == ["data0", "it is the way to MASTER_ADDR=fd7b::2"]
    for name, width in (("udp", 1344), ("named", 1152)):  # 1300 bytes hold 1188 codes
        assert (*told[name][:2], told[name][3]) == ("udp", "fd7b::1", width)
    assert told["switch"][0] == "ConfigError"
    assert "sums packets of IPv4, and this rank talks over IPv6" in told["switch"][1]
    assert told["towards both"] == ["fd7b::1", "198.18.0.1"]
    assert told["by name"] == ["fd7b::1", "198.18.0.1", "fd7b::1"]
    assert told["xdp"] == [["xdp", "fd7b::1", 5515, 1344]] * 2  # as it was attached


# -- ranks without privileges that name no interface, in a job with a key, over maps that root has pinned --------------

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


# Root attaches, as the README says; the rank itself has the pins' group, the key file and the store. The program on the
# way to its peers is the one to use, whose interface has another address before its own.
UNPRIVILEGED = """
import os, sys
from datetime import timedelta

from pyroute2 import IPRoute
from torch._C._distributed_c10d import TCPStore

from tailbound import cli
from support import PATIENCE, exact_mean, gradients, nmse, patient
from tailbound.collective.communicator import Communicator
from tailbound.transport.config import Config

rank, key_file, user = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with IPRoute() as route:
    (index,) = route.link_lookup(ifname="data0")
    (was,) = route.get_addr(index=index, family=2)
    own = was.get_attr("IFA_LOCAL")
    route.addr("del", index=index, address=own, prefixlen=was["prefixlen"])
    for address, length in ((f"192.0.2.{rank + 1}", 32), (own, was["prefixlen"])):
        route.addr("add", index=index, address=address, prefixlen=length)
assert cli.main(["attach", "data0", "--ring", "1", "--group", str(user)]) == 0
for variable in ("TAILBOUND_INTERFACE", "TAILBOUND_PORT"):
    del os.environ[variable]

def train():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    status = open("/proc/self/status").read().split("\\n")
    assert {line.split()[1] for line in status if line.startswith(("CapEff", "CapPrm", "CapInh"))} == {"0" * 16}
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0,
                     timedelta(seconds=PATIENCE), wait_for_workers=False)
    net = Communicator(store, Config(rank, 2, **patient(width=0, key_file=key_file)), timeout=PATIENCE)
    assert net.job.datapath.endpoint[0] == own
    for op in range(4):
        inputs = gradients("U", 2, 64 * 64 * 8, seed=op)
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
assert cli.main(["detach", "data0"]) == 0
sys.exit(code)
"""


@pytest.mark.needs("torch")
def test_ranks_without_privileges_average_over_pins_with_a_key(tailbound_lab: Make, key_file: Path) -> None:
    """Rules: auth-1, auth-2."""
    lab = tailbound_lab(workers=2)
    os.chown(key_file, USER, USER)
    commands = [[sys.executable, "-c", UNPRIVILEGED, str(rank), str(key_file), str(USER)] for rank in range(2)]
    for text in said_by(lab, commands, 100.0, MASTER_ADDR=lab.workers[0].address, TAILBOUND_STATUS="off"):
        found = re.search(rf"trained {USER} xdp on 1 (\d+)", text)
        assert found, text
        assert int(found[1]) > 0


# -- a restart while a forked child of the killed trainer lives on -----------------------------------------------------

TRAINER = """
import os, sys, time
from tailbound.datapath.xdp import XdpDatapath
from tailbound.kernel.pin import Receiver

path = XdpDatapath.attach(Receiver("data0", 5515, 256, 64, 64))
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print("child", child, flush=True)
time.sleep(600)
"""


def test_a_killed_trainer_leaves_neither_program_nor_port_to_its_children(tailbound_lab: Make) -> None:
    """Rule: kernel-25."""
    lab = tailbound_lab(workers=1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with lab.popen(0, [sys.executable, "-c", TRAINER], **pipes) as trainer:
        try:
            child = int(trainer.stdout.readline().split()[1])
            assert lab.run(0, net.xdp_on, "data0") is not None
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.wait()
            os.kill(child, 0)  # it is there
            # the kernel frees a link in its own time
            await_that(lambda: lab.run(0, net.xdp_on, "data0") is None, "no program is left")
            lab.run(0, XdpDatapath.attach, Receiver("data0", 5515, 256, 64, 64), sysfs=True).close()
        finally:
            trainer.kill()
