"""Training on the digits with every option: four replicas in one process, through the codec, without packets."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytestmark = pytest.mark.needs("torch", "sklearn")

RANKS, STEPS, PER_RANK = 4, 160, 32


def _average(bits: int, feedback: bool, numel: int) -> Any:
    """A function of (step, gradients by rank) that gives what rank 0 receives."""
    from tailbound.codec.feedback import read_back, write_residual
    from tailbound_lab.bench.local_job import LocalJob

    job = LocalJob(RANKS, numel, bits=bits)
    shape, residuals = job.shape, [np.zeros(numel, np.float32) for _ in range(RANKS)]

    def average(op: int, gradients: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        data = [g + r for g, r in zip(gradients, residuals, strict=True)] if feedback else gradients
        if job.exponents is None:
            job.cold(data, op)
        assert job.exponents is not None
        exponents = job.exponents.copy()
        out = job.step(op, data, receivers=[0]).outputs[0]
        for rank in range(RANKS) if feedback else ():
            packets, scales = job.packets_of(rank), job.scales_of(rank)._replace(exponents=exponents[rank])
            own = read_back(packets, np.zeros(shape.rows, np.int64), np.zeros(shape.rows, np.float32))
            write_residual(data[rank], own, scales, shape, job.coding(op, rank), residuals[rank], job.scratch)
        return out

    return average


@cache
def accuracy(bits: int = 32, *, feedback: bool = False) -> float:
    """Share of the digits of the test that are right after training with an average of ``bits`` (32: exact)."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    train_x, train_y = x[~test], y[~test]
    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    numel = sum(p.numel() for p in net.parameters())
    average = _average(bits, feedback, numel) if bits != 32 else lambda _, gradients: np.mean(gradients, axis=0)
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        gradients = []
        for _ in range(RANKS):
            at = torch.from_numpy(rng.integers(0, len(train_y), PER_RANK))
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(train_x[at]), train_y[at]).backward()
            gradients.append(np.concatenate([p.grad.numpy().ravel() for p in net.parameters() if p.grad is not None]))
        value = average(step, gradients)
        whole, start = torch.from_numpy(value.astype(np.float32)), 0
        for p in net.parameters():
            p.grad = whole[start : start + p.numel()].view_as(p)
            start += p.numel()
        optimizer.step()
    with torch.no_grad():
        return float((net(x[test]).argmax(1) == y[test]).float().mean())


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 16},
        {"bits": 8},
        {"bits": 8, "feedback": True},
        {"bits": (4, 8), "feedback": True},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()),
)
def test_as_accurate_as_an_exact_average(options: dict[str, Any]) -> None:
    exact = accuracy()
    assert exact > 0.94
    assert accuracy(**options) >= exact - 0.015  # 5 of 360 images
