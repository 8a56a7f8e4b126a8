"""The PyTorch hook through the lab's summing switch: replicas stay equal, and gradients are those of Gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab_team import all_said
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_jobs import PATIENT, backward, digest, gradient, model, nmse, same_everywhere
from tailbound.torch import register

torch.set_num_threads(1)
dist.init_process_group("gloo")
ours, theirs = DDP(model()), DDP(model())
state = register(ours, **{**PATIENT, "datapath": "switch", "ring_mib": 16.0})
assert state.communicator.datapath == "switch-xdp", state.communicator.datapath
worst = 0.0
for step in range(6):
    for net in (ours, theirs):
        net.zero_grad()
        backward(net, dist.get_rank(), step)
    assert same_everywhere(digest(ours))
    worst = max(worst, nmse(gradient(ours), gradient(theirs)))
assert worst < 2e-2, worst  # mean codes share the contributions' scale, with headroom for growth
assert state.stats()["delivered"] == 1.0
assert state.stats()["ledger"]["results"]["2"]["taken"] > 0
state.close()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.usefixtures("warm_start")
@pytest.mark.timeout(150)  # what workers have to say must come out before
def test_replicas_are_equal_and_gradients_those_of_gloo(tailbound_lab: Callable[..., Cluster], tmp_path: Path) -> None:
    lab = tailbound_lab(workers=2, switch=True)
    script, tests = tmp_path / "worker.py", str(Path(__file__).parents[1] / "jobs")
    script.write_text(WORKER)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [lab.popen(rank, [sys.executable, str(script), tests], **pipes) for rank in range(2)]
    all_said(workers, 110)
