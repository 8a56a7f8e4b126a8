"""A rank that leaves answers those who stay for as long as they may ask, and no longer (clock-15, clock-35).

And a process that ends leaves nothing to its children.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import MS, PATIENCE, Team, Trouble, await_that, gradients, launch, patient, team, whole
from tailbound.collective.communicator import Communicator
from tailbound.errors import TransportError
from tailbound.transport.deadline import WARM_UP_OPS
from tailbound.wire.schema import PacketType

NUMEL = 2 * 64 * 256
SETTINGS = patient(quiet=20 * MS, insist=10_000 * MS)


def test_results_that_others_miss_are_given_by_who_has_left() -> None:
    """Half of its last results is lost, repeated ones too, and all close as soon as they have their own average."""
    with team(3, SETTINGS) as job:
        averages(job, range(WARM_UP_OPS + 2))
        Trouble(seed=4, loss=0.5, types=frozenset({PacketType.RESULT})).attach(job[0])
        inputs = gradients("U", 3, NUMEL, seed=99)

        def last(member: Communicator) -> Any:
            out = np.full(NUMEL, np.nan, np.float32)
            outcome = member.allreduce(inputs[member.config.rank], out).result(PATIENCE)
            member.close()
            return out, outcome

        whole(job.each(last))
        assert sum(member.job.counters["rows_repaired"] for member in job.communicators[1:]) > 0


def events(member: Communicator, kind: str) -> list[dict[str, Any]]:
    return [event for event in member.stats()["events"] if event["event"] == kind]


@contextmanager
def leaving(job: Team, rank: int) -> Iterator[threading.Thread]:
    """``rank`` closes, and the others have heard its goodbye; the thread in which it waits for their end."""
    thread = threading.Thread(target=job[rank].close)
    thread.start()
    others = [member.job.membership for member in job.communicators if member is not job[rank]]
    await_that(lambda: all(rank in members.gone for members in others), "its goodbye has come")
    yield thread
    job.each(Communicator.close)
    thread.join(5)  # and not the ten seconds of ``fetch``
    assert not thread.is_alive()


def averages(job: Team, ops: range, ranks: list[int] | None = None) -> None:
    for op in ops:
        job.allreduce(gradients("U", len(job), NUMEL, seed=op), ranks)


def test_a_launch_that_meets_the_farewell_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that launches has found the rank there, and is held up until others have heard that it leaves."""
    with team(2, SETTINGS) as job, ExitStack() as stack:
        averages(job, range(2))
        idle, data = job.engine(0)._idle, np.zeros(NUMEL, np.float32)
        clear = idle.clear
        monkeypatch.setattr(idle, "clear", lambda: (stack.enter_context(leaving(job, 0)), clear()))
        done = launch(job[0], data, data.copy())
        stack.close()
        assert "is closed" in str(done.result(PATIENCE).error)


def test_who_leaves_after_the_same_step_stays_no_longer_than_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """It takes nothing new upon itself meanwhile, and is not warned of."""
    with team(3, SETTINGS) as job:
        averages(job, range(4))
        engine = job.engine(2)
        with leaving(job, 2):
            assert engine.call(lambda: 1).result(PATIENCE) == 1
            with pytest.raises(TransportError, match="closed"):
                engine.ask(engine.position)
            job.engine(0).ask(lambda: None)
            assert events(job[0], "rank_left") == []
        with pytest.raises(TransportError, match="closed"):
            engine.call(lambda: 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "rank 2" in record.message]


def test_an_event_wakes_who_has_left_and_does_not_keep_it_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others launch an op before they hear of its goodbye."""
    with team(2, SETTINGS) as job:
        averages(job, range(4))
        engine, looks = job[1]._engine, list[int]()
        sleep = engine._sleep
        with leaving(job, 1):
            monkeypatch.setattr(engine, "_sleep", lambda again: (looks.append(1), sleep(again))[1])
            os.eventfd_write(engine.job.datapath.fds()[0], 1)
            await_that(lambda: looks, "it wakes up")
            time.sleep(0.3)
            assert len(looks) < 30


def test_who_goes_on_after_a_goodbye_warns_once_of_who_said_it(caplog: pytest.LogCaptureFixture) -> None:
    """A rank whose program ends before those of the others: they trained on without a word. Rule: clock-15."""
    with team(3, SETTINGS | {"first_step": 50}) as job:
        averages(job, range(4))
        with leaving(job, 2):
            averages(job, range(4, 7), [0, 1])
            for rank in (0, 1):
                (found,) = events(job[rank], "rank_left")
                assert (found["left"], found["step"]) == (2, 53)
    assert caplog.text.count("rank 2 has left the job after step 53, and this one goes on (step 54)") == 2


def test_the_end_of_a_process_that_has_said_goodbye_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections end as those of a process that was killed. Rules: clock-14, clock-15."""
    with team(2, patient()) as job:
        averages(job, range(4))
        engine, told = job[0]._engine, threading.Event()
        died = engine.died
        monkeypatch.setattr(engine, "died", lambda rank: (died(rank), told.set()))
        job[1].close()
        assert told.wait(PATIENCE)
        assert (job[0].job.membership.gone, events(job[0], "rank_died")) == ({1}, [])


