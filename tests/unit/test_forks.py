"""Forked children keep nothing of a job: ports are free when its process is killed, whoever lives on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from tailbound.datapath.udp import UdpDatapath
from tailbound.transport.reliable import Reliable

path, reliable = UdpDatapath("127.0.0.1", 0, 256, 64, 64), Reliable("127.0.0.1")
if os.fork() == 0:
    path.close()  # what a child's interpreter may do at its end; it must not touch the parent's
    os._exit(0)
os.wait()
here, there = os.pipe()
if (child := os.fork()) == 0:  # another one closes nothing
    os.write(there, b"x")  # it runs: what is done in a child after a fork has been done
    sys.stdin.read()
    os._exit(0)
os.read(here, 1)
print(path.endpoint[1], reliable.port, child, path.socket.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_a_restart_finds_its_ports_free_while_a_forked_child_lives() -> None:
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        udp, tcp, child, still = map(int, parent.stdout.readline().split())
        assert udp == still
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        os.kill(child, 0)  # it is there
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
            again.bind(("127.0.0.1", udp))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", tcp), 10).close()
    finally:
        parent.kill()
        parent.wait(60)
        parent.stdin.close()
        parent.stdout.close()


LEAVING = """
import atexit, os, socket, sys
folder = sys.argv[1]
sys.path[:0] = sys.argv[2:]
from support import gradients, patient, team

with team(2, patient()) as job:
    inputs = gradients("U", 2, 5000, seed=0)
    job.allreduce(inputs)
    if (child := os.fork()) == 0:
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
    """Neither the listener for states, nor the trace; and nobody takes the parent for gone."""
    command = [sys.executable, "-c", LEAVING, str(tmp_path), *[p for p in sys.path if p]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
