"""The backend ``tailbound`` of ``torch.distributed`` in real processes; most of its jobs are in ``test_jobs``."""

from __future__ import annotations

import os
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from processes import Run, ended

pytestmark = pytest.mark.needs("torch")


def test_groups_have_jobs_of_their_own_and_may_be_made_again(run: Run, tmp_path: Path) -> None:
    run("backend_jobs.groups", 3, str(tmp_path / "second"))


class Communicator:
    """Takes a bucket in a thread, as the transport does, and changes nothing."""

    def launch(self, bucket, data, out, *, last, done, prepare, handling) -> None:  # type: ignore[no-untyped-def]
        def run() -> None:
            (prepare or (lambda: None))()
            done(SimpleNamespace(error=None))

        self.address, self.dtype = out.ctypes.data, handling.dtype
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


@pytest.mark.parametrize("how", ["as it is", "transposed", "made within inference mode", "before inference mode"])
@pytest.mark.parametrize(
    ("kind", "factor", "taken"),
    [
        *((kind, factor, True) for kind in ("float32", "bfloat16", "float16") for factor in (1, 4)),
        ("float32", 3, True),
        ("bfloat16", 3, False),  # two roundings
        ("float64", 1, False),
    ],
)
def test_what_the_codec_takes_goes_through_no_float32_memory(kind: str, factor: int, taken: bool, how: str) -> None:
    """The transport's thread is in no inference mode: it ended where it read, and ``wait`` raised where it wrote."""
    import torch

    from tailbound.torch.backend import launch

    communicator, errors = Communicator(), list[BaseException | None]()
    value = torch.arange(12).to(getattr(torch, kind))
    with torch.inference_mode("inference" in how):
        value = {"transposed": value.view(3, 4).t, "made within inference mode": value.clone}.get(how, lambda: value)()
        was = value.clone()
        launch(communicator, value, 0, True, factor, lambda _, error: errors.append(error))  # type: ignore[arg-type]
    assert errors == [None]
    assert communicator.dtype == kind
    assert value.tolist() == (was * factor).tolist()
    assert (communicator.address == value.data_ptr()) == (taken and how != "transposed")


_SCRIPT = """
import sys
import torch
import torch.distributed as dist
assert "tailbound" in dist.Backend.backend_list, "import torch has not registered the backend"
assert not any(name.startswith(("tailbound.torch", "numba")) for name in sys.modules), "import torch has become dear"
dist.init_process_group("tailbound")
import tailbound.torch
value = torch.full((4096,), 1.0 + dist.get_rank())
with tailbound.torch.bounded():
    dist.all_reduce(value)
assert value.sub(3).square().mean() / 9 < 4e-3, value
dist.all_reduce(exact := torch.ones(3))
assert exact.tolist() == [2, 2, 2]
net = torch.nn.Linear(64, 64)
net = torch.nn.parallel.DistributedDataParallel(net, process_group=dist.new_group(backend="gloo"))
state = tailbound.torch.register(net, datapath="udp", advanced={"deadline_ms": (2000, 2000)}, ring_mib=1)
for step in range(3):
    net.zero_grad()
    net(torch.ones(2, 64)).sum().backward()
assert state.stats()["counters"]["ops"] == 3
if dist.get_rank() == 0:
    dist.destroy_process_group()
print("rank", exact.numel() and value.numel(), "is through", flush=True)
"""


def test_torchrun_knows_the_backend_without_an_import(repository: Path, tmp_path: Path) -> None:
    """The entry point of this checkout, whatever is installed; and interpreters that end cleanly.

    Neither rank closes what it has registered, and one ends without ``destroy_process_group``; with both:
    netns/test_examples.
    """
    groups = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["entry-points"]
    points = groups["torch.backends"]
    info = tmp_path / "site" / "tailbound_here-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tailbound-here\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
    )
    (tmp_path / "train.py").write_text(_SCRIPT)
    path = os.pathsep.join([str(repository / "host_lib"), str(info.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONWARNINGS"] = "default"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out, err = ended([*command, str(tmp_path / "train.py")], environment)
    assert out.count("is through") == 2
    assert "Traceback" not in err
    assert "terminate" not in err


#: Of PyTorch's own tests: one of every kind, the cheap ones.
SUITE = [
    "test_all_reduce_sum$", "test_all_reduce_coalesced_max_complex_unsupported", "test_reduce_sum$", "test_barrier$",
    "test_broadcast$", "test_all_gather$", "test_all_gather_object_default_pg", "test_scatter$", "test_gather$",
    "test_send_recv$", "test_DistributedDataParallelCPU$", "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_logging_data_cpu",
]  # fmt: skip


@pytest.mark.needs("expecttest")
def test_pytorchs_own_tests_pass(repository: Path) -> None:
    """None of these may be skipped; ``distributed_suite.py`` runs all of them by hand."""
    script = repository / "tests" / "torch" / "distributed_suite.py"
    path = os.pathsep.join([str(repository / "host_lib"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "BACKEND": "tailbound", "WORLD_SIZE": "2"}
    _, err = ended([sys.executable, str(script), *SUITE], environment)
    assert f"Ran {len(SUITE)} tests" in err, err
    assert err.rstrip().endswith("\nOK"), err
