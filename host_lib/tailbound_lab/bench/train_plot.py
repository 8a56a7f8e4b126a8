"""The picture of ``tailbound bench train``: a line of two panels for every scenario, drawn from the rows alone.

Of a scenario under bursts, the panels are those of its first and its last tail, if there is more than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailbound_lab.bench.axes import COLOURS, FAINT, GREY, INK, dress, new_figure, save
from tailbound_lab.bench.to_loss_plot import panel

#: Ways to average, and trainings, as pictures call them.
LABELS = {
    "tailbound": "Tailbound", "gloo": "Gloo float32", "fp16": "Gloo fp16", "powersgd": "PowerSGD rank 4",
    "none": "no communication", "noop": "DDP, no communication", "stragglar": "StragglAR", "ring": "ring",
    "halving": "halving-doubling", "server": "parameter server", "quantised": "8-bit codes over TCP",
}  # fmt: skip
#: By the place of a loss among those of the scenario.
_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
_TICKS = [a * 10**b for b in range(5) for a in (1, 2, 5)]
#: What is learned alone says nothing about the others.
_ALONE = ("none", "noop")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture in the format of ``path``'s suffix.

    Args:
        rows: of the benchmark, or of its JSON file.
        path: of the picture.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    if not scenarios:
        return
    figure = new_figure(11, 0.4 + 4.1 * len(scenarios))
    panels = figure.subplots(len(scenarios), 2, squeeze=False, gridspec_kw={"width_ratios": [1.15, 1]})
    for scenario, (left, right) in zip(scenarios, panels, strict=True):
        chosen = [row for row in rows if row["scenario"] == scenario and row["step_ms"]]
        losses = sorted({row["loss"] for row in chosen})
        for axes in (left, right):
            dress(axes)
        if tails := sorted({row["tail"] for row in chosen if row["tail"] is not None}):
            panel(left, [row for row in chosen if row["tail"] == tails[0]], LABELS)
            if len(tails) > 1:
                panel(right, [row for row in chosen if row["tail"] == tails[-1]], LABELS)
            else:
                _steps(right, chosen, losses)
            continue
        left.set_title(_words(chosen), loc="left", fontsize=10.5, color=INK)
        _accuracy(left, chosen, losses)
        _steps(right, chosen, losses)
    save(figure, path, h_pad=2.2)


def _words(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a scenario was."""
    if not rows:
        return ""
    first = rows[0]
    rate = f", {first['rate'] / 1e6:g} Mbit/s" if first["rate"] else ""
    size = first["gradient_bytes"] / 1e6
    return f"{first['scenario']}: {first['workers']} workers, {size:.0f} MB of gradients{rate}"


def _label(row: Mapping[str, Any], losses: Sequence[float]) -> str:
    name = LABELS.get(row["name"], row["name"])
    return f"{name}, {row['loss']:.0%} lost" if len(losses) > 1 else name


def _look(row: Mapping[str, Any], losses: Sequence[float]) -> dict[str, Any]:
    style = _STYLES[losses.index(row["loss"]) % len(_STYLES)]
    return {"color": COLOURS.get(row["name"], FAINT), "linestyle": style}


def _accuracy(axes: Any, rows: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> None:
    """Accuracy over seconds of training; every seed is a line."""
    told: set[str] = set()
    for row in rows:
        if row["name"] in _ALONE or len(row["curve"]["accuracy"]) < 2:
            continue
        label = _label(row, losses)
        percent = [100 * accuracy for accuracy in row["curve"]["accuracy"]]
        axes.plot(
            row["curve"]["seconds"], percent, linewidth=1.6, alpha=0.85, label=None if label in told else label,
            **_look(row, losses),
        )  # fmt: skip
        told.add(label)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 102)
    axes.set_xlabel("seconds of training", fontsize=9, color=INK)
    axes.set_ylabel("test accuracy, worst replica (%)", fontsize=9, color=INK)
    if told:
        axes.legend(frameon=False, loc="lower right", fontsize=8.5)


def _steps(axes: Any, rows: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> None:
    """Share of steps that took at most so long, all seeds of a variant and loss together."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["loss"]), []).append(row)
    everything = [ms for row in rows for ms in row["step_ms"]]
    for members in groups.values():
        ms = np.sort(np.concatenate([row["step_ms"] for row in members]))
        share = 100 * np.arange(1, ms.size + 1) / ms.size
        axes.step(
            np.r_[ms[0], ms], np.r_[0, share], where="post", linewidth=1.6, label=_label(members[0], losses),
            **_look(members[0], losses),
        )  # fmt: skip
    axes.set_title("Time of a step: share that took at most this long", loc="left", fontsize=10.5, color=INK)
    axes.set_xscale("log")
    if everything:
        low, high = 0.8 * min(everything), 1.25 * max(everything)
        axes.set_xlim(low, high)
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, loc="lower right", fontsize=8, labelcolor=GREY)
    axes.set_ylim(0, 102)
    axes.set_xlabel("milliseconds (log scale)", fontsize=9, color=INK)
    axes.set_ylabel("steps (%)", fontsize=9, color=INK)