def test_a_rank_that_raises_says_no_goodbye(caplog: pytest.LogCaptureFixture) -> None:
    """The others saw it leave as one that is through, at level INFO. Rules: clock-14, clock-15."""
    with team(3, SETTINGS | {"first_step": 50}) as job:
        averages(job, range(4))
        waits = job[2].allreduce(gradients("U", 3, NUMEL, seed=9)[2])
        with pytest.raises(RuntimeError), job[2]:
            raise RuntimeError
        assert isinstance(waits.result(PATIENCE).error, TransportError)
        for member in job.communicators[:2]:
            await_that(lambda m=member: events(m, "rank_died"), "its death is known")
            (found,) = events(member, "rank_died")
            assert (found["died"], found["step"]) == (2, 54)
            assert 2 not in member.job.membership.gone
    said = [r for r in caplog.records if "the process of rank 2 has ended (step 54)" in r.message]
    assert [r.levelno for r in said] == [logging.WARNING] * 2


@pytest.mark.parametrize(("ends", "answers"), [("raise ValueError", []), ("sys.exit(1)", [0.5]), ("", [0.5])])
def test_a_program_that_ends_without_close_says_no_goodbye(ends: str, answers: list[float]) -> None:
    """Its exception may have been caught and printed; and others may lack what it sent last. Rule: clock-15."""
    program = f"""
        import sys
        from tailbound.collective import communicator

        class Open:
            def close(self, *, farewell):
                print(farewell, slept)

        slept = []
        communicator.time.sleep = slept.append
        kept = Open()
        communicator._open.add(kept)
        try:
            raise KeyError
        except KeyError:  # which is no end
            pass
        {ends}
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=os.environ, check=False
    )
    assert found.stdout.strip() == f"False {answers}", found.stderr


# -- forked children: ports are free when the process of a job is killed, whoever lives on ---------------------------

HOLDING = """
import os, sys, time
from tailbound.datapath.udp import UdpDatapath
from tailbound.transport.reliable import Reliable

path, reliable = UdpDatapath("127.0.0.1", 0, 256, 64, 64), Reliable("127.0.0.1")
ports = path.endpoint[1], reliable.port
if os.fork() == 0:
    print(*ports, os.getpid(), flush=True)  # what is done after a fork has been done
    sys.stdin.read()
    os._exit(0)
time.sleep(600)
"""


def test_a_restart_finds_its_ports_free_while_a_forked_child_lives() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDING], **pipes) as parent:
        udp, tcp, child = map(int, parent.stdout.readline().split())
        parent.kill()
        parent.wait(60)
        os.kill(child, 0)  # it is there
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind(("127.0.0.1", udp))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", tcp), 10).close()


LEAVING = """
import atexit, contextlib, os, socket, sys
folder = sys.argv[1]
sys.path[:0] = sys.argv[2:]
from support import gradients, patient, team
from tailbound.errors import TransportError

with team(2, patient()) as job:
    inputs = gradients("U", 2, 5000, seed=0)
    job.allreduce(inputs)
    if (child := os.fork()) == 0:
        with contextlib.suppress(TransportError):
            job[0].allreduce(inputs[0])
            os._exit(1)
        os.environ["TAILBOUND_TRACE"] = folder
        atexit._run_exitfuncs()  # as the interpreter does at its end
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.listdir(folder) == []
    for member in job.communicators:
        socket.create_connection(("127.0.0.1", member.reliable.port), 10).close()
    for _, outcome in job.allreduce(inputs):
        assert outcome.error is None and outcome.missing == set() and outcome.delivered == outcome.expected, outcome
    assert not any(member.job.membership.gone for member in job.communicators)
"""


def test_a_child_that_ends_ends_nothing_of_its_parents_job(tmp_path: Path) -> None:
    """Neither the listener for states, nor the trace; no rank takes the parent for gone, and a launch there raises."""
    command = [sys.executable, "-c", LEAVING, str(tmp_path), *[p for p in sys.path if p]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
