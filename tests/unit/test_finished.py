"""Averages of finished steps come to ``.grad`` as DDP itself would have put them there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tailbound.torch.compat import used_by
from tailbound.torch.finished import Layout, gradients


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def computed(net: Any, data: Any, **options: Any) -> tuple[Any, Any, list[Any]]:
    """DDP after some steps: the model, the layout that its hook has noted, and the averages of the last step."""
    ddp, layout, kept = DistributedDataParallel(net, **options), Layout(), dict[int, Any]()

    def hook(_: Any, bucket: Any) -> Any:
        layout.note(bucket)
        kept[bucket.index()] = bucket.buffer().clone()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # DDP takes them for types
    ddp.register_comm_hook(None, hook)
    for _ in range(6):
        kept.clear()
        ddp.zero_grad()
        ddp(data).square().sum().backward()
    return ddp, layout, [kept[index] for index in sorted(kept)]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("form", ["contiguous_format", "channels_last"])
def test_a_gradient_lies_in_its_bucket_as_its_parameter_does(form: str, view: bool) -> None:
    """In ``channels_last`` a convolution got the gradients of its other weights."""
    torch.manual_seed(0)
    memory = getattr(torch, form)
    net: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    net.to(memory_format=memory)
    data = torch.randn(5, 3, 4, 4).to(memory_format=memory)
    _, layout, averages = computed(net, data, gradient_as_bucket_view=view)
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with gradients(layout.step(), averages):
        for p, own in zip(net.parameters(), wanted, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, own)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("view", [False, True])
def test_what_a_static_graph_does_not_use_gets_no_gradient(view: bool) -> None:
    """AdamW let it decay on a rank that applied steps, and on no other."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, data: Any) -> Any:
            return self.last(self.first(data))

    torch.manual_seed(0)
    net = Net()
    ddp, fresh = DistributedDataParallel(net, static_graph=True), Layout()
    fresh.follow(ddp.parameters(), used_by(ddp))
    assert fresh.unused() == set()  # before a first step DDP has no answer, but memory of anything
    ddp, layout, averages = computed(net, torch.randn(4, 3), static_graph=True, gradient_as_bucket_view=view)
    layout.follow(net.parameters(), used_by(ddp))
    assert layout.unused() == {id(p) for p in net.unused.parameters()}
    with gradients(layout.step(), averages, layout.unused()):
        assert [name for name, p in net.named_parameters() if p.grad is None] == ["unused.weight", "unused.bias"]
    del ddp
    assert layout.unused() == set()  # of a model that is gone
