"""The lab of who is not root: in a user namespace, with rates and losses but without XDP, and gone when it ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailbound_lab.lab import user_namespace

pytestmark = pytest.mark.needs("root", "netns", "user namespaces")

_PATIENCE = 60.0
#: Root in a user namespace, who may do there what any user may, and whose machine code is in the cache already.
_RESTARTED = [sys.executable, "-I", "-S", user_namespace.__file__, sys.executable]

#: Rank 0 sends 4000 datagrams to rank 1 in super-frames, and both say what they see.
TALK = """
import os, socket, sys, time
rank = int(os.environ["RANK"])
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((f"198.18.0.{rank + 1}", 7000))
sock.setsockopt(17, 103, 1000)
if rank == 0:
    for _ in range(100):
        sock.sendto(bytes(40_000), ("198.18.0.2", 9))
    frames, end = 0, time.monotonic() + 30
    while frames < 4000 and time.monotonic() < end:  # what its link has not taken yet waits on its own interface
        frames = int(next(line.split() for line in open("/proc/net/dev") if line.strip().startswith("data0:"))[10])
    print("sent", frames, os.environ["TAILBOUND_DATAPATH"], *sorted(os.listdir("/sys/class/net")))
"""
#: Says the ids of the two ranks, and stays.
STAY = "import os, sys, time; print('pid', os.getpid(), flush=True); time.sleep(1000)"


def start(*words: str) -> subprocess.Popen[str]:
    """``tailbound WORDS`` as a user without any privilege."""
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from tailbound.cli import main; sys.exit(main())", *words],
        user=65534, group=65534, extra_groups=[], cwd="/", env={**os.environ, "HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def staying() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A lab of two ranks that stay, and file descriptors that show their end."""
    process = start("lab", "run", "--workers", "2", "--rate", "1gbit", "--", sys.executable, "-c", STAY)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    watches = [os.pidfd_open(pid) for pid in pids]
    yield process, watches
    for watch in watches:
        os.close(watch)
    process.kill()
    process.communicate()


def test_a_lab_with_rate_and_losses_is_there_for_everybody() -> None:
    words = ("lab", "run", "--workers", "2", "--rate", "1gbit", "--loss", "0.05", "--")
    out, err = start(*words, sys.executable, "-c", TALK).communicate(timeout=_PATIENCE)
    found = re.search(r"sent (\d+) (.*)", out)
    assert found is not None, out + err
    assert int(found[1]) == 4000  # of wire size
    assert found[2] == "udp data0 lo plain0"
    lost = re.search(r"packets (\d+) lost", " ".join(err.split()))
    assert lost is not None, err
    assert 115 < int(lost[1]) < 285  # 200, and six times the standard deviation


def test_what_needs_xdp_is_refused_by_name() -> None:
    faults = [word for name in ("burst-loss", "duplicate", "corrupt", "reorder") for word in (f"--{name}", "0.01")]
    more = ["--switch", "--rate", "1gbit", "--queue", "64KiB"]
    process = start("lab", "run", "--workers", "2", *faults, *more, "--", "true")
    said = " ".join(process.communicate(timeout=_PATIENCE)[1].split())
    assert process.returncode != 0
    names = "bursts, duplicates, corruption, reordering, a switch that sums, finite queues"
    assert f"{names}: done by XDP programs, which need root" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(staying: tuple[subprocess.Popen[str], list[int]], number: signal.Signals) -> None:
    process, watches = staying
    process.send_signal(number)
    for watch in watches:
        assert select.select([watch], [], [], _PATIENCE)[0], "a rank still runs"
    process.communicate(timeout=_PATIENCE)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number


#: Builds a lab whose losses change while it runs, and counts them.
CHANGE = """
import json, socket, sys
from tailbound.errors import CapabilityError
from tailbound_lab.lab import LabSpec, Link
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault
from tailbound_lab.lab.spec import Burst
from tailbound.wire.address import family_of

ALL = Fault(loss=1 - 1e-12)

def open_socket(address):
    made = socket.socket(family_of(address), socket.SOCK_DGRAM)
    made.bind((address, 9))
    return made

with Cluster(LabSpec(2, cables=True, ipv6="ipv6" in sys.argv)) as lab:
    assert not lab.xdp
    there = lab.workers[1].address
    sock, ear = (lab.run(rank, open_socket, lab.workers[rank].address) for rank in (0, 1))
    def send(count, to):
        for _ in range(count):
            sock.sendto(b"x" * 1000, (to, 9))
    out = []
    for rank in (0, 1, None):
        lab.set_faults(Fault())
        lab.set_faults(Fault() if rank is None else ALL, rank)
        before = lab.fault_counts(link=Link.DATA)
        send(100, there)
        after = lab.fault_counts(link=Link.DATA)
        out.append((after.seen - before.seen, after.lost - before.lost, after.lost_other - before.lost_other))
    try:
        lab.set_faults(Fault(burst=Burst(0.01)))
    except CapabilityError as error:
        refused = str(error)
    print(json.dumps([out, refused, lab.lost_frames(), lab.fault_counts(link=Link.PLAIN).seen]))
"""


@pytest.mark.parametrize("family", ["ipv4", pytest.param("ipv6", marks=pytest.mark.thorough)])
def test_losses_change_by_worker_and_are_counted(family: str) -> None:
    done = subprocess.run([*_RESTARTED, "-c", CHANGE, family], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changes, refused, lost_frames, plain = json.loads(done.stdout)
    assert [[lost, other] for _, lost, other in changes] == [[100, 0], [100, 0], [0, 0]]
    # a packet that is let through is seen at both cables, at each where it enters; so are IPv6's words about groups
    more = [seen - want for (seen, _, _), want in zip(changes, (100, 200, 200), strict=True)]
    assert min(more) >= 0
    assert family == "ipv6" or not any([*more, lost_frames])
    assert plain == 0
    assert "bursts need XDP programs" in refused


@pytest.mark.thorough
@pytest.mark.timeout(400)  # processes import torch, on two cores that others may use too
@pytest.mark.needs("sklearn", "matplotlib", "torch")
def test_the_demo_has_its_network_without_root_and_accounts_for_every_packet(tmp_path: Path) -> None:
    command = [*_RESTARTED, "-m", "tailbound", "demo", "--quick", "--workers", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["datapath"], summary["rate"]) == ("udp", 10**9)
    assert (summary["loss"], summary["burst_loss"]) == (0.01, 0.0)
    assert summary["ledger"]["lost_on_purpose"] > 0
    assert summary["ledger"]["difference"] == 0, summary["ledger"]
    assert "Not root: in a user namespace" in done.stdout
