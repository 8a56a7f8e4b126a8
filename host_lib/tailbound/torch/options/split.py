"""Averages that are applied layer by layer, each before the layer's next forward pass.

After DeAR (Zhang et al., ICDCS 2023): the hook does not wait for the average, and ``optimizer.step()`` is put off.
Before a module's next forward pass, the buckets that hold its parameters are waited for, and the optimizer steps these
parameters alone. Nothing is stale: every parameter has its update before it is used. What is won is everything between
the end of a backward pass and the use of a parameter, in which the second half (results) may still be on the wire.

What it rests on, and what follows:

- Optimizers leave parameters alone whose ``.grad`` is None, so a step is put off by taking the gradients away, and made
  later with those of a few buckets in place; learning rates and the like are those of the call that was put off.
- There is no moment at which all gradients are there: clipping by a total norm, or a GradScaler, cannot be had.
- A module's parameters are updated before *its* forward pass. For modules of ``torch.nn`` other than containers those
  of their children count as their own (MultiheadAttention reads the weights of a child without calling it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tailbound.collective.op import Outcome
from tailbound.torch.finished import Bucket, Layout, gradients
from tailbound.torch.options.delayed import SETTLING, Pending, ready

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Split:
    """Averages that wait for the forward pass of what they belong to.

    Args:
        layout: what DDP's buckets are made of.
        applied: told of what has become of an average when it is applied, and whether it is the last of its step.
    """

    def __init__(self, layout: Layout, applied: Callable[[Outcome, bool], None]) -> None:
        self._layout, self._applied = layout, applied
        self._step = 0
        self._waiting: dict[int, Pending] = {}
        self._where: dict[int, int] = {}  # id of a parameter: its bucket
        self._buckets: dict[int, Bucket] = {}
        self._put_off: dict[torch.optim.Optimizer, list[dict[str, Any]]] = {}
        self._stepping = False
        #: averages that were applied before a forward pass of their own, and when all were asked for
        self.by_forward = self.by_request = 0

    def attach(self, module: nn.Module) -> list[Any]:
        """Puts a hook before the forward pass of every part of ``module``; returns the handles."""
        return [
            part.register_forward_pre_hook(lambda _, __, owned=owned: self._needs(owned))
            for part, owned in _parts(module)
        ]

    def hold(self, new: Pending) -> torch.futures.Future[torch.Tensor]:
        """What the hook returns now that ``new`` is on its way: ``new`` itself while DDP settles, else the gradient."""
        settling = self._step < SETTLING
        self._step += new.last
        if settling:
            return new.future.then(lambda completed: self._hand_out(new, completed.value()))
        self._waiting[new.index] = new
        return ready(new.tensor)

    def begin(self, index: int) -> None:
        """Bucket ``index`` is about to be averaged anew: its memory must have been read."""
        if index in self._waiting:  # its parameters were used without a forward pass, or not at all
            self.finish()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` has been called: puts it off for all parameters whose averages are waited for."""
        if self._stepping or not self._waiting:
            return
        self._learn()
        for parameter in _parameters(optimizer):
            if self._where.get(id(parameter), -1) in self._waiting:
                parameter.grad = None
        self._put_off[optimizer] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    def finish(self) -> None:
        """Applies everything that is put off: before anything but a forward pass looks at the parameters."""
        for index in sorted(self._waiting):
            self._apply(index)
            self.by_request += 1

    def forget(self) -> None:
        """Drops what was to be applied: the parameters are others now."""
        self._waiting.clear()

    @torch.compiler.disable
    def _needs(self, owned: Iterable[nn.Parameter]) -> None:
        if not self._waiting or not self._put_off:
            return
        for index in sorted({self._where.get(id(parameter), -1) for parameter in owned}):
            if index in self._waiting:
                self._apply(index)
                self.by_forward += 1

    def _learn(self) -> None:
        if not self._buckets:
            self._buckets = {bucket.index: bucket for bucket in self._layout.step()}
            self._where = {id(s.parameter): b.index for b in self._buckets.values() for s in b.shares}

    def _apply(self, index: int) -> None:
        """Waits for the average of a bucket, and lets the optimizers step its parameters."""
        pending = self._waiting.pop(index)
        average = self._hand_out(pending, pending.future.wait())
        self._stepping = True
        try:
            with gradients([self._buckets[index]], [average]):
                for optimizer, settings in self._put_off.items():
                    _step(optimizer, settings)
        finally:
            self._stepping = False
        if not self._waiting:
            self._put_off.clear()

    def _hand_out(self, pending: Pending, average: torch.Tensor) -> torch.Tensor:
        self._applied(pending.outcome, pending.last)
        return average


def _step(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """A step with the ``settings`` of each group, which may have changed since."""
    now = [{k: group[k] for k in before} for group, before in zip(optimizer.param_groups, settings, strict=True)]
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)
    try:
        with torch.inference_mode(False):  # state made there could not be changed outside
            optimizer.step()
    finally:
        for group, later in zip(optimizer.param_groups, now, strict=True):
            group.update(later)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _parts(module: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules that read parameters in their forward pass, with those they read."""
    whole = type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, _CONTAINERS)
    owned = list(module.parameters(recurse=whole))
    parts = [(module, owned)] if owned else []
    return parts if whole else parts + [part for child in module.children() for part in _parts(child)]
