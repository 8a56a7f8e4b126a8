"""The panels of ``tailbound bench train``: a line of two for every scenario, made of the rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailbound_lab.bench import picture, to_loss
from tailbound_lab.bench.picture import LABELS, Line, Panel
from tailbound_lab.bench.train_rows import title


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw two panels for every scenario: accuracies, or losses under bursts of the first tail, and times of steps.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    panels = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        chosen = [row for row in rows if row["scenario"] == scenario and row["step_ms"]]
        losses = sorted({row["loss"] for row in chosen})
        tails = sorted({row["tail"] for row in chosen if row["tail"] is not None})
        if tails:
            left, *more = [_losses([row for row in chosen if row["tail"] == tail]) for tail in tails]
            panels.append([left, more[-1] if more else _steps(chosen, losses)])
        else:
            panels.append([_accuracy(chosen, losses), _steps(chosen, losses)])
    picture.draw(panels, path)


def _label(row: Mapping[str, Any], losses: Sequence[float]) -> str:
    name = LABELS.get(row["name"], row["name"])
    return f"{name}, {row['loss']:.0%} lost" if len(losses) > 1 else name


def _accuracy(rows: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> Panel:
    """Accuracy over seconds of training; every seed is a line."""
    panel = Panel(title(rows[0]) if rows else "", "seconds of training", "test accuracy, worst replica (%)", top=102)
    for row in rows:
        if len(row["curve"]["accuracy"]) > 1:
            percent = [100 * accuracy for accuracy in row["curve"]["accuracy"]]
            style = losses.index(row["loss"])
            panel.lines.append(Line(row["name"], row["curve"]["seconds"], percent, _label(row, losses), style))
    return panel


def _losses(rows: Sequence[Mapping[str, Any]]) -> Panel:
    """The smoothed loss over seconds of training, and a dot where Gloo's target was reached; every seed is a line."""
    head = f"{rows[0]['scenario']}, P99/P50 of Gloo {rows[0]['tail']:g}"
    panel = Panel(head, "seconds of training", "training loss, smoothed")
    there = {(each.seed, each.name): each for each in to_loss.arrivals(rows) if each.reached}
    for row in rows:
        window = to_loss.window_of(row["steps"])
        seconds = [ms / 1e3 for ms in row["step_end_ms"]][window - 1 :]
        arrival = there.get((row["seed"], row["name"]))
        marks = [(arrival.seconds, arrival.target, "")] if arrival else []
        smooth = to_loss.smoothed(row["step_loss"], window)
        panel.lines.append(Line(row["name"], seconds, smooth, LABELS.get(row["name"], row["name"]), marks=marks))
    return panel


def _steps(rows: Sequence[Mapping[str, Any]], losses: Sequence[float]) -> Panel:
    """Share of steps that took at most so long, all seeds of a variant and loss together."""
    head = "Time of a step: share that took at most this long"
    panel = Panel(head, "milliseconds (log scale)", "steps (%)", top=102, steps=True)
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["loss"]), []).append(row)
    for (name, loss), members in groups.items():
        times = [ms for row in members for ms in row["step_ms"]]
        panel.lines.append(picture.shares(name, times, _label(members[0], losses), losses.index(loss)))
    return panel
