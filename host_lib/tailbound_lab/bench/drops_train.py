"""Training whose gradients are averaged by our codec in one process, with a share of the packets lost.

Every rank is a replica of its own: it has what it has received, and nobody brings replicas together again, which
Tailbound does by itself when results stay lost. Nothing that is lost is asked for. So this is what losses do at most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tailbound.codec.local import LocalJob
from tailbound_lab.bench import digits, text
from tailbound_lab.bench.losses import Pattern, lost, rates
from tailbound_lab.bench.nets import NETS
from tailbound_lab.bench.trainee import optimizer_of

#: Ranks, and codes of a row on a path of 1500 bytes.
RANKS, _WIDTH = 4, 1408
#: Steps at the end whose losses are averaged.
LAST = 20


class Course(NamedTuple):
    """How a model trains.

    ``net`` of ``NETS``, ``batch`` of a rank, learning ``rate``, and ``momentum`` of SGD (None: AdamW).
    """

    net: str
    steps: int
    batch: int
    rate: float
    momentum: float | None


COURSES = {
    "conv": Course("conv", steps=6 * (1437 // 64), batch=16, rate=0.02, momentum=0.9),
    "gpt": Course("small gpt", steps=120, batch=8, rate=3e-3, momentum=None),
}
_SOURCES = {"conv": digits.load, "gpt": text.load}


class Dropped:
    """Averages gradients with losses that are drawn from a seed."""

    def __init__(self, numel: int, pattern: Pattern, share: float, *, rotate: bool, seed: int) -> None:
        self._job = LocalJob(RANKS, numel, _WIDTH, rotate=rotate)
        self._rates = rates(pattern, share, RANKS)
        self._burst = pattern.burst
        self._rng = np.random.default_rng([seed, 77])
        self._op = 0

    def means(self, gradients: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """What every rank has of the mean of ``gradients``, f32[numel] by rank."""
        self._op += 1
        first, second = (self._mask(each) for each in self._rates)
        step = self._job.step(self._op, gradients, lost_contributions=first, lost_results=second)
        return [step.outputs[rank] for rank in range(RANKS)]

    def _mask(self, by_link: list[float]) -> NDArray[np.bool_]:
        """bool[RANKS, T]: rows that are lost; packets are drawn in sending order."""
        count = self._job.shape.rows
        mask = np.zeros((RANKS, count), bool)
        for link, rate in enumerate(by_link):
            mask[link, self._job.placement.row_at] = lost(self._rng, 1, count, rate, self._burst)[0]
        return mask


def train(model: str, pattern: Pattern, share: float, *, rotate: bool, seed: int, steps: int = 0) -> dict[str, Any]:
    """One training of ``COURSES[model]``.

    Args:
        model: which.
        pattern, share: of the losses; ``share`` of all packets, whatever the pattern.
        rotate: whether groups of rows are rotated.
        seed: of data, weights and losses.
        steps: instead of the course's own.

    Returns:
        A row; ``loss``: of training, mean of the ``LAST`` steps and all ranks; ``test_loss`` and ``accuracy``: of the
        worst replica after the last step; ``drift``: distance of the replica that is furthest from the mean of all,
        over the length of that mean.
    """
    torch.set_num_threads(1)
    course = COURSES[model]
    steps = steps or course.steps
    data = _SOURCES[model](seed)
    inputs, labels = torch.from_numpy(data.train_inputs), torch.from_numpy(data.train_labels)
    replicas = [NETS[course.net](seed) for _ in range(RANKS)]
    optimizers = [optimizer_of(net, course.rate, course.momentum) for net in replicas]
    criterion = nn.CrossEntropyLoss()
    numel = sum(p.numel() for p in replicas[0].parameters())
    dropped = Dropped(numel, pattern, share, rotate=rotate, seed=seed)
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for chosen in digits.batches(len(labels), RANKS, course.batch, epoch, seed):
            gradients, told = [], []
            for rank, net in enumerate(replicas):
                at = torch.from_numpy(chosen[rank])
                optimizers[rank].zero_grad()
                loss = criterion(net(inputs[at]), labels[at])
                loss.backward()
                told.append(loss.item())
                gradients.append(_flat(net))
            for rank, mean in enumerate(dropped.means(gradients)):
                _give(replicas[rank], mean)
                optimizers[rank].step()
            losses.append(float(np.mean(told)))
            if len(losses) == steps:
                break
        epoch += 1
    judged = [_judge(net, torch.from_numpy(data.test_inputs), torch.from_numpy(data.test_labels)) for net in replicas]
    return {
        "model": model, "pattern": pattern.name, "share": share, "rotated": rotate, "seed": seed, "steps": steps,
        "loss": float(np.mean(losses[-LAST:])), "test_loss": max(loss for loss, _ in judged),
        "accuracy": min(right for _, right in judged), "drift": _drift(replicas), "step_loss": losses,
    }  # fmt: skip


def _flat(net: nn.Module) -> NDArray[np.float32]:
    """The gradients of ``net``, f32[numel], in the order of its parameters."""
    found: NDArray[np.float32] = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).numpy()
    return found


def _give(net: nn.Module, mean: NDArray[np.float32]) -> None:
    """Makes ``mean``, f32[numel], the gradients of ``net``."""
    whole, begin = torch.from_numpy(mean), 0
    for p in net.parameters():
        p.grad = whole[begin : begin + p.numel()].view_as(p)
        begin += p.numel()


@torch.no_grad()
def _judge(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Loss and share of right answers."""
    told = net(inputs)
    return nn.functional.cross_entropy(told, labels).item(), (told.argmax(1) == labels).float().mean().item()


@torch.no_grad()
def _drift(replicas: list[nn.Module]) -> float:
    weights = torch.stack([torch.cat([p.flatten() for p in net.parameters()]) for net in replicas])
    mean = weights.mean(0)
    return float(((weights - mean).norm(dim=1).max() / mean.norm()).item())
