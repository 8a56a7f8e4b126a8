"""A restart while a forked child of the killed trainer lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tailbound.datapath.xdp import XdpDatapath
from tailbound.kernel import net
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns")

PATIENCE = 60.0


TRAINER = """
import os, sys, time
from tailbound.datapath.xdp import XdpDatapath

path = XdpDatapath.attach("data0", 5515, 256, 64, 64)
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print("child", child, flush=True)
time.sleep(600)
"""


@pytest.mark.needs("bpf", "bcc", "headers")
@pytest.mark.usefixtures("warm_start")
def test_a_killed_trainer_leaves_neither_program_nor_port_to_its_children(
    tailbound_lab: Callable[..., Cluster],
) -> None:
    """Rule: kernel-25."""
    lab = tailbound_lab(workers=1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    trainer = lab.popen(0, [sys.executable, "-c", TRAINER], **pipes)
    try:
        child = int(trainer.stdout.readline().split()[1])
        assert lab.run(0, net.xdp_on, "data0") is not None
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait(PATIENCE)
        os.kill(child, 0)  # it is there
        until = time.monotonic() + PATIENCE
        while lab.run(0, net.xdp_on, "data0") is not None:  # the kernel frees a link in its own time
            assert time.monotonic() < until
        lab.run(0, XdpDatapath.attach, "data0", 5515, 256, 64, 64, sysfs=True).close()
    finally:
        trainer.kill()
        trainer.stdin.close()
        trainer.stdout.close()
