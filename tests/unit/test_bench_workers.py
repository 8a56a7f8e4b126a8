"""Worker processes of an experiment: orders, a start line, the rank that failed first, and no process left behind."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tailbound.errors import TransportError
from tailbound_lab.bench import experiment as module
from tailbound_lab.bench.experiment import Experiment
from tailbound_lab.bench.start import StartLine
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

WORKER = """
import os, sys
from tailbound_lab.bench.channel import serve
from tailbound.errors import ConfigError

def work(job, channel):
    rank = int(os.environ["RANK"])
    channel.report("ready", pid=os.getpid(), datapath="none")
    if rank == job.get("raises"):
        raise ConfigError("no such thing")
    if rank == job.get("dies"):
        os.kill(os.getpid(), 9)
    if rank == job.get("ends"):
        return

    channel.obey(lambda names: {"times": {}})

if __name__ == "__main__":
    sys.exit(serve(work))
"""


class Here:
    """In the place of a lab: ranks as processes of this namespace."""

    spec = LabSpec(3)

    def popen(self, rank: int, argv: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen[Any]:
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(self.spec.workers)}
        return subprocess.Popen(argv, env={**os.environ, **ranks, **env}, process_group=0, **options)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    (tmp_path / "bench_worker.py").write_text(WORKER)
    package = Path(module.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(package)]))
    return Here()


def experiment(lab: Cluster, **job: object) -> Experiment:
    return Experiment(lab, job, Console(file=io.StringIO()), worker="bench_worker")


@pytest.mark.parametrize(
    ("how", "rank", "words"),
    [
        ("raises", 1, "rank 1 failed: ConfigError: no such thing"),
        ("dies", 2, "rank 2 was killed by signal 9"),
        ("ends", 0, "rank 0 ended too early with status 0"),
    ],
)
def test_the_rank_that_failed_first_is_named(lab: Cluster, how: str, rank: int, words: str) -> None:
    with pytest.raises(TransportError, match=words), experiment(lab, **{how: rank}) as workers:
        workers.phase(names=[])


def test_nobody_is_left_behind(lab: Cluster) -> None:
    with contextlib.suppress(KeyboardInterrupt), experiment(lab) as workers:
        pids = [message["pid"] for message in workers.ready]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        raise KeyboardInterrupt
    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_start_together_and_end_in_the_same_round(tmp_path: Path) -> None:
    path = tmp_path / "line"
    StartLine.create(path, 3)
    starts: list[list[int]] = [[], [], []]

    def run(rank: int) -> None:
        line = StartLine(path, rank, 3, timeout=20)
        while True:
            start = line.wait(last=len(starts[rank]) == 5)  # only rank 0 is heard
            if line.over:
                break
            starts[rank].append(start)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))
    assert starts[0] == starts[1] == starts[2]
    assert len(starts[0]) == 5
    assert (np.diff(starts[0]) > 0).all()
