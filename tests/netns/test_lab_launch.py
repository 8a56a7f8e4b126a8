"""Commands in the workers of a lab: environment, output, how they end, and that nothing of a lab outlives it."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from rich.console import Console

from tailbound.errors import AttachError, CapabilityError
from tailbound_lab.lab import build, cluster, namespaces, owner
from tailbound_lab.lab.cli import lab as lab_command
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.launch import Outcome, launch
from tailbound_lab.lab.spec import LabSpec, Straggler

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


# -- nothing of a lab outlives it, however it ends ---------------------------------------------------------------------


#: Builds a lab, starts a command in it that would stay for ever, says so, and waits. Tests that run under nohup hand
#: an ignored SIGHUP on.
SCRIPT = """
import signal, subprocess, sys
from tailbound_lab.lab.cluster import Cluster
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from tailbound_lab.lab.spec import LabSpec
with Cluster(LabSpec(workers=2, wire=True, cables=True)) as lab:
    inside = lab.popen(0, ["sleep", "1000"])
    print(inside.pid, *lab.topology.namespaces, flush=True)
    {body}
"""
WAIT = "signal.pause()"
PATIENCE = 20.0


def wait_for_lab(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    assert process.stdout is not None
    pid, *names = process.stdout.readline().split()
    assert len(names) == 5
    assert all(namespaces.exists(name) for name in names)
    return int(pid), names


def assert_gone(pid: int, names: list[str]) -> None:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:  # it may be half-way out: the kernel takes its namespaces away first
        ended = select.select([watch], [], [], PATIENCE)[0]
        os.close(watch)
        assert ended, f"process {pid} of the lab still runs"
    assert not any(namespaces.exists(name) for name in names)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_everything(start_script: Start, number: signal.Signals) -> None:
    process = start_script(SCRIPT.format(body=WAIT))
    pid, names = wait_for_lab(process)
    process.send_signal(number)
    process.communicate(timeout=30)
    # Python ends itself by SIGINT after KeyboardInterrupt; the others become an exit status
    assert process.returncode == (-number if number == signal.SIGINT else 128 + number)
    assert_gone(pid, names)


def killed_lab(start_script: Start) -> tuple[int, int, list[str]]:
    process = start_script(SCRIPT.format(body=WAIT))
    pid, names = wait_for_lab(process)
    process.kill()
    process.wait()
    return process.pid, pid, names


def test_clean_removes_what_a_killed_owner_left_and_nothing_else(start_script: Start, tailbound_lab: Make) -> None:
    living = tailbound_lab(workers=1)
    owner_pid, pid, names = killed_lab(start_script)
    result = CliRunner().invoke(lab_command, ["clean"])
    assert result.exit_code == 0
    assert f"in use by process {os.getpid()}, left alone" in result.output
    assert_gone(pid, names)
    assert living.run(0, os.getpid) == os.getpid()
    assert f"tb-{owner_pid}-" not in CliRunner().invoke(lab_command, ["clean"]).output


def test_the_owner_of_a_reused_process_id_is_another() -> None:
    """The name holds the start time too; a lab of this process's id but another time is nobody's."""
    name = f"{owner.PREFIX}{os.getpid()}-0-0-s"
    namespaces.create(name)
    try:
        found = [lab for lab in owner.owned() if name in lab.namespaces]
        assert [(lab.pid, lab.alive) for lab in found] == [(os.getpid(), False)]
        assert found[0].prefix in owner.reap()
        assert not namespaces.exists(name)
    finally:
        namespaces.remove(name)


def test_names_of_others_are_not_touched() -> None:
    name = f"{owner.PREFIX}not-a-lab-{os.getpid()}"
    namespaces.create(name)
    try:
        assert not any(name in lab.namespaces for lab in owner.owned())
        owner.reap()
        assert namespaces.exists(name)
    finally:
        namespaces.remove(name)
    namespaces.remove(name)


@pytest.mark.parametrize("error", [KeyboardInterrupt, AttachError, OSError])
def test_a_failure_while_building_leaves_nothing(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error("half way")

    monkeypatch.setattr(cluster, "PassThrough", fail)
    lab = Cluster(LabSpec(workers=2, wire=True))
    with pytest.raises(error, match="half way"), lab:
        pytest.fail("the lab must not come up")
    assert not any(namespaces.exists(name) for name in lab.topology.namespaces)


def test_interrupts_while_building_wait_for_the_piece_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one broke the wait off, and a namespace was left: ``timeout`` sends two."""
    reached, early = threading.Event(), []

    def interrupt(number: int, frame: object) -> None:
        reached.set()
        raise KeyboardInterrupt

    def slow_switch(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        # the main thread must not go on to remove things under this one's hands
        early.append(reached.wait(0.2))

    monkeypatch.setattr(build, "_switch", slow_switch)
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    lab = Cluster(2)
    try:
        with pytest.raises(KeyboardInterrupt), lab:
            pytest.fail("the lab must not come up")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert early == [False]
    assert not any(namespaces.exists(name) for name in lab.topology.namespaces)


def test_a_forked_child_does_not_take_the_lab_away(tailbound_lab: Make) -> None:
    lab = tailbound_lab(workers=1)
    child = os.fork()
    if child == 0:
        lab.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert namespaces.exists(lab.workers[0].namespace)


def test_without_root_the_error_says_so_and_why_there_is_no_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailbound_lab.lab.cluster.has_capability", lambda *names: False)
    with pytest.raises(CapabilityError, match="root"), Cluster(1):
        pytest.fail("the lab must not come up")
    monkeypatch.setenv("TAILBOUND_LAB_REFUSED", "Operation not permitted")
    with (
        pytest.raises(CapabilityError, match=r"root.*user namespace.*refused here: Operation not permitted"),
        Cluster(1),
    ):
        pytest.fail("the lab must not come up")
