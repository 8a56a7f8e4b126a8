"""``tailbound bench error``: the error of the mean, beside other quantisers, and under loss beside other topologies.

NMSE is the squared error against the float64 mean over the squared length of that mean. Papers on single senders give
the error of one vector over its length (vNMSE); for independent senders of one length both are the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from tailbound.codec.local import LocalJob
from tailbound.wire.bits import Bits, bits_told, both_ways
from tailbound_lab.bench import error_plot, picture, quantisers
from tailbound_lab.bench.figures import nmse
from tailbound_lab.bench.gradients import GAUSSIAN, LAYERS, Layers, balance, draw, exact_mean, worst_tensor
from tailbound_lab.bench.losses import PATTERNS
from tailbound_lab.bench.lossy import TOPOLOGIES, outputs
from tailbound_lab.bench.save import save

Vector = NDArray[np.float32]
Row = dict[str, Any]
_WIDTH = 1408
_RANKS = (4, 16)
_BITS: tuple[Bits, ...] = (8, (4, 8), 4)
_LOSSES, _LOSS_RANKS = (0.0, 0.01, 0.05, 0.1), 4


class _Data(NamedTuple):
    name: str
    layers: Layers
    correlation: float = 0.0


_DATA = (
    _Data("Gaussian", GAUSSIAN),
    _Data("Gaussian, correlation 0.5", GAUSSIAN, 0.5),
    _Data("transformer", LAYERS),
)


class _Quantiser(NamedTuple):
    """``mean`` of gradients in codes of some bits; ``back``: bits of an entry on the way back, of (bits, ranks)."""

    name: str
    mean: Callable[[Sequence[Vector], Bits, np.random.Generator], Vector]
    back: Callable[[Bits, int], int]
    summable: bool


def _eden_both_ways(gradients: Sequence[Vector], bits: Bits, rng: np.random.Generator) -> Vector:
    up, down = both_ways(bits)
    return quantisers.eden(quantisers.eden_mean(gradients, up, rng), down, rng)


def _of_up(mean: Callable[[Sequence[Vector], int, np.random.Generator], Vector]) -> Any:
    """``mean`` for who says bits of both ways: those of the way to the owner count."""
    return lambda gradients, bits, rng: mean(gradients, both_ways(bits)[0], rng)


def _same(bits: Bits, ranks: int) -> int:
    return both_ways(bits)[1]


def bits_of_sum(bits: Bits, ranks: int) -> int:
    """Bits that hold the sum of a code of every rank, of the bits of a contribution."""
    return (((1 << both_ways(bits)[0]) - 1) * ranks).bit_length()


_OTHERS = (
    _Quantiser("EDEN, same bits back", _eden_both_ways, _same, False),
    _Quantiser("EDEN, float32 back", _of_up(quantisers.eden_mean), lambda bits, ranks: 32, False),
    _Quantiser("THC uniform, sum back", _of_up(quantisers.thc_mean), bits_of_sum, True),
    _Quantiser("correlated, sum back", _of_up(quantisers.correlated_mean), bits_of_sum, True),
)


def quantisers_of(layers: Layers) -> tuple[_Quantiser, ...]:
    """All of them, for gradients of ``layers``; ours with exponents of tensors and without."""

    def tailbound(even: bool, gradients: Sequence[Vector], bits: Bits, _: np.random.Generator) -> Vector:
        job = LocalJob(len(gradients), gradients[0].size, _WIDTH, bits=bits)
        if not even:
            balance(job, gradients, layers)
        return job.step(1, gradients, receivers=[0]).outputs[0]

    return (
        _Quantiser("Tailbound, balance=True", partial(tailbound, False), _same, True),
        _Quantiser("Tailbound", partial(tailbound, True), _same, True),
        *_OTHERS,
    )


class _Published(NamedTuple):
    paper: str
    bits: str
    what: str
    figure: str


#: Of papers; none was measured on our data, so they are beside the table and not in it.
_PUBLISHED = (
    _Published("DRIVE (NeurIPS'21), EDEN (ICML'22)", "1", "vNMSE of one normal vector, pi/2 - 1", "0.571"),
    _Published("DynamiQ (arXiv 2602.08923)", "5", "vNMSE, all-reduce of LLM gradients, four tasks", "9.6e-4 to 2.2e-3"),
    _Published("OptiReduce (NSDI'25), transpose", "32", "MSE of the sum under loss", "2.47"),
    _Published("OptiReduce (NSDI'25), parameter server", "32", "MSE of the sum under loss", "9.92"),
    _Published("OptiReduce (NSDI'25), ring", "32", "MSE of the sum under loss", "14.55"),
)
#: The published errors of the three topologies, in the order of ``TOPOLOGIES``.
OPTIREDUCE = (2.47, 9.92, 14.55)


def run(json_path: Path | None = None, *, quick: bool = False, plot: Path | None = None) -> list[Row]:
    """Measures all of it.

    Args:
        json_path: where the rows go.
        quick: 4 ranks, independent Gaussians and the transformer, 0 and 5 % lost, drawn once.
        plot: where the picture goes; None: beside ``json_path``, if there is one and matplotlib is there.

    Returns:
        Rows ``kind, data, name, bits, ranks, nmse`` and, of kind ``quantiser``, ``bits_back, summable``; of kind
        ``loss``, ``pattern, loss, rotated, worst_rank, worst_tensor``: the error of the worst rank, and that of its
        worst tensor, means over the draws as ``nmse`` is.
    """
    console = Console()
    plot = picture.where(plot, json_path, console)
    rows = quantiser_rows(_DATA[::2] if quick else _DATA, _RANKS[:1] if quick else _RANKS)
    rows += loss_rows(_DATA[::2], _LOSSES[::2] if quick else _LOSSES, 1 if quick else 3)
    save(rows, json_path)
    picture.write(error_plot.draw, rows, plot, console)
    return rows


def quantiser_rows(data: Iterable[_Data], ranks: Iterable[int]) -> list[Row]:
    """The error of every quantiser, nothing lost."""
    rows = []
    for each in data:
        for n in ranks:
            gradients = draw(each.layers, n, each.correlation)
            exact = exact_mean(gradients)
            for bits in _BITS:
                for q in quantisers_of(each.layers):
                    value = q.mean(gradients, bits, np.random.default_rng(11))
                    rows.append(
                        {
                            "kind": "quantiser", "data": each.name, "name": q.name, "bits": bits_told(bits), "ranks": n,
                            "nmse": nmse(value, exact), "bits_back": q.back(bits, n), "summable": q.summable,
                        }
                    )  # fmt: skip
    return rows


def loss_rows(data: Iterable[_Data], losses: Iterable[float], draws: int) -> list[Row]:
    """The error of every topology by what is lost, rotated and not; nothing lost is measured once, as ``uniform``."""
    rows = []
    for each in data:
        gradients = draw(each.layers, _LOSS_RANKS, each.correlation)
        exact = exact_mean(gradients)
        cases = [(loss, pattern) for loss in losses for pattern in (PATTERNS if loss else PATTERNS[:1])]
        for rotate in (True, False):
            for loss, pattern in cases:
                for topology in TOPOLOGIES:
                    errors = []
                    for seed in range(1, draws + 1):
                        values = outputs(topology, gradients, pattern, loss, rotate=rotate, seed=seed)
                        of_rank = [nmse(value, exact) for value in values]
                        worst = int(np.argmax(of_rank))
                        tensor = worst_tensor(values[worst], exact, each.layers)[1]
                        errors.append((float(np.mean(of_rank)), of_rank[worst], tensor))
                    mean, rank, tensor = np.mean(errors, axis=0).tolist()
                    rows.append(
                        {
                            "kind": "loss", "data": each.name, "name": topology, "bits": 8, "ranks": _LOSS_RANKS,
                            "nmse": mean, "pattern": pattern.name, "loss": loss, "rotated": rotate,
                            "worst_rank": rank, "worst_tensor": tensor,
                        }
                    )  # fmt: skip
    return rows


def quantisers_table(rows: Sequence[Row]) -> list[Row]:
    """A line for each data, bits and ranks, a column for each quantiser: NMSE, and bits of an entry on the way back."""
    table: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] == "quantiser":
            key = row["data"], row["bits"], row["ranks"]
            line = table.setdefault(key, {"data": key[0], "bits": key[1], "ranks": key[2]})
            line[row["name"]] = f"{row['nmse']:.2e} ({row['bits_back']})"
    return list(table.values())


def losses_table(rows: Sequence[Row]) -> list[Row]:
    """A line for each case of loss, a column for each topology: NMSE, and that of the worst rank's worst tensor."""
    table: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] == "loss":
            key = row["data"], "on" if row["rotated"] else "off", f"{row['loss']:.0%}", row["pattern"]
            line = table.setdefault(key, dict(zip(("data", "rotation", "lost", "where"), key, strict=True)))
            line[row["name"]] = f"{row['nmse']:.1e} ({row['worst_tensor']:.1e})"
    return list(table.values())


def published_table(rows: Sequence[Row]) -> list[Row]:
    """Figures of papers; OptiReduce's with ours in its units, so that transpose at 5 % uniform loss is 2.47."""
    ours = {
        row["name"]: row["nmse"]
        for row in rows
        if (row["kind"], row.get("pattern"), row.get("loss"), row.get("rotated")) == ("loss", "uniform", 0.05, True)
        and row["data"] == _DATA[0].name
    }
    scaled = [f"{OPTIREDUCE[0] * ours[name] / ours[TOPOLOGIES[0]]:.2f}" for name in TOPOLOGIES]
    beside = [""] * (len(_PUBLISHED) - len(scaled)) + scaled
    return [p._asdict() | {"ours": own} for p, own in zip(_PUBLISHED, beside, strict=True)]
