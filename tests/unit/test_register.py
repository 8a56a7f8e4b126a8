"""What ``register`` refuses before anything is set up: each by name, with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tailbound.errors import ConfigError
from tailbound.metrics.flatten import flatten

pytest.importorskip("torch", reason="missing capability 'torch'")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tailbound.torch import GradScaler, batches, register
from tailbound.torch.register import _kept


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[DistributedDataParallel]:
    """A DDP model in a world of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arrange", "words"),
    [
        (register, "registered already: use the state"),
        (lambda m: m.register_comm_hook(None, allreduce_hook), "hook allreduce_hook already.*Accelerate"),
        (lambda m: setattr(m, "mixed_precision", object()), "use torch.autocast"),
        (lambda m: setattr(m, "_delay_all_reduce_params", [None]), "delay_all_reduce_named_params: .* remove it"),
        (lambda m: setattr(m.module.weight, "_in_backward_optimizers", []), r"call optimizer.step\(\)"),
    ],
)
def test_what_happens_beside_the_hook_is_refused(
    model: DistributedDataParallel, arrange: Callable[[Any], object], words: str
) -> None:
    """It was torch's "can only be called once", after the whole job had been set up."""
    arrange(model)
    with pytest.raises(ConfigError, match=words):
        register(model)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # as torch.compile makes it, in seconds
        (lambda m: (type("Compiled", (), {"_orig_mod": m})(),), r"not Compiled: .* pass model._orig_mod"),
        (lambda m: (m.module,), "not Linear$"),
        (lambda m: (m, torch.optim.lr_scheduler.ConstantLR(sgd(m))), "of type ConstantLR: give one torch.optim.Opt"),
        (lambda m: (m, torch.optim.SGD), "of type type: give one torch.optim.Optimizer"),
        (lambda m: (m, [sgd(m)]), "of type list: give one torch.optim.Optimizer"),
    ],
)
def test_what_is_no_model_or_no_optimizer_is_refused(
    model: DistributedDataParallel, given: Callable[[Any], tuple[Any, ...]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        register(*given(model))
    with pytest.raises(ConfigError, match=r"scaler= is of type int: give a torch.amp.GradScaler"):
        register(model, scaler=3)  # type: ignore[arg-type]
    for call in (lambda: GradScaler("cuda"), lambda: next(batches(model, [3]))):  # as torch's, and in another order
        with pytest.raises(ConfigError, match=r"give .*what register returned"):
            call()
    register(model, torch.optim.LBFGS(model.parameters()))  # a rank alone may make as many passes as it likes


def test_parameters_that_cannot_be_averaged_are_refused(model: DistributedDataParallel) -> None:
    """The first backward pass refused them; frozen ones are nobody's business."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"parameter 1.weight is complex64 on cpu: supported are float32, .*freeze"):
        register(DistributedDataParallel(net))
    net[1].requires_grad_(False)
    register(DistributedDataParallel(net))


def momentum(model: torch.nn.Module, *own: torch.nn.Parameter) -> torch.optim.Optimizer:
    """It has made a step."""
    made = torch.optim.SGD([*model.parameters(), *own], 0.1, momentum=0.9)
    for p in (*model.parameters(), *own):
        p.grad = torch.ones_like(p)
    made.step()
    return made


def looked_at(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An entry that was asked for once is there, and empty."""
    made = sgd(model)
    assert not made.state[model.module.weight]
    return made


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda _: None, 0),
        (sgd, 0),
        (momentum, 2),
        (looked_at, 0),
        (lambda m: momentum(m, torch.nn.Parameter(torch.ones(1))), 2),  # a rank may have more of its own than others
        (lambda m: SimpleNamespace(step=print, param_groups=[], state="ready"), 0),  # a wrapper's own
    ],
)
def test_what_an_optimizer_keeps_of_the_model_is_compared(
    model: DistributedDataParallel, make: Callable[[Any], Any], kept: int
) -> None:
    assert _kept(model, make(model)) == kept


def test_a_world_of_one_has_the_keys_of_any_other(model: DistributedDataParallel) -> None:
    state = register(model)
    model(torch.ones(3, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[3.0, 3.0]] * 2  # nothing is coded
    stats = state.stats()
    assert (stats["counters"], stats["delivered"], stats["history"], stats["ranks"]) == ({}, 1.0, [], 1)
    assert "tailbound_delivered_ratio" in {metric.name for metric in flatten(stats["status"])}
