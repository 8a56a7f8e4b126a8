"""Nothing of a lab outlives it, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from tailbound.errors import AttachError, CapabilityError
from tailbound_lab.lab import build, cluster, namespaces, owner
from tailbound_lab.lab.cli import lab as lab_command
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

pytestmark = pytest.mark.needs("root", "netns")

Make = Callable[..., Cluster]
Start = Callable[..., "subprocess.Popen[str]"]

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
