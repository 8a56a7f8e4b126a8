"""Two hosts of two ranks: two jobs on a host at once, each over XDP on an interface of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab_team import all_said
from tailbound_lab.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch")

WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from fsdp_jobs import gradient, grid, held, same, sharded
from tailbound.torch import fsdp
from torch_jobs import BOUND, PATIENT, backward, nmse

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = grid()
ours, theirs = sharded(mesh["shard"]), sharded(mesh)
interfaces = "data0,plain0"
state = fsdp.register(ours, mesh["replicate"], **{**PATIENT, "datapath": "xdp", "interface": interfaces})
for step in range(4):
    for net in (ours, theirs):
        net.zero_grad()
        backward(net, dist.get_rank(), step)
    assert nmse(gradient(ours), gradient(theirs)) <= 3 * BOUND
    assert same(held(ours, gradients=True), mesh)
stats = state.stats()
assert (stats["datapath"], stats["delivered"], stats["ranks"]) == ("xdp", 1.0, 2), stats
state.close()
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("warm_start")
@pytest.mark.timeout(150)  # what workers have to say must come out before
def test_two_jobs_on_a_host_take_an_interface_each(tailbound_lab: Callable[..., Cluster], tmp_path: Path) -> None:
    lab = tailbound_lab(workers=2)
    script, tests = tmp_path / "worker.py", str(Path(__file__).parents[1] / "jobs")
    script.write_text(WORKER)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = []
    for rank in range(4):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        ranks.append(lab.popen(rank // 2, [sys.executable, str(script), tests], env=place, **pipes))
    all_said(ranks, 110)
