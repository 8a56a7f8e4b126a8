"""Commands in the workers of a lab: what they find, how they end, and that nothing of a lab outlives it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

import pytest
from click.testing import CliRunner

import warm_start as warm
from tailbound.errors import AttachError, CapabilityError
from tailbound_lab.lab import build, cluster, namespaces, owner
from tailbound_lab.lab.cli import lab as lab_command
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

pytestmark = pytest.mark.needs("root", "netns")

Make = Callable[..., Cluster]
PATIENCE = 30.0


def lab_command_says(*words: str, status: int = 0) -> list[str]:
    done = CliRunner().invoke(lab_command, words)
    assert done.exit_code == status, done.output
    return done.output.splitlines()


def test_every_rank_gets_what_torchrun_sets() -> None:
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS "
        "TAILBOUND_INTERFACE TAILBOUND_PORT TAILBOUND_LAB_STRAGGLER"
    )
    words = "-n", "3", "--straggler", "1:5:step", "--port", "9999", "sh", "-c", f"echo ${names.replace(' ', ' $')}"
    assert sorted(lab_command_says("run", *words)) == [
        f"[{rank}] {rank} 3 0 1 198.19.0.1 29500 plain0 1 data0 9999 1:5:step" for rank in range(3)
    ]


def test_the_first_failure_is_named_stops_the_others_and_is_the_status() -> None:
    command = "sh", "-c", "echo up; test $RANK != 1 || exit 7; exec sleep 1000"
    said = lab_command_says("run", "-n", "3", "--rate", "1gbit", "--", *command, status=7)
    assert "[1] up" in said
    assert "rank 1 failed first, with status 7" in said


# -- nothing of a lab outlives it, however it ends ---------------------------------------------------------------------

#: Builds a lab and tells its namespaces; commands in it tell their process. Tests that run under nohup hand an ignored
#: SIGHUP on.
OWNER = """
import signal, sys
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.launch import launch
from tailbound_lab.lab.spec import LabSpec, Straggler
signal.signal(signal.SIGHUP, signal.SIG_DFL)
straggler = Straggler(0, 100000.0, 100000.01) if {frozen} else None
with Cluster(LabSpec(workers=2, wire=True, cables=True, straggler=straggler)) as lab:
    print(*lab.topology.namespaces, flush=True)
    command = [sys.executable, "-c", sys.argv[1]]
    {body}
"""
LAUNCHED = "sys.exit(launch(lab, command, grace=1.0).status)"
WAITED_FOR = "ranks = [lab.popen(rank, command) for rank in range(2)]; signal.pause()"
STAYING = r"import os, time; os.write(1, b'%d\n' % os.getpid()); time.sleep(1000)"
STUBBORN = "import signal; [signal.signal(n, lambda *_: os.write(1, b'no\\n')) for n in (2, 15)]; " + STAYING


@pytest.mark.parametrize(
    ("body", "frozen", "command", "number", "status"),
    [
        pytest.param(LAUNCHED, False, STUBBORN, signal.SIGINT, 130, id="stubborn commands"),
        pytest.param(LAUNCHED, True, STAYING, signal.SIGTERM, 143, id="a straggler that is stopped just now"),
        pytest.param(WAITED_FOR, False, STAYING, signal.SIGINT, -2, id="Ctrl-C"),  # as Python ends by KeyboardInterrupt
        pytest.param(WAITED_FOR, False, STAYING, signal.SIGHUP, 129, id="a terminal that is closed"),
        pytest.param(LAUNCHED, False, STAYING, signal.SIGKILL, -9, id="SIGKILL, and then the next lab or clean"),
    ],
)
def test_nothing_outlives_a_lab(
    warm_server: warm.Server,
    tailbound_lab: Make,
    body: str,
    frozen: bool,
    command: str,
    number: signal.Signals,
    status: int,
) -> None:
    living = tailbound_lab(workers=1)
    script, pipes = OWNER.format(body=body, frozen=frozen), {"stdin": -1, "stdout": -1, "stderr": -1, "text": True}
    # forked from a process that has loaded the lab; it ends like any other
    process = warm.popen_from(warm_server)([sys.executable, "-c", script, command], **pipes)
    try:
        names = process.stdout.readline().split()
        assert len(names) == 5
        assert all(namespaces.exists(name) for name in names)
        # of one that is stopped the line may not come
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(1 if frozen else 2)]
        watches = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(number)
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == status
    assert said.count("no") == (2 if "no" in command else 0)
    for watch in watches:
        assert select.select([watch], [], [], PATIENCE)[0], "a command of the lab still runs"
        os.close(watch)
    if number == signal.SIGKILL:
        said = "\n".join(lab_command_says("clean"))
        assert f"in use by process {os.getpid()}, left alone" in said
        assert f"tb-{process.pid}-" in said
        assert living.run(0, os.getpid) == os.getpid()
    assert not any(namespaces.exists(name) for name in names)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        # the name holds the start time, too: a lab of this process's id but another time is nobody's
        pytest.param(f"{owner.PREFIX}{os.getpid()}-0-0-s", True, id="the process id has another owner now"),
        pytest.param(f"{owner.PREFIX}not-a-lab-{os.getpid()}", False, id="not a name of a lab"),
    ],
)
def test_only_labs_without_an_owner_are_taken_away(name: str, taken: bool) -> None:
    namespaces.create(name)
    try:
        assert [lab.alive for lab in owner.owned() if name in lab.namespaces] == [False] * taken
        owner.reap()
        assert namespaces.exists(name) != taken
    finally:
        namespaces.remove(name)


@pytest.mark.parametrize("error", [KeyboardInterrupt, AttachError])
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


@pytest.mark.parametrize(
    ("refused", "words"),
    [("", "needs root"), ("Operation not permitted", r"root.*user namespace.*refused here: Operation not permitted")],
)
def test_without_root_the_error_says_so_and_why_there_is_no_user_namespace(
    monkeypatch: pytest.MonkeyPatch, refused: str, words: str
) -> None:
    monkeypatch.setattr("tailbound_lab.lab.cluster.has_capability", lambda *names: False)
    monkeypatch.setenv("TAILBOUND_LAB_REFUSED", refused)
    with pytest.raises(CapabilityError, match=words), Cluster(1):
        pytest.fail("the lab must not come up")
