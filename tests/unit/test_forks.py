"""Forked children keep nothing of a job: ports are free when its process is killed, whoever lives on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, time
from tailbound.datapath.udp import UdpDatapath
from tailbound.transport.reliable import Reliable

path, reliable = UdpDatapath("127.0.0.1", 0, 256, 64, 64), Reliable("127.0.0.1")
if (child := os.fork()) == 0:
    path.close()  # what a child's interpreter may do at its end; it must not touch the parent's
    sys.stdin.read()
    os._exit(0)
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
            socket.create_connection(("127.0.0.1", tcp), 10)
    finally:
        parent.kill()
        parent.wait(60)
        parent.stdin.close()
        parent.stdout.close()
