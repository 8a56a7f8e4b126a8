"""A rank that comes back under torchrun (clock-32)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("torch"), pytest.mark.timeout(200), pytest.mark.thorough]

PATIENCE = 150.0


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
