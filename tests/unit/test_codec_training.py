"""What the codec does to the gradients of a small GPT in training: no tensor becomes noise, and the loss falls as well.

Four ranks through the codec in one process (``bench.local_job``), by default options: 8 bits, tensors known.

Rules: codec-5, codec-16, codec-17.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound_lab.bench.local_job import LocalJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
RANKS, PIECES, PASSES, LENGTH = 4, 8, 2, 64
#: What no tensor may exceed in any step, the whole on average, and by how much of it the loss may be another.
WORST, WHOLE, LOSS = 5e-3, 4e-4, 5e-3


class Training:
    """A run of ``steps`` from ``seed``, with the ``example``'s model, text and rates.

    ``worst`` f64[steps] and ``whole`` f64[steps]: NMSE of the worst tensor and of all; ``loss``: the mean of all.
    """

    def __init__(self, example: Any, text: Any, seed: int, steps: int, *, coded: bool) -> None:
        import torch

        torch.manual_seed(seed)
        self._torch, self._text, self._seed, self._example = torch, text, seed, example
        self._model = example.GPT(example.SMALL)
        self._parameters = list(self._model.parameters())[::-1]  # as DDP fills its buckets
        sizes = tuple(p.numel() for p in self._parameters)
        self._ends, job = np.cumsum([0, *sizes]), LocalJob(RANKS, sum(sizes), tensors=sizes)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
        places = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(RANKS)]
        self.worst, self.whole, losses = np.zeros(steps), np.zeros(steps), np.zeros(steps)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 6e-4 * min(1.0, (step + 1) / 20)
            gradients = []
            for generator in places:
                gradient, loss = self._backward(generator)
                gradients.append(gradient)
                losses[step] += loss / RANKS
            exact = np.mean([x.astype(np.float64) for x in gradients], axis=0)
            mean = job.step(step, gradients, receivers=[0]).outputs[0] if coded else exact.astype(np.float32)
            off, size = (mean - exact) ** 2, exact**2
            parts = [slice(*ends) for ends in itertools.pairwise(self._ends)]
            self.worst[step] = max(off[part].sum() / size[part].sum() for part in parts)
            self.whole[step] = off.sum() / size.sum()
            for p, part in zip(self._parameters, parts, strict=True):
                p.grad = torch.from_numpy(mean[part].reshape(p.shape).copy())
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
        self.loss = float(losses.mean())

    def _backward(self, places: Any) -> tuple[NDArray[np.float32], float]:
        """The gradient of one rank, and its loss."""
        torch, total = self._torch, 0.0
        self._model.zero_grad()
        for _ in range(PASSES):
            starts = torch.randint(len(self._text) - LENGTH, (PIECES, 1), generator=places)
            words = self._text[starts + torch.arange(LENGTH + 1)]
            with torch.autocast("cpu", torch.bfloat16):
                loss = self._model(words[:, :-1], words[:, 1:]) / PASSES
            loss.backward()
            total += loss.item()
        return torch.cat([p.grad.flatten() for p in self._parameters]).numpy().copy(), total


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("torch", reason="missing capability 'torch': training")
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(example: Any) -> Any:
    return example.text(example.SMALL.tokens)


def test_no_tensor_is_noise_from_the_first_step_on(example: Any, text: Any) -> None:
    ours = Training(example, text, 0, 12, coded=True)
    assert ours.worst.max() < WORST
    assert ours.whole.mean() < WHOLE


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_no_tensor_is_noise_in_any_step_and_the_loss_is_that_of_exact_means(example: Any, text: Any, seed: int) -> None:
    ours, exact = (Training(example, text, seed, 200, coded=coded) for coded in (True, False))
    assert ours.worst.max() < WORST
    assert ours.whole.mean() < WHOLE
    assert ours.loss == pytest.approx(exact.loss, rel=LOSS)
