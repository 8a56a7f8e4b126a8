"""What PyTorch does not promise and DDP hooks need of it (``torch/compat.py``): a version without it is named here."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._current_graph_task_id",
        "torch._C._distributed_c10d.GradBucket",
        "torch.amp.GradScaler._check_inf_per_device",
        "torch.amp.GradScaler._lazy_init_scale_growth_tracker",
        "torch.amp.GradScaler.step.__code__",
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.ProcessGroup._set_group_name",
        "torch.distributed.distributed_c10d._get_default_group",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch._C._distributed_c10d.Reducer._get_local_used_map",
    ],
)
def test_private_names_are_there(name: str) -> None:
    import torch
    import torch.distributed

    found: object = torch
    for part in name.split(".")[1:]:
        assert hasattr(found, part), f"torch {torch.__version__} has no {name}: adapt torch/compat.py"
        found = getattr(found, part)


def test_what_objects_keep_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

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
