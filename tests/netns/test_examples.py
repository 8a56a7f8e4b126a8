"""The examples as a user runs them: in the lab over XDP, and under torchrun on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab_team import said_by
from tailbound_lab.lab.cluster import Cluster

pytestmark = [
    pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch"),
    pytest.mark.timeout(150),  # what workers have to say must come out before
]


#: Seconds that an example may take on a loaded machine.
PATIENCE = 110.0
#: In the everyday run there is one in the lab, that of half precision, and one that starts as a user starts it, under
#: torchrun; what the others add to them, they add in PyTorch.
ALL = [
    "train_ddp.py",
    "train_hsdp.py",
    "train_nodes.py",
    pytest.param("train_lightning.py", marks=pytest.mark.needs("lightning")),
    pytest.param("train_accelerate.py", marks=pytest.mark.needs("accelerate")),
]


def in_lab(lab: Cluster, command: Sequence[str | Path]) -> list[str]:
    """What each worker says that runs ``command``; all of them end well."""
    return said_by(lab, [[sys.executable, *map(str, command)]] * lab.spec.workers, PATIENCE)


@pytest.mark.thorough
def test_the_cuda_example_trains_on_the_cpu(tailbound_lab: Callable[..., Cluster], repository: Path) -> None:
    command = [repository / "examples" / "train_cuda.py", "--device", "cpu"]
    for rank, said in enumerate(in_lab(tailbound_lab(workers=2), command)):
        assert f"rank {rank}: accuracy" in said
        assert min(accuracies(said)) > 0.9
        assert "coded by the host" in said


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([0-9.]+)", text)]


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("example", ALL)
def test_examples_run_in_the_lab(tailbound_lab: Callable[..., Cluster], repository: Path, example: str) -> None:
    """All ranks learn, over XDP."""
    for rank, said in enumerate(in_lab(tailbound_lab(workers=2), [repository / "examples" / example])):
        assert f"rank {rank}: accuracy" in said
        assert min(accuracies(said)) > 0.9
        assert "of the rows delivered" in said
        assert "over xdp" in said


@pytest.mark.usefixtures("warm_start")
def test_half_precision_learns_at_a_scale_of_each_rank(tailbound_lab: Callable[..., Cluster], repository: Path) -> None:
    """The scale begins far too large: each rank lowers its own before anything is learned."""
    for rank, said in enumerate(in_lab(tailbound_lab(workers=2), [repository / "examples" / "train_fp16.py"])):
        assert f"rank {rank}: accuracy" in said
        assert min(accuracies(said)) > 0.9
        assert "over xdp" in said
        ((scale, lowered),) = re.findall(r"scale ([0-9.e+]+), lowered ([0-9]+) times", said)
        assert 0 < int(lowered) < 24
        assert float(scale) == 2**24 / 2 ** int(lowered)


@pytest.mark.thorough
def test_a_language_model_learns_in_the_lab(tailbound_lab: Callable[..., Cluster], repository: Path) -> None:
    """It accumulates gradients over two passes, in bf16; averages are Tailbound's, over XDP."""
    command = [repository / "examples" / "train_gpt.py", "--small", "--steps", "40"]
    for rank, said in enumerate(in_lab(tailbound_lab(workers=2), command)):
        losses = [float(loss) for loss in re.findall(rf"rank {rank}: step [0-9]+: loss ([0-9.]+)", said)]
        assert len(losses) == 40
        assert sum(losses[-5:]) / 5 < losses[0] - 0.5
        assert f"rank {rank}: 0.2 M parameters averaged over xdp" in said


@pytest.mark.thorough
@pytest.mark.timeout(270)  # twice as patient
def test_a_checkpoint_is_resumed_by_another_number_of_ranks(
    tailbound_lab: Callable[..., Cluster], repository: Path, tmp_path: Path
) -> None:
    example, file = repository / "examples" / "train_resume.py", tmp_path / "resume.pt"
    first = in_lab(tailbound_lab(workers=2), [example, "--checkpoint", file, "--epochs", "1"])
    second = in_lab(tailbound_lab(workers=3), [example, "--checkpoint", file, "--epochs", "2"])
    (saved,) = {value for said in first for value in accuracies(said)}
    for said in second:
        assert "resumed after epoch 1" in said
        begun, ended = accuracies(said)
        assert begun == saved
        assert ended > 0.9


def test_an_example_under_torchrun(repository: Path) -> None:
    """Two ranks of one host, over loopback; interpreters that end cleanly after close() and destroy_process_group()."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, repository / "examples" / "train_ddp.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr
    assert done.stdout.count("over udp") == 2
    assert len(accuracies(done.stdout)) == 2
    assert min(accuracies(done.stdout)) > 0.9


# -- a rank that comes back under torchrun (clock-32) ------------------------------------------------------------------


BACK_WITHIN = 150.0


@pytest.mark.timeout(200)
@pytest.mark.thorough
def test_a_rank_that_is_killed_comes_back_under_torchrun(repository: Path, tmp_path: Path) -> None:
    """The command of the documentation: an agent a rank, static rendezvous; also for rank 0. Rule: clock-32."""
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
        until = time.monotonic() + BACK_WITHIN
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
