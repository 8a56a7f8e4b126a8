"""What ``register`` refuses before anything is set up: each by name, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest

from tailbound.errors import ConfigError
from tailbound.metrics.flatten import flatten

pytest.importorskip("torch", reason="missing capability 'torch'")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tailbound.torch import TailboundState, register


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[DistributedDataParallel]:
    """A DDP model in a world of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()


def test_a_model_that_has_a_hook_is_refused(model: DistributedDataParallel) -> None:
    """It was torch's "can only be called once", after the whole job had been set up."""
    registered = DistributedDataParallel(torch.nn.Linear(2, 2))
    register(registered)
    with pytest.raises(ConfigError, match="registered already: use the state"):
        register(registered)
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ConfigError, match=r"the communication hook allreduce_hook already.*Accelerate"):
        register(model)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mixed_precision", object(), "use torch.autocast"),
        ("_delay_all_reduce_params", [None], "delay_all_reduce_named_params: .* remove it"),
        ("module.weight._in_backward_optimizers", [], r"call optimizer.step\(\)"),
    ],
)
def test_what_happens_beside_the_hook_is_refused(
    model: DistributedDataParallel, name: str, value: Any, words: str
) -> None:
    *owner, last = name.split(".")
    setattr(reduce(getattr, owner, model), last, value)
    with pytest.raises(ConfigError, match=words):
        register(model)


def test_a_compiled_model_is_told_where_the_ddp_model_is(model: DistributedDataParallel) -> None:
    compiled: Any = type("OptimizedModule", (), {"_orig_mod": model})()  # as torch.compile makes it, in seconds
    with pytest.raises(ConfigError, match=r"not OptimizedModule: .* pass model._orig_mod"):
        register(compiled)
    with pytest.raises(ConfigError, match=r"not Linear$"):
        register(model.module)


def test_parameters_that_cannot_be_averaged_are_refused(model: DistributedDataParallel) -> None:
    """The first backward pass refused them; frozen ones are nobody's business."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"parameter 1.weight is complex64 on cpu: supported are float32, .*freeze"):
        register(DistributedDataParallel(net))
    net[1].requires_grad_(False)
    register(DistributedDataParallel(net))


def test_what_is_no_optimizer_is_refused(model: DistributedDataParallel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for given, kind in ((scheduler, "ConstantLR"), (torch.optim.SGD, "type"), ([optimizer], "list")):
        with pytest.raises(ConfigError, match=rf"of type {kind}: give one torch.optim.Optimizer"):
            register(model, given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"scaler= is of type int: give a torch.amp.GradScaler"):
        register(model, optimizer, scaler=3)  # type: ignore[arg-type]
    register(model, torch.optim.LBFGS(model.parameters()))  # a rank alone may make as many passes as it likes


def test_an_option_that_is_none_is_refused_with_the_nearest_one(model: DistributedDataParallel) -> None:
    for take in (lambda **given: register(model, **given), TailboundState):
        with pytest.raises(ConfigError, match=r"there is no option bit= here: did you mean bits\?"):
            take(bit=16)
        with pytest.raises(ConfigError, match=r"there is no option qqq= here: see docs/settings.md"):
            take(qqq=16)


def test_a_world_of_one_has_the_keys_of_any_other(model: DistributedDataParallel) -> None:
    """They were none: a script that reads them ended with a KeyError on everybody's own machine."""
    state = register(model)
    model(torch.ones(3, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[3.0, 3.0]] * 2  # nothing is coded
    stats = state.stats()
    assert (stats["counters"], stats["delivered"], stats["history"], stats["ranks"]) == ({}, 1.0, [], 1)
    assert "tailbound_delivered_ratio" in {metric.name for metric in flatten(stats["status"])}
