"""The one way to draw: panels of lines and steps beside each other, in the format of a file's suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tailbound.errors import CapabilityError

INK, FAINT, GREY = "#1f2937", "#9ca3af", "#4b5563"
#: By variant, colour and name.
COLOURS = {
    "tailbound": "#0f766e", "gloo": "#c2410c", "fp16": "#7c3aed", "powersgd": "#2563eb", "quantised": "#a21caf",
}  # fmt: skip
LABELS = {
    "tailbound": "Tailbound", "gloo": "Gloo float32", "fp16": "Gloo fp16", "powersgd": "PowerSGD rank 4",
    "quantised": "8-bit codes over TCP",
}  # fmt: skip
_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
_TICKS = [a * 10**b for b in range(5) for a in (1, 2, 5)]


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    Attributes:
        name: a variant, which has its colour.
        x, y: its points.
        label: in the legend, once; empty: none.
        style: number of a pattern of dashes.
        marks: points on it, each with a few words.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    style: int = 0
    marks: Sequence[tuple[float, float, str]] = ()


@dataclass
class Panel:
    """Axes with lines.

    Attributes:
        title, x, y: words at the top, below and at the left.
        lines: to draw.
        top: upper end of y; None: as the lines have it.
        steps: lines are shares of what took at most so long, over a logarithmic x.
    """

    title: str
    x: str
    y: str
    lines: list[Line] = field(default_factory=list)
    top: float | None = None
    steps: bool = False


def shares(name: str, times: Sequence[float], label: str, style: int = 0, percents: Sequence[int] = ()) -> Line:
    """Return the line of shares, in per cent, of ``times`` that took at most so long; ``percents`` are marked."""
    found = np.sort(np.asarray(times))
    share = 100 * np.arange(1, found.size + 1) / found.size
    marks = [(float(found[np.searchsorted(share, p)]), float(p)) for p in percents]
    told = [(x, p, f"p{p:g} {x:.0f} ms") for x, p in marks]
    return Line(name, np.r_[found[0], found].tolist(), np.r_[0, share].tolist(), label, style, told)


def draw(panels: Sequence[Sequence[Panel]], path: Path, headline: str = "", words: str = "") -> None:
    """Write a picture of rows of panels, with a headline and some words above them.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    if not panels:
        return
    head = 0.9 if headline else 0.0
    figure = _figure(11, 0.4 + 4.1 * len(panels) + head)
    if headline:
        figure.text(0.02, 1 - 0.35 / figure.get_figheight(), headline, fontsize=15, fontweight="bold", color=INK)
        figure.text(0.02, 1 - 0.45 / figure.get_figheight(), words, fontsize=10, color=GREY, va="top", linespacing=1.5)
    rows = figure.subplots(len(panels), 2, squeeze=False, gridspec_kw={"width_ratios": [1.15, 1]})
    for axes, panel in zip(rows.flat, (panel for row in panels for panel in row), strict=True):
        _draw(axes, panel)
    figure.tight_layout(pad=1.2, h_pad=2.2, rect=(0, 0, 1, 1 - head / figure.get_figheight()))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def check() -> None:
    """Find out before minutes of measuring whether a picture can be drawn.

    Raises:
        CapabilityError: matplotlib is missing.
    """
    _figure(1, 1)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError("the picture needs matplotlib: pip install 'tailbound-lab[plots]'") from error
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    told: set[str] = set()
    for place, line in enumerate(panel.lines):
        colour = COLOURS.get(line.name, FAINT)
        look: dict[str, Any] = {"color": colour, "linestyle": _STYLES[line.style % len(_STYLES)]}
        look |= {"linewidth": 1.6, "alpha": 0.9, "label": None if line.label in told else line.label or None}
        told.add(line.label)
        if panel.steps:
            axes.step(line.x, line.y, where="post", **look)
        else:
            axes.plot(line.x, line.y, **look)
        for x, y, words in line.marks:
            axes.plot([x], [y], "o", color=colour, markersize=5, zorder=4)
            aside, side = ((7, -4), "left") if place % 2 else ((-7, -4), "right")
            axes.annotate(words, (x, y), xytext=aside, textcoords="offset points", ha=side, color=colour, fontsize=9)
    if panel.steps and panel.lines:
        axes.set_xscale("log")
        low, high = 0.8 * min(line.x[0] for line in panel.lines), 1.6 * max(line.x[-1] for line in panel.lines)
        axes.set_xlim(low, high)
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    if panel.top is not None:
        axes.set_ylim(0, panel.top)
    axes.set_title(panel.title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(panel.x, fontsize=9, color=INK)
    axes.set_ylabel(panel.y, fontsize=9, color=INK)
    if told - {""}:
        axes.legend(frameon=False, loc="lower right" if panel.top is not None else "upper right", fontsize=8.5)
