"""The picture of ``tailbound simulate``: the tail over ranks, a line for each layout and floor of deadlines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailbound_lab.bench.axes import INK, dress, new_figure, save

_COLOURS = ("#c2410c", "#7c3aed", "#2563eb", "#0f766e", "#be123c", "#4d7c0f")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture in the format of ``path``'s suffix.

    Args:
        rows: of the command, or of its JSON file.
        path: of the picture.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(_name(row), []).append(row)
    for axes, key, title in (
        (left, "p99_over_p50", "P99/P50 of a step"),
        (right, "over_bound", "p50 over the bandwidth's bound"),
    ):
        dress(axes)
        for (name, each), colour in zip(lines.items(), _COLOURS, strict=False):
            points = sorted((row["ranks"], row[key]) for row in each)
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, marker="o", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        ranks = sorted({row["ranks"] for row in rows})
        axes.set_xticks(ranks, [f"{each:,}" for each in ranks])
        axes.minorticks_off()
        axes.set_xlabel("ranks", fontsize=9, color=INK)
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    left.set_yscale("log")
    right.set_ylim(0, 1.2 * max(row["over_bound"] for row in rows))
    left.legend(frameon=False, fontsize=8.5)
    save(figure, path)


def _name(row: Mapping[str, Any]) -> str:
    about = row["about"]
    layout = row["layout"].split()[0]
    how = f"halves end at {about['cut']:g} times the usual" if about["cut"] else f"floor {about['floor'] / 1e6:g} ms"
    return f"{layout}, {how}{' (coarse)' if about['flows'] else ''}"
