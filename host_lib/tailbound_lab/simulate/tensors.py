"""``tailbound bench tensors``: the error of every tensor while a small GPT is trained (codec-16, codec-18).

The gradients of all ranks go through the real engine in virtual time (``simulate.world``), so that exponents are
chosen, agreed on and in force when a job would have them. What the model learns from is the exact mean: all ways of
coding see the same gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ConfigError
from tailbound.wire.bits import Bits, bits_told
from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.gradients import Layers, exact_mean, worst_tensor
from tailbound_lab.bench.save import save
from tailbound_lab.simulate.engine import Done, Plan
from tailbound_lab.simulate.fabric import MS
from tailbound_lab.simulate.world import World

Row = dict[str, Any]
_EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
#: Pieces of text a rank and step, words of a piece.
_BATCH, _LENGTH = 8, 64
#: The step whose errors are told, and what no tensor should be above.
_STEP, _MUCH = 50, 0.1
_WIDTH, _RATE, _WARM = 1408, 1e-3, 20


class Way(NamedTuple):
    """How gradients are coded."""

    name: str
    bits: Bits = 8
    balance: bool = False
    fine_steps: int = 0


def ways(fine_steps: int) -> tuple[Way, ...]:
    """Without exponents, with them, and with the first ``fine_steps`` in codes of 16 bits."""
    fine = Way(f"balance, {fine_steps} fine steps", balance=True, fine_steps=fine_steps)
    return Way("plain"), Way("balance", balance=True), fine


class Gradients:
    """Gradients of ``ranks`` replicas that train the model of examples/train_gpt.py together, step by step.

    AdamW at 1e-3 after a warm-up of 20 steps, gradients clipped to a norm of 1.

    Raises:
        ConfigError: the example is not there.
    """

    def __init__(self, ranks: int, seed: int) -> None:
        import torch

        gpt = _example()
        torch.manual_seed(seed)
        self._model = gpt.GPT(gpt.SMALL)
        self._text = gpt.text(gpt.SMALL.tokens)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda s: min(1.0, (s + 1) / _WARM))
        self._generators = [torch.Generator().manual_seed(ranks * seed + rank) for rank in range(ranks)]
        named = list(self._model.named_parameters())[::-1]  # as DDP's bucket has them
        self._parameters = [p for _, p in named]
        #: its tensors, in the order in which they lie in a bucket
        self.layers: Layers = tuple((name, p.numel(), 1.0) for name, p in named)
        self._steps = self._train()
        self._kept: dict[int, list[NDArray[np.float32]]] = {}

    def of(self, step: int) -> list[NDArray[np.float32]]:
        """f32[entries] by rank; of the last steps that were asked for only."""
        while step not in self._kept:
            self._kept[len(self._kept) and max(self._kept) + 1] = next(self._steps)
            self._kept.pop(max(self._kept) - 8, None)
        return self._kept[step]

    def _train(self) -> Iterator[list[NDArray[np.float32]]]:
        import torch

        while True:
            found = []
            for generator in self._generators:
                starts = torch.randint(len(self._text) - _LENGTH, (_BATCH, 1), generator=generator)
                words = self._text[starts + torch.arange(_LENGTH + 1)]
                self._optimizer.zero_grad()
                self._model(words[:, :-1], words[:, 1:]).backward()
                parts = [p.grad.flatten() for p in self._parameters if p.grad is not None]
                found.append(torch.cat(parts).numpy())
            yield found
            mean, at = torch.from_numpy(exact_mean(found).astype(np.float32)), 0
            for p in self._parameters:
                p.grad, at = mean[at : at + p.numel()].view_as(p), at + p.numel()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._schedule.step()


class _Job(World):
    """A job whose ranks have the gradients of ``trained``; ``errors``: (of all, of the worst tensor, it) by step."""

    def __init__(self, trained: Gradients, way: Way, ranks: int, steps: int) -> None:
        self.trained, self.way = trained, way
        self.starts = tuple(accumulate((n for _, n, _ in trained.layers), initial=0))[:-1]
        self.errors: dict[int, tuple[float, float, str]] = {}
        plan = Plan((sum(n for _, n, _ in trained.layers),), compute=20 * MS)  # exponents come four steps later
        super().__init__(ranks, plan=plan, steps=steps, width=_WIDTH, balance=way.balance)

    def bits_of(self, step: int) -> Bits:
        return 16 if step < self.way.fine_steps else self.way.bits

    def gradient(self, rank: int, step: int, bucket: int, numel: int) -> NDArray[np.float32]:
        return self.trained.of(step)[rank].copy()

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        super().finished(rank, done, out)
        if rank == 0:
            exact = exact_mean(self.trained.of(done.step))
            worst, error = worst_tensor(out, exact, self.trained.layers)
            self.errors[done.step] = nmse(out, exact), error, worst
            self.counts["clipped"] += done.outcome.clipped


def run(
    json_path: Path | None, ways: Sequence[Way], *, ranks: int = 4, steps: int = 200, seeds: Sequence[int] = (0,)
) -> list[Row]:
    """Trains once for each of ``seeds`` and of ``ways``.

    Returns:
        Rows ``name, bits, ranks, seed, steps, nmse, worst_tensor, worst_tensor_nmse`` (of step 50, or of the last one),
        ``median_nmse, mean_nmse, median_worst`` (of all steps), ``above`` (steps with a tensor above 0.1), ``changes``
        of exponents, ``clipped`` entries of rank 0, ``errors`` by step: NMSE of all, of the worst tensor, and its name.

    Raises:
        ConfigError: this is not a checkout, which has the model.
    """
    rows = []
    for seed, way in product(seeds, ways):
        with _Job(Gradients(ranks, seed), way, ranks, steps) as job:
            job.run()
            changes = job.nodes[0].engine.job.counters["exponents_settled"]
        errors = [job.errors[step] for step in sorted(job.errors)]
        whole, tensor, worst = errors[min(_STEP, steps - 1)]
        rows.append(
            {
                "name": way.name, "bits": bits_told(way.bits), "ranks": ranks, "seed": seed, "steps": steps,
                "nmse": whole, "worst_tensor": worst, "worst_tensor_nmse": tensor,
                "median_nmse": float(np.median([e[0] for e in errors])),
                "mean_nmse": float(np.mean([e[0] for e in errors])),
                "median_worst": float(np.median([e[1] for e in errors])),
                "above": [step for step, e in enumerate(errors) if e[1] > _MUCH],
                "changes": changes, "clipped": job.counts["clipped"], "errors": errors,
            }
        )  # fmt: skip
    save(rows, json_path)
    return rows


def table(rows: Sequence[Row]) -> list[Row]:
    """A line for each row: errors of all and of the worst tensor."""
    return [
        {
            "way": row["name"], "seed": row["seed"],
            f"step {min(_STEP, row['steps'] - 1)}": f"{row['worst_tensor_nmse']:.2g} / {row['nmse']:.1e}",
            "median": f"{row['median_worst']:.1e} / {row['median_nmse']:.1e}", "mean of all": f"{row['mean_nmse']:.1e}",
            f"above {_MUCH:g}": f"{len(row['above'])}: {', '.join(map(str, row['above'][:20]))}",
            "changes": row["changes"], "clipped": row["clipped"],
        }
        for row in rows
    ]  # fmt: skip


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", _EXAMPLE)
    if spec is None or spec.loader is None or not _EXAMPLE.exists():
        raise ConfigError(f"{_EXAMPLE} is not there, which has the model: run this from a checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
