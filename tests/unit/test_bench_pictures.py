"""Pictures of the claims that have no test of their own: all-reduces, error of the mean, simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tailbound_lab.bench import allreduce_plot, axes, error_plot
from tailbound_lab.simulate import plot

ALLREDUCES = [
    {"name": name, "bytes": size, "workers": 4, "iters": 30, "p50_ms": p50, "p99_ms": 2 * p50}
    for size in (1 << 20, 25 << 20)
    for name, p50 in (("tailbound", 113.0), ("gloo", 343.0))
]
ERRORS: list[dict[str, Any]] = [
    {"kind": "quantiser", "data": data, "name": name, "bits": bits, "ranks": ranks, "nmse": 1e-4 * ranks}
    for data in ("Gaussian", "transformer")
    for name in ("Tailbound", "EDEN")
    for bits in ("8", "4")
    for ranks in (4, 16)
] + [
    {"kind": "loss", "data": "Gaussian", "name": name, "pattern": pattern, "loss": loss, "rotated": on, "nmse": 0.01}
    for name in ("transpose", "ring")
    for pattern, loss in (("uniform", 0.0), ("uniform", 0.05), ("bursts", 0.05))
    for on in (True, False)
]
SIMULATED = [
    {
        "ranks": ranks, "layout": f"2d {ranks}", "p99_over_p50": tail, "over_bound": 3.2,
        "about": {"floor": floor, "cut": cut, "flows": True},
    }
    for ranks in (64, 1024)
    for floor, cut, tail in ((10_000_000, 0.0, 28.5), (200_000, 0.0, 2.1), (10_000_000, 1.2, 1.1))
]  # fmt: skip


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(
    ("draw", "rows", "said"),
    [
        (allreduce_plot.draw, ALLREDUCES, {"Tailbound", "Gloo float32", "4 ranks, 25 MiB"}),
        (
            error_plot.draw,
            ERRORS,
            {"nothing lost: Gaussian, 16 ranks", "uniform losses, dotted without rotation", "EDEN"},
        ),
        (
            plot.draw,
            SIMULATED,
            {"2d, floor 0.2 ms (coarse)", "2d, halves end at 1.2 times the usual (coarse)", "1,024"},
        ),
    ],
    ids=["allreduce", "error", "simulate"],
)
def test_a_picture_says_whom_it_is_of(
    draw: Callable[[Sequence[dict[str, Any]], Path], None],
    rows: list[dict[str, Any]],
    said: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = []
    new = axes.new_figure
    for module in (allreduce_plot, error_plot, plot):
        monkeypatch.setattr(module, "new_figure", lambda *size: figures.append(new(*size)) or figures[-1])
    draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    from matplotlib.text import Text

    assert said <= {text.get_text() for text in figures[0].findobj(Text)}
