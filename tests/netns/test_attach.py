"""``tailbound attach``: a privileged step, then a process without privileges that opens the maps, then nothing left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers"), pytest.mark.usefixtures("warm_start")]

# One process does it all, since its mount namespace takes the pins with it whatever happens.
STORY = """
import json, os, sys
from tailbound import cli
from tailbound.datapath.xdp import XdpDatapath
from tailbound.kernel import interfaces
from tailbound.kernel.fanout import Fanout, Peer

name = sys.argv[1]
told = {}
told["attach"] = cli.main(["attach", name, "--ring", "1", "--workers", "4", "--group", "nogroup", "--port", "7411"])
told["again"] = cli.main(["attach", name])
pid = os.fork()
if pid == 0:
    status = 1
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        path = XdpDatapath.open(name)
        path.store.control["rank"][0] = 3
        assert not path.store.sums.flags.writeable and not path.store.slots.flags.writeable
        assert path.endpoint[1] == 7411 and path.store.width == 1408
        path.reset(1)
        path.close()
        fanout = Fanout.open(name, 40000)
        fanout.set_peers(3, [Peer(0, "198.18.0.9", 7411, bytes(6))])
        fanout.live({0})
        assert fanout.lead == 0 and not fanout.maps.arrays["fanout_counts"].flags.writeable
        fanout.close()
        assert cli.main(["detach", name]) == 1 and XdpDatapath.is_attached(name)
        status = 0
    finally:
        os._exit(status)
told["trainer"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
path = XdpDatapath.open(name)
told["rank"] = int(path.store.control["rank"][0])
path.close()
told["still"] = interfaces.xdp_on(name) is not None
told["detach"] = cli.main(["detach", name])
told["gone"] = interfaces.xdp_on(name) is None
told["detach_again"] = cli.main(["detach", name])
told["after"] = cli.main(["attach", name, "--ring", "1"])
told["end"] = cli.main(["detach", name])
print(json.dumps(told))
"""

REFUSED = """
import json, sys
from tailbound import cli
from tailbound.kernel import interfaces

name = sys.argv[1]
options = (["--mtu", "9000"], ["--mtu", "100"], ["--ring", "0"], ["--group", "nosuch"])
print(json.dumps([cli.main(["attach", *case]) for case in (["nowhere0"], *([name, *o] for o in options))]))
assert interfaces.xdp_on(name) is None
"""


@pytest.fixture
def tell(tailbound_lab: Callable[..., Any]) -> Callable[[str], tuple[Any, str]]:
    """Runs a script in a worker's namespace with its interface as the argument; the last line it prints, as JSON."""
    lab = tailbound_lab(workers=1)

    def run(script: str) -> tuple[Any, str]:
        argv = [sys.executable, "-c", script, lab.workers[0].interface]
        process = lab.popen(0, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, out + err
        return json.loads(out.splitlines()[-1]), err

    return run


def test_attach_train_detach(tell: Callable[[str], tuple[Any, str]]) -> None:
    told, errors = tell(STORY)
    assert told == {
        "attach": 0,
        "again": 1,
        "trainer": 0,
        "rank": 3,
        "still": True,
        "detach": 0,
        "gone": True,
        "detach_again": 0,
        "after": 0,
        "end": 0,
    }
    assert "already carries Tailbound's tb_worker" in errors


def test_what_cannot_be_attached_is_said_in_one_line(tell: Callable[[str], tuple[Any, str]]) -> None:
    statuses, errors = tell(REFUSED)
    assert statuses == [2] * 5
    lines = errors.splitlines()
    assert len(lines) == 5
    for line, words in zip(lines, ("nowhere0", "MTU 9000", "MTU 100", "ring of 0.0 MiB", "nosuch"), strict=True):
        assert line.startswith("error: ")
        assert words in line
