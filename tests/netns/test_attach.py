"""``tailbound attach``: a privileged step, then a process without privileges that opens the maps, then nothing left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab_team import all_said, served_store
from left_behind import nothing_more
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers"), pytest.mark.usefixtures("warm_start")]


REFUSED = """
import json, sys
from tailbound import cli
from tailbound.kernel import net

name = sys.argv[1]
options = (["--mtu", "9000"], ["--mtu", "100"], ["--ring", "0"], ["--group", "nosuch"])
print(json.dumps([cli.main(["attach", *case]) for case in (["nowhere0"], *([name, *o] for o in options))]))
assert net.xdp_on(name) is None
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with nothing_more(), Cluster(LabSpec(workers=2)) as made:
        yield made


@pytest.fixture
def tell(lab: Cluster) -> Callable[[str], tuple[Any, str]]:
    """Runs a script in a worker's namespace with its interface as the argument; the last line it prints, as JSON."""

    def run(script: str) -> tuple[Any, str]:
        argv = [sys.executable, "-c", script, lab.workers[0].interface]
        process = lab.popen(0, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, out + err
        return json.loads(out.splitlines()[-1]), err

    return run


def test_what_cannot_be_attached_is_said_in_one_line(tell: Callable[[str], tuple[Any, str]]) -> None:
    statuses, errors = tell(REFUSED)
    assert statuses == [2] * 5
    lines = errors.splitlines()
    assert len(lines) == 5
    for line, words in zip(lines, ("nowhere0", "MTU 9000", "MTU 100", "ring of 0.0 MiB", "nosuch"), strict=True):
        assert line.startswith("error: ")
        assert words in line


# What the kernel keeps of a process outlives it, so a job of which all ranks have died must not take it for its own.
LIVES = """
import os, sys
from datetime import timedelta

from tailbound import cli
from lab_team import connect
from support import PATIENCE, exact_mean, gradients, nmse, patient
from tailbound.collective.communicator import Communicator, Training
from tailbound.transport.config import Config

RANKS, LIVES, OPS, NUMEL = 2, 2, 5, 64 * 64 * 8
name, rank, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
assert cli.main(["attach", name, "--ring", "1"]) == 0


def live(number):
    store = connect(address)
    net = Communicator(store, Config(rank, RANKS, **patient(width=0)), datapath="xdp", interface=name,
                       timeout=PATIENCE, training=Training(elastic=True))
    for op in range(OPS):
        inputs = gradients("U", RANKS, NUMEL, seed=100 * number + op)
        out = inputs[rank].copy()
        done = net.allreduce(out).result(PATIENCE)
        assert done.error is None and done.delivered == done.expected and not done.missing, (number, op, done)
        error = nmse(out, exact_mean(inputs))
        assert error < 0.01, (number, op, error)
    print("life", number, f"{net.job.cookie:08x}", flush=True)
    net.meet(f"life {number}")


for number in range(LIVES):
    if (pid := os.fork()) == 0:
        status = 1
        try:
            live(number)
            status = 0
        finally:
            os._exit(status)  # without a word, as if it had been killed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store = connect(address)
    store.set(f"dead/{number}/{rank}", "1")
    store.wait([f"dead/{number}/{other}" for other in range(RANKS)], timedelta(seconds=PATIENCE))
cli.main(["detach", name])
"""


def test_a_job_whose_ranks_have_all_died_takes_nothing_of_what_the_kernel_has_kept(
    lab: Cluster, tmp_path: Path
) -> None:
    """The run before has left marks, sums and results of the same steps (clock-32)."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    paths = "PYTHONPATH=" + ":".join(filter(None, sys.path))
    with served_store(tmp_path / "store.sock") as store:
        commands = [
            ["env", paths, sys.executable, "-c", LIVES, lab.workers[rank].interface, str(rank), store]
            for rank in range(2)
        ]
        said = all_said([lab.popen(rank, command, **pipes) for rank, command in enumerate(commands)], 120.0)
    found = [re.findall(r"life (\d) (\w{8})", text) for text in said]
    assert found[0] == found[1]
    assert len(dict(found[0])) == len({cookie for _, cookie in found[0]}) == 2
