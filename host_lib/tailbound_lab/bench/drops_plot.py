"""The picture of ``tailbound bench drops``: test loss over what is lost, by pattern and rotation; what cuts gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailbound_lab.bench.axes import INK, PALETTE, dress, new_figure, save
from tailbound_lab.bench.drops_plan import MODELS, SPREAD, means


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture in the format of ``path``'s suffix.

    Args:
        rows: of the benchmark, or of its JSON file.
        path: of the picture.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    trained = [row for row in rows if row["kind"] == "training"]
    gains = [row for row in rows if row["kind"] == "cut"]
    models = [model for model in MODELS if any(row["model"] == model for row in trained)]
    figure = new_figure(5 * (len(models) + 1), 4.2)
    *left, right = figure.subplots(1, len(models) + 1, squeeze=False)[0]
    for model, axes in zip(models, left, strict=True):
        _losses(axes, model, [row for row in trained if row["model"] == model])
    _gains(right, gains)
    save(figure, path)


def _losses(axes: Any, model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    dress(axes)
    found = means(rows, "test_loss")
    for pattern, colour in zip(SPREAD, PALETTE[: len(SPREAD)], strict=True):
        for rotated in (True, False):
            none = found[SPREAD[0].name, 0.0, rotated]
            own = sorted((s, y[0]) for (name, s, on), y in found.items() if s and (name, on) == (pattern.name, rotated))
            points = [(0.0, none[0]), *own]
            axes.plot(
                [100 * share for share, _ in points], [loss for _, loss in points], color=colour, linewidth=1.6,
                linestyle="-" if rotated else (0, (1.5, 1.5)), marker="o", markersize=3,
                label=pattern.name if rotated else None,
            )  # fmt: skip
    axes.set_title(f"{model}: dotted without rotation", loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel("packets lost (%)", fontsize=9, color=INK)
    axes.set_ylabel("test loss after equal steps, worst replica", fontsize=9, color=INK)
    axes.legend(frameon=False, loc="upper left", fontsize=8.5)


def _gains(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    dress(axes)
    for tail, colour in zip(sorted({row["tail"] for row in rows}), PALETTE, strict=False):
        for by_time in (True, False):
            chosen = [row for row in rows if row["tail"] == tail and (row["patience"] is not None) == by_time]
            points = sorted((100 * row["lost"], row["p99"]) for row in chosen)
            axes.plot(
                [lost for lost, _ in points], [gain for _, gain in points], color=colour, linewidth=1.6,
                linestyle="-" if by_time else (0, (1.5, 1.5)), marker="o", markersize=3,
                label=f"tail {tail:g}, by {'deadline' if by_time else 'share'}",
            )  # fmt: skip
    axes.set_title("What cutting gains (model)", loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel("gone without (%)", fontsize=9, color=INK)
    axes.set_ylabel("P99 of who waits over P99 of who does not", fontsize=9, color=INK)
    axes.legend(frameon=False, loc="upper right", fontsize=8.5)
