"""A panel of the picture of trainings under bursts: the smoothed loss over seconds of training, and Gloo's target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailbound_lab.bench.axes import COLOURS, FAINT, INK
from tailbound_lab.bench.to_loss import arrivals, smoothed, window_of


def panel(axes: Any, rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> None:
    """Draws the ``rows`` of one scenario and tail; every seed is a line, a dot where it reached its target."""
    first = rows[0]
    there = {(each.seed, each.name): each for each in arrivals(rows)}
    told: set[str] = set()
    for row in rows:
        window = window_of(row["steps"]) if row["steps"] else 1
        losses = smoothed(row["step_loss"], window)
        seconds = [ms / 1e3 for ms in row["step_end_ms"]][window - 1 :]
        name = row["name"]
        look = {"color": COLOURS.get(name, FAINT), "alpha": 0.85}
        label = None if name in told else labels.get(name, name)
        axes.plot(seconds, losses, linewidth=1.4, label=label, **look)
        told.add(name)
        arrival = there.get((row["seed"], name))
        if arrival is not None and arrival.reached:
            axes.plot([arrival.seconds], [arrival.target], marker="o", markersize=4, **look)
    axes.set_title(f"{first['scenario']}, P99/P50 of Gloo {first['tail']:g}", loc="left", fontsize=10.5, color=INK)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training", fontsize=9, color=INK)
    axes.set_ylabel("training loss, smoothed", fontsize=9, color=INK)
    axes.legend(frameon=False, loc="upper right", fontsize=8.5)
