"""The picture of ``tailbound bench allreduce``: a panel for every size, a bar for every way to average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailbound_lab.bench.axes import COLOURS, FAINT, GREY, INK, dress, new_figure, save
from tailbound_lab.bench.train_plot import LABELS


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture in the format of ``path``'s suffix.

    Args:
        rows: of the benchmark, or of its JSON file.
        path: of the picture.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure = new_figure(5.5 * len(sizes), 1.4 + 0.45 * len(names))
    for size, axes in zip(sizes, figure.subplots(1, len(sizes), squeeze=False)[0], strict=True):
        chosen = sorted((row for row in rows if row["bytes"] == size), key=lambda row: -row["p50_ms"])
        dress(axes)
        axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
        places = range(len(chosen))
        axes.barh(
            places, [row["p50_ms"] for row in chosen], height=0.55, color=[COLOURS.get(r["name"], GREY) for r in chosen]
        )
        for at, row in zip(places, chosen, strict=True):
            axes.plot([row["p50_ms"], row["p99_ms"]], [at, at], color=FAINT, linewidth=1.4)
            axes.plot([row["p99_ms"]], [at], marker="|", color=INK, markersize=7)
        axes.set_yticks(places, [LABELS.get(row["name"], row["name"]) for row in chosen])
        axes.set_xlim(left=0)
        first = chosen[0]
        axes.set_title(f"{first['workers']} ranks, {size / 2**20:g} MiB", loc="left", fontsize=10.5, color=INK)
        axes.set_xlabel(f"ms an all-reduce: bar p50, line to p99 of {first['iters']}", fontsize=9, color=INK)
    save(figure, path)
