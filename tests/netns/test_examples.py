"""The examples as a user runs them: in the lab over XDP, and under torchrun on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab_team import said_by
from support import await_that
from tailbound_lab.lab.cluster import Cluster

pytestmark = [
    pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch"),
    pytest.mark.timeout(270),  # what workers have to say must come out before
]

Make = Callable[..., Cluster]
#: Seconds that an example may take on a loaded machine.
PATIENCE = 110.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def in_lab(tailbound_lab: Make, repository: Path, warm_start: None) -> Callable[..., list[str]]:
    """``(example, ..., workers=2)`` -> what each worker says that runs it; all of them end well."""

    def call(example: str, *words: str, workers: int = 2) -> list[str]:
        command = [sys.executable, str(repository / "examples" / example), *words]
        return said_by(tailbound_lab(workers=workers), [command] * workers, PATIENCE)

    return call


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([0-9.]+)", text)]


@pytest.mark.parametrize(
    ("example", "words"),
    [
        # every day one in the lab, and one under torchrun; what the others add to them, they add in PyTorch
        pytest.param("train_fp16.py", ["over xdp"]),
        *(
            pytest.param(name, ["over xdp", "of the rows delivered"], marks=[pytest.mark.thorough, *marks])
            for name, *marks in (
                ("train_ddp.py",),
                ("train_hsdp.py",),
                ("train_nodes.py",),
                ("train_lightning.py", pytest.mark.needs("lightning")),
                ("train_accelerate.py", pytest.mark.needs("accelerate")),
            )
        ),
        pytest.param("train_cuda.py --device cpu", ["coded by the host"], marks=pytest.mark.thorough),
    ],
)
def test_examples_run_in_the_lab(in_lab: Callable[..., list[str]], example: str, words: list[str]) -> None:
    """All ranks learn. A scale of half precision begins far too large: each rank lowers its own before that."""
    for rank, said in enumerate(in_lab(*example.split())):
        assert f"rank {rank}: accuracy" in said
        assert min(accuracies(said)) > 0.9
        assert all(word in said for word in words), said
        scales = re.findall(r"scale ([0-9.e+]+), lowered ([0-9]+) times", said)
        assert len(scales) == ("fp16" in example)
        for scale, lowered in scales:
            assert 0 < int(lowered) < 24
            assert float(scale) == 2**24 / 2 ** int(lowered)


@pytest.mark.thorough
def test_a_language_model_learns_in_the_lab(in_lab: Callable[..., list[str]]) -> None:
    """It accumulates gradients over two passes, in bf16; averages are Tailbound's, over XDP."""
    for rank, said in enumerate(in_lab("train_gpt.py", "--small", "--steps", "40")):
        losses = [float(loss) for loss in re.findall(rf"rank {rank}: step [0-9]+: loss ([0-9.]+)", said)]
        assert len(losses) == 40
        assert sum(losses[-5:]) / 5 < losses[0] - 0.5
        assert f"rank {rank}: 0.2 M parameters averaged over xdp" in said


@pytest.mark.thorough
def test_a_checkpoint_is_resumed_by_another_number_of_ranks(in_lab: Callable[..., list[str]], tmp_path: Path) -> None:
    command = "train_resume.py", "--checkpoint", str(tmp_path / "resume.pt"), "--epochs"
    (saved,) = {value for said in in_lab(*command, "1") for value in accuracies(said)}
    for said in in_lab(*command, "2", workers=3):
        assert "resumed after epoch 1" in said
        begun, ended = accuracies(said)
        assert begun == saved
        assert ended > 0.9


def test_an_example_under_torchrun(repository: Path) -> None:
    """Two ranks of one host, over loopback; interpreters that end cleanly after close() and destroy_process_group()."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", repository / "examples" / "train_ddp.py"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr
    assert done.stdout.count("over udp") == 2
    assert len(accuracies(done.stdout)) == 2
    assert min(accuracies(done.stdout)) > 0.9


@pytest.mark.thorough
def test_a_rank_that_is_killed_comes_back_under_torchrun(repository: Path, tmp_path: Path) -> None:
    """The command of the documentation: an agent a rank, static rendezvous; also for rank 0. Rule: clock-32."""
    command = [*TORCHRUN, "--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", "29523"]
    command += ["--nnodes", "3", "--nproc-per-node", "1", "--max-restarts", "2", "--node-rank"]
    example = [str(repository / "examples" / "train_elastic.py"), "--checkpoint", str(tmp_path / "c.pt")]
    logs, agents = [tmp_path / f"{rank}.log" for rank in range(3)], list[subprocess.Popen[bytes]]()
    with contextlib.ExitStack() as stack:
        for rank, log in enumerate(logs):
            words = [*command, str(rank), *example, "--steps", "1500"]
            file = stack.enter_context(log.open("w"))
            agents += [subprocess.Popen(words, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT)]
            stack.callback(agents[-1].wait, 30)
            stack.callback(agents[-1].terminate)
        await_that(lambda: all("step 100," in log.read_text() for log in logs), "all have trained for a while", 150.0)
        (pid,) = re.findall(r"rank 0: pid (\d+), begins", logs[0].read_text())
        os.kill(int(pid), signal.SIGKILL)
        codes = [agent.wait(150.0) for agent in agents]
    said = [log.read_text() for log in logs]
    assert codes == [0, 0, 0], said
    assert "has come back" in said[0]
    assert [text.count("begins at step 0") for text in said] == [1, 1, 1]
    assert all("step 1500, all are equal" in text for text in said)
