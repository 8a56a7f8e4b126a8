"""What PyTorch calls of us, and what we need of it that it does not promise: a version without it is named here."""

from __future__ import annotations

import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from tailbound.autoload import register_backend

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("_C", "_current_graph_task_id"),
        ("_C._distributed_c10d", "GradBucket Reducer._get_local_used_map"),
        ("amp.GradScaler", "_check_inf_per_device _lazy_init_scale_growth_tracker step.__code__"),
        ("autograd.Variable._execution_engine", "queue_callback"),
        ("distributed.ProcessGroup", "_get_backend _register_backend _set_default_backend _set_group_name"),
        ("distributed.ProcessGroupGloo", "_set_sequence_number_for_group"),
        ("distributed.distributed_c10d", "_get_default_group _get_default_store"),
    ],
)
def test_private_names_are_there(where: str, names: str) -> None:
    for name in names.split():
        try:
            attrgetter(f"{where}.{name}")(torch)
        except AttributeError as error:
            pytest.fail(f"torch {torch.__version__} has no torch.{where}.{name}: adapt torch/compat.py ({error})")


def test_what_objects_keep_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        names = ("_comm_hooks", "_delay_all_reduce_params", "_join_config", "bucket_bytes_cap", "logger", "reducer")
        lacking = [name for name in names if not hasattr(model, name)]
        lacking += [name for name in ("_buffers", "_non_persistent_buffers_set") if not hasattr(model.module, name)]
        scaler, weight = torch.amp.GradScaler("cpu"), next(model.parameters())
        weight.grad = torch.zeros_like(weight)
        scaler.scale(weight.sum())
        scaler.unscale_(optimizer := torch.optim.SGD([weight], 0.1))
        kept = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
        lacking += [name for name in ("found_inf_per_device",) if name not in kept]
        assert not lacking, f"torch {torch.__version__} has no {lacking}: adapt torch/compat.py"
    finally:
        dist.destroy_process_group()


def test_a_torch_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    register_backend()


#: Nothing is writable, as for a service account with a read-only installation; the temporary folder is.
BARE = """
import os, sys, tempfile
os.access = lambda *_, **__: False
import torch
import tailbound.autoload
assert "NUMBA_CACHE_DIR" not in os.environ
ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("tailbound", "numba"))
assert ours == ["tailbound", "tailbound.autoload"], ours
assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tailbound")]
"""
#: Whoever compiles finds a place all the same.
COMPILING = """
import tailbound.wire.jit
import numba.core.config
assert numba.core.config.CACHE_DIR == os.path.join(tempfile.gettempdir(), f"tailbound-numba-{os.geteuid()}")
"""


def test_importing_torch_does_nothing_but_register(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")} | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", BARE + COMPILING], env=env, check=True)
