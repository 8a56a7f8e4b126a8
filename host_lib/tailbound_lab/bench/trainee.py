"""One replica of a model in training, whatever keeps it equal to the others', and its clock."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tailbound.torch import TailboundState

#: For the environment of workers: gradients are allocated anew in every step, and that glibc maps and unmaps them each
#: time takes as long as backward.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}

#: Puts a variant under a model: what to call for the forward pass, and Tailbound's state if it has one.
Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, TailboundState | None]]


def optimizer_of(net: nn.Module, rate: float, momentum: float | None) -> torch.optim.Optimizer:
    """SGD with ``momentum``, or AdamW where that is None."""
    if momentum is None:
        return torch.optim.AdamW(net.parameters(), lr=rate, fused=True)
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum, fused=True)


class Trainee:
    """A replica in training by SGD or AdamW.

    Args:
        net: the model, with the same weights on all ranks; its output has classes in dimension 1.
        rate: learning rate.
        momentum: of SGD; None: AdamW (Loshchilov and Hutter, 2019) with torch's own settings.
        delay: seconds that this rank computes longer in every step.
        device: that it trains on. A step ends when that is through.

    Attributes:
        loss: of this rank's batch in the last step, before it.
    """

    def __init__(
        self, net: nn.Module, wrap: Wrap, *, rate: float, momentum: float | None = 0.9, delay: float = 0.0,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self.net, self._delay, self._device = net.to(device), delay, torch.device(device)
        self._optimizer = optimizer_of(net, rate, momentum)
        self._model, self.state = wrap(net, self._optimizer)
        self._loss = nn.CrossEntropyLoss()
        self.loss = math.nan

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """One training step; its seconds."""
        images, labels = images.to(self._device), labels.to(self._device)
        begin = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._model(images), labels)
        if self._delay:
            time.sleep(self._delay)
        loss.backward()
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        taken = time.perf_counter() - begin
        self.loss = loss.item()
        return taken

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Steps within change neither the weights nor the optimizer: everything is as in a real step but its effect."""
        before = copy.deepcopy(self._optimizer.state_dict())
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        try:
            yield
        finally:
            self._optimizer.load_state_dict(before)

    @torch.no_grad()
    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Fraction of right answers of this replica."""
        right = self.net(images.to(self._device)).argmax(1) == labels.to(self._device)
        return float(right.float().mean())

    def weights(self) -> NDArray[np.float32]:
        """All parameters, f32[n]."""
        return np.concatenate([p.detach().cpu().numpy().ravel() for p in self.net.parameters()])

    def gradient_bytes(self) -> int:
        """Bytes of a step's gradients."""
        return sum(p.numel() * p.element_size() for p in self.net.parameters() if p.requires_grad)
