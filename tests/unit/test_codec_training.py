"""What the codec does to the gradients of a small GPT in training: no tensor becomes noise, and the loss falls as well.

Four ranks through the codec in one process (``bench.local_job``), by default options: 8 bits, tensors known.

Rules: codec-5, codec-16, codec-17.
"""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support import nmse
from tailbound_lab.bench.local_job import LocalJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
RANKS, PIECES, PASSES, LENGTH = 4, 8, 2, 64
#: What no tensor may exceed in any step, the whole on average, and by how much of it the loss may be another.
WORST, WHOLE, LOSS = 5e-3, 4e-4, 5e-3


def trained(seed: int, steps: int, *, coded: bool = True) -> tuple[float, float, float]:
    """Trains the example's model on its text: NMSE of the worst tensor in any step, mean NMSE, and mean loss."""
    import torch

    torch.manual_seed(seed)
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    model, text = example.GPT(example.SMALL), example.text(example.SMALL.tokens)
    parameters = list(model.parameters())[::-1]  # as DDP fills its buckets
    sizes = tuple(p.numel() for p in parameters)
    parts = [slice(*ends) for ends in itertools.pairwise([0, *itertools.accumulate(sizes)])]
    job = LocalJob(RANKS, sum(sizes), tensors=sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    places = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(RANKS)]
    worst, whole, losses = [], [], []

    def backward(generator: Any) -> NDArray[np.float32]:
        """The gradient of one rank."""
        model.zero_grad()
        for _ in range(PASSES):
            starts = torch.randint(len(text) - LENGTH, (PIECES, 1), generator=generator)
            words = text[starts + torch.arange(LENGTH + 1)]
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(words[:, :-1], words[:, 1:]) / PASSES
            loss.backward()
            losses.append(PASSES * loss.item())
        return torch.cat([p.grad.flatten() for p in parameters]).numpy().copy()

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-4 * min(1.0, (step + 1) / 20)
        gradients = [backward(generator) for generator in places]
        exact = np.mean([x.astype(np.float64) for x in gradients], axis=0)
        mean = job.step(step, gradients, receivers=[0]).outputs[0] if coded else exact.astype(np.float32)
        worst += [nmse(mean[part], exact[part]) for part in parts]
        whole.append(nmse(mean, exact))
        for p, part in zip(parameters, parts, strict=True):
            p.grad = torch.from_numpy(mean[part].reshape(p.shape).copy())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return max(worst), float(np.mean(whole)), float(np.mean(losses))


@pytest.mark.thorough
@pytest.mark.needs("torch")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_no_tensor_is_noise_in_any_step_and_the_loss_is_that_of_exact_means(seed: int) -> None:
    worst, whole, loss = trained(seed, 200)
    assert worst < WORST
    assert whole < WHOLE
    assert loss == pytest.approx(trained(seed, 200, coded=False)[2], rel=LOSS)
