"""One command in every worker: its environment, its output, and how it ends."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from rich.console import Console

from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cli import lab as lab_command
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.launch import Outcome, launch
from tailbound_lab.lab.spec import Straggler

pytestmark = pytest.mark.needs("root", "netns")

Make = Callable[..., Cluster]
Start = Callable[..., "subprocess.Popen[str]"]


def run(lab: Cluster, source: str, **options: object) -> tuple[Outcome, list[str], list[str]]:
    out, err = io.StringIO(), io.StringIO()
    outcome = launch(
        lab,
        [sys.executable, "-c", source],
        out=Console(file=out),
        err=Console(file=err),
        **options,  # type: ignore[arg-type]
    )
    return outcome, out.getvalue().splitlines(), err.getvalue().splitlines()


def test_every_rank_gets_what_torchrun_sets(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=3, straggler=Straggler(1, 5, None), port=9999)
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS "
        "TAILBOUND_INTERFACE TAILBOUND_PORT TAILBOUND_LAB_STRAGGLER EXTRA"
    )
    source = f"import os; print(*[os.environ[n] for n in {names.split()!r}])"
    outcome, out, err = run(lab, source, env={"EXTRA": "more"})
    assert (outcome, err) == (Outcome((0, 0, 0), None), [])
    assert sorted(out) == [
        f"[{rank}] {rank} 3 0 1 198.19.0.1 29500 plain0 1 data0 9999 1:5:step more" for rank in range(3)
    ]


def test_the_first_failure_is_named_and_stops_the_others(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=3)
    source = (
        "import os, signal, sys\nprint('up', flush=True)\nif os.environ['RANK'] == '1': sys.exit(7)\nsignal.pause()\n"
    )
    outcome, out, err = run(lab, source)
    assert outcome == Outcome((143, 7, 143), 1)
    assert outcome.status == 7
    assert "[1] up" in out
    assert err[0] == "rank 1 failed first, with status 7"


STUBBORN = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, f: print("no", n, flush=True))
print("up", flush=True)
while True:
    signal.pause()
"""

LAUNCHER = """
import signal, sys
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.launch import launch
from tailbound_lab.lab.spec import LabSpec, Straggler
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup hand an ignored one on
straggler = Straggler(0, 100000.0, 100000.01) if "frozen" in sys.argv else None
with Cluster(LabSpec(workers=2, straggler=straggler)) as lab:
    print(lab.workers[0].namespace, flush=True)
    sys.exit(launch(lab, [sys.executable, "-c", sys.argv[1]], grace=1.0).status)
"""


def test_a_signal_ends_every_rank_however_stubborn(start_script: Start) -> None:
    process = start_script(LAUNCHER, STUBBORN)
    assert process.stdout is not None
    namespace = process.stdout.readline().strip()
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert not namespaces.exists(namespace)
    assert sorted(out.splitlines()) == [f"[{rank}] no {signal.SIGINT.value}" for rank in range(2)]


def test_a_stopped_rank_can_still_be_ended(start_script: Start) -> None:
    """The straggler is stopped almost at once and for 100 seconds."""
    process = start_script(LAUNCHER, "import time; print('up', flush=True); time.sleep(1000)", "frozen")
    assert process.stdout is not None
    namespace = process.stdout.readline().strip()
    assert process.stdout.readline().endswith("up\n")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert not namespaces.exists(namespace)


def test_the_command_line_runs_a_command_and_returns_its_status() -> None:
    command = ["run", "--workers", "2", "--rate", "1gbit", "--", "sh", "-c", "exit $((RANK * 3))"]
    result = CliRunner().invoke(lab_command, command)
    assert result.exit_code == 3
    assert "rank 1 failed first, with status 3" in result.output
    assert CliRunner().invoke(lab_command, ["run", "-n", "1", "true"]).exit_code == 0


def test_a_command_does_not_survive_its_launcher(start_script: Start) -> None:
    process = start_script(LAUNCHER, "import os; print(os.getpid(), flush=True); import time; time.sleep(1000)")
    assert process.stdout is not None
    process.stdout.readline()
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    watched = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    process.wait()
    for watch in watched:
        assert select.select([watch], [], [], 20)[0], "still running"
        os.close(watch)
    assert CliRunner().invoke(lab_command, ["clean"]).exit_code == 0
