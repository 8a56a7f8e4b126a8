"""The lab of a user who is not root: in a user namespace, with rates and losses, without XDP, and gone when it ends."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys

import pytest

from tailbound_lab.lab import user_namespace

pytestmark = pytest.mark.needs("root", "netns", "user namespaces")

_PATIENCE = 60.0
#: Root in a user namespace, who may do there what any user may, and whose machine code is in the cache already.
_RESTARTED = [sys.executable, "-I", "-S", user_namespace.__file__, sys.executable]


def start(*words: str) -> subprocess.Popen[str]:
    """``tailbound lab run`` with two workers as a user without any privilege."""
    command = "import sys; from tailbound.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", command, "lab", "run", "--workers", "2", "--rate", "1gbit", *words],
        user=65534, group=65534, extra_groups=[], cwd="/", env={**os.environ, "HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


#: Rank 0 sends 4000 datagrams to rank 1 in super-frames, and says what it sees.
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


def test_a_lab_with_rate_and_losses_is_there_for_everybody() -> None:
    out, err = start("--loss", "0.05", "--", sys.executable, "-c", TALK).communicate(timeout=_PATIENCE)
    assert "sent 4000 udp data0 lo plain0" in out, out + err  # of wire size
    lost = re.search(r"packets (\d+) lost", " ".join(err.split()))
    assert lost is not None, err
    assert 115 < int(lost[1]) < 285  # 200, and six times the standard deviation


def test_what_needs_xdp_is_refused_by_name() -> None:
    faults = [word for name in ("burst-loss", "duplicate", "corrupt", "reorder") for word in (f"--{name}", "0.01")]
    process = start(*faults, "--switch", "--queue", "64KiB", "--", "true")
    said = " ".join(process.communicate(timeout=_PATIENCE)[1].split())
    assert process.returncode != 0
    names = "bursts, duplicates, corruption, reordering, a switch that sums, finite queues"
    assert f"{names}: done by XDP programs, which need root" in said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_outlives_it(number: signal.Signals, status: int) -> None:
    stay = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(1000)"
    process = start("--", sys.executable, "-c", stay)
    assert process.stdout is not None
    watches = [os.pidfd_open(int(process.stdout.readline().split()[-1])) for _ in range(2)]
    process.send_signal(number)
    for watch in watches:
        assert select.select([watch], [], [], _PATIENCE)[0], "a rank still runs"
        os.close(watch)
    process.communicate(timeout=_PATIENCE)
    assert process.returncode == status


#: Builds a lab whose losses change while it runs, and counts them.
CHANGE = """
import json, socket, sys
from tailbound_lab.lab import LabSpec, Link
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault
from tailbound.wire.address import family_of

def open_socket(address):
    made = socket.socket(family_of(address), socket.SOCK_DGRAM)
    made.bind((address, 9))
    return made

with Cluster(LabSpec(2, cables=True, ipv6="ipv6" in sys.argv)) as lab:
    sock, ear = (lab.run(rank, open_socket, lab.workers[rank].address) for rank in (0, 1))
    out = []
    for rank in (0, 1, None):
        lab.set_faults(Fault())
        lab.set_faults(Fault(loss=0 if rank is None else 1 - 1e-12), rank)
        before = lab.fault_counts(link=Link.DATA)
        for _ in range(100):
            sock.sendto(bytes(1000), (lab.workers[1].address, 9))
        after = lab.fault_counts(link=Link.DATA)
        out.append((after.seen - before.seen, after.lost - before.lost, after.lost_other - before.lost_other))
    print(json.dumps([out, lab.lost_frames(), lab.fault_counts(link=Link.PLAIN).seen]))
"""


@pytest.mark.parametrize("family", ["ipv4", pytest.param("ipv6", marks=pytest.mark.thorough)])
def test_losses_change_by_worker_and_are_counted(family: str) -> None:
    done = subprocess.run([*_RESTARTED, "-c", CHANGE, family], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changes, lost_frames, plain = json.loads(done.stdout)
    assert [[lost, other] for _, lost, other in changes] == [[100, 0], [100, 0], [0, 0]]
    # a packet that is let through is seen at both cables, at each where it enters; so are IPv6's words about groups
    more = [seen - want for (seen, _, _), want in zip(changes, (100, 200, 200), strict=True)]
    assert min(more) >= 0
    assert family == "ipv6" or not any([*more, lost_frames])
    assert plain == 0
