"""A rank that comes back over cables of a known rate, and under torchrun (clock-32)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab_team import all_said
from tailbound_lab.lab.cluster import Cluster

pytestmark = [pytest.mark.needs("root", "netns", "torch"), pytest.mark.timeout(200), pytest.mark.thorough]

PATIENCE = 150.0
RATE = 200e6


@pytest.mark.usefixtures("warm_start")
def test_a_return_takes_as_long_as_the_state_and_two_seconds(
    tailbound_lab: Callable[..., Cluster], repository: Path, tmp_path: Path
) -> None:
    """4 M parameters with AdamW, 50 MB of state, over 200 Mbit/s: from the end of the own steps on.

    What comes before that is said, too: it is the launcher's, Python's and the script's own time.
    """
    lab = tailbound_lab(workers=3, rate=int(RATE))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    program = f"{sys.executable} {repository / 'tests/jobs/rejoin.py'} {tmp_path / 'mark'}"
    again = f"export PYTHONPATH={':'.join(filter(None, sys.path))}; {program} || {program}"
    said = all_said([lab.popen(rank, ["bash", "-c", again], **pipes) for rank in range(3)], PATIENCE)
    (found,) = re.findall(r"back: (\d+) bytes, ([-0-9. ]+) s", "\n".join(said))
    taken, parts = int(found[0]), [float(part) for part in found[1].split()]
    for what, part in zip(("the launcher's notice", "loading", "register", "own steps", "return"), parts, strict=True):
        print(f"{what}: {part:.2f} s")
    print(f"{taken / 1e6:.1f} MB, {sum(parts):.2f} s after the kill; the cable's {8 * taken / RATE:.2f} s")
    assert taken > 45e6
    assert parts[-1] < 8 * taken / RATE + 2
    assert ["equal: True" in text for text in said] == [True] * 3


def test_a_rank_that_is_killed_comes_back_under_torchrun(repository: Path, tmp_path: Path) -> None:
    """The command of the documentation: an agent a rank, static rendezvous; also for rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "static", "--master-addr", "127.0.0.1"]
    command += ["--master-port", "29523", "--nnodes", "3", "--nproc-per-node", "1", "--max-restarts", "2"]
    example = [str(repository / "examples" / "train_elastic.py"), "--checkpoint", str(tmp_path / "c.pt")]
    logs = [tmp_path / f"{rank}.log" for rank in range(3)]
    agents = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                agents.append(
                    subprocess.Popen(
                        [*command, "--node-rank", str(rank), *example, "--steps", "1500"],
                        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        until = time.monotonic() + PATIENCE
        while not all("step 100," in log.read_text() for log in logs):
            assert time.monotonic() < until, [log.read_text() for log in logs]
            time.sleep(0.1)
        (pid,) = re.findall(r"rank 0: pid (\d+), begins", logs[0].read_text())
        os.kill(int(pid), signal.SIGKILL)
        codes = [agent.wait(max(1.0, until - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(30)
    said = [log.read_text() for log in logs]
    assert codes == [0, 0, 0], said
    assert "has come back" in said[0]
    assert [text.count("begins at step 0") for text in said] == [1, 1, 1]
    assert all("step 1500, all are equal" in text for text in said)
