"""Two hosts of two ranks in the lab: what crosses a host's cable, and two jobs on a host with an interface each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab_team import said_by
from tailbound_lab.lab.cluster import Cluster

pytestmark = [
    pytest.mark.needs("root", "netns", "torch"),
    pytest.mark.usefixtures("warm_start"),
    pytest.mark.timeout(150),  # what workers have to say must come out before
]


SHARING = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from tailbound_lab.bench.link import link_bytes
from tailbound.torch import register

ENTRIES, SETTLED, STEPS = 1 << 20, 4, 3
torch.set_num_threads(1)
dist.init_process_group("gloo")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(ENTRIES // 4) for _ in range(4))

    def forward(self, values):
        return sum((part * values[k]).sum() for k, part in enumerate(self.parts))

def carried(node_group):  # between barriers, as what is measured is in any benchmark
    net = DDP(Net(), bucket_cap_mb=1)
    random = torch.Generator().manual_seed(dist.get_rank())
    patient = {"patience": 26.0, "advanced": {"deadline_ms": (4000.0, 10_000.0)}}
    with register(net, node_group=node_group, datapath="udp", timeout=60.0, **patient) as state:
        for step in range(SETTLED + STEPS):
            if step == SETTLED:
                dist.barrier()
                before = link_bytes()
                dist.barrier()
            net(torch.randn(4, ENTRIES // 4, generator=random)).backward()
            net.zero_grad()
        dist.barrier()
        after, stats = link_bytes(), state.stats()
        dist.barrier()
    return {"bytes": (after - before) / STEPS, "delivered": stats["delivered"], "ranks": stats["ranks"]}

print("said " + json.dumps([carried("off"), carried("auto")]), flush=True)
dist.destroy_process_group()
"""


def test_a_host_sends_a_half_of_what_it_would_alone(tailbound_lab: Callable[..., Cluster], tmp_path: Path) -> None:
    """1/L of the bytes of a flat job, and 5 % at most on top."""
    lab, places = tailbound_lab(workers=2), 2
    script = tmp_path / "worker.py"
    script.write_text(SHARING)
    for said in said_by(lab, [[sys.executable, str(script)]] * 2 * places, 110, places=places):
        (line,) = (text for text in said.splitlines() if text.startswith("said "))
        flat, shared = json.loads(line.removeprefix("said "))
        assert (flat["ranks"], shared["ranks"]) == (2 * places, 2)
        assert flat["delivered"] == shared["delivered"] == 1.0
        assert shared["bytes"] <= 1.05 / places * flat["bytes"]
        assert shared["bytes"] > 2 * 2 * (1 << 20) * 0.5  # contributions and results, both ways, half of them own


SHARDED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from fsdp_jobs import gradient, grid, held, same, sharded
from tailbound.torch import fsdp
from torch_jobs import BOUND, PATIENT, nmse, passes

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = grid()
ours, theirs = sharded(mesh["shard"]), sharded(mesh)
interfaces = "data0,plain0"
state = fsdp.register(ours, mesh["replicate"], **{**PATIENT, "datapath": "xdp", "interface": interfaces})
for step in range(4):
    passes((ours, theirs), dist.get_rank(), step)
    assert nmse(gradient(ours), gradient(theirs)) <= 3 * BOUND
    assert same(held(ours, gradients=True), mesh)
stats = state.stats()
assert (stats["datapath"], stats["delivered"], stats["ranks"]) == ("xdp", 1.0, 2), stats
state.close()
dist.destroy_process_group()
"""


@pytest.mark.needs("bpf", "bcc", "headers")
def test_two_jobs_on_a_host_take_an_interface_each(tailbound_lab: Callable[..., Cluster], tmp_path: Path) -> None:
    lab = tailbound_lab(workers=2)
    script, tests = tmp_path / "worker.py", str(Path(__file__).parents[1] / "jobs")
    script.write_text(SHARDED)
    said_by(lab, [[sys.executable, str(script), tests]] * 4, 110, places=2)
