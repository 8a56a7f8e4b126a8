"""The picture of the demo: accuracy over time, and how long iterations took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tailbound.errors import CapabilityError
from tailbound_lab.bench.train_rows import TARGET, Record

LABELS = {"tailbound": "Tailbound", "gloo": "Gloo"}
_INK, _FAINT, _GREY = "#1f2937", "#9ca3af", "#4b5563"
_COLOURS = {"tailbound": "#0f766e", "gloo": "#c2410c"}
_TICKS = [a * 10**b for b in range(5) for a in (1, 2, 5)]
#: Width, height and head of the picture, in inches.
_WIDTH, _HEIGHT, _HEAD = 11, 5.4, 0.9


def draw(curves: Mapping[str, Record], headline: str, words: str, path: Path) -> None:
    """Write the picture, with a headline and two lines of words above it.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError("the picture needs matplotlib: pip install 'tailbound-lab[demo]'") from error
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.35 / _HEIGHT, headline, fontsize=15, fontweight="bold", color=_INK)
    figure.text(0.02, 1 - 0.45 / _HEIGHT, words, fontsize=10, color=_GREY, va="top", linespacing=1.5)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1]})
    _panel(left, "Accuracy over training time", "seconds of training", "test accuracy, worst replica (%)")
    _panel(
        right, "Time of an iteration: share that took at most this long", "milliseconds (log scale)", "iterations (%)"
    )
    for place, (name, curve) in enumerate(curves.items()):
        look = {"color": _COLOURS[name], "linewidth": 1.6, "alpha": 0.9}
        seconds, accuracy = zip(*curve.points, strict=True)
        left.plot(seconds, [100 * one for one in accuracy], label=LABELS[name], **look)
        if (reached := curve.time_to(TARGET)) is not None:
            _mark(left, reached, 100 * TARGET, f"{TARGET:.0%} after {reached:.1f} s", name, place)
        times = np.sort(1e3 * np.asarray(curve.iterations))
        shares = 100 * np.arange(1, times.size + 1) / times.size
        right.step(np.r_[times[0], times], np.r_[0, shares], where="post", **look)
        for percent in (50, 99):
            at = float(times[np.searchsorted(shares, percent)])
            _mark(right, at, percent, f"p{percent} {at:.0f} ms", name, place)
    left.set_xlim(left=0)
    left.legend(frameon=False, loc="lower right", fontsize=8.5)
    right.set_xscale("log")
    everything = [1e3 * seconds for curve in curves.values() for seconds in curve.iterations]
    low, high = 0.8 * min(everything), 1.6 * max(everything)
    right.set_xlim(low, high)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    right.minorticks_off()
    figure.tight_layout(pad=1.2, rect=(0, 0, 1, 1 - _HEAD / _HEIGHT))
    figure.savefig(path)


def _panel(axes: Any, title: str, x: str, y: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylim(0, 109)
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.set_ylabel(y, fontsize=9, color=_INK)


def _mark(axes: Any, x: float, y: float, words: str, name: str, place: int) -> None:
    """A point of a curve, with words on the side where the other curve is not."""
    axes.plot([x], [y], "o", color=_COLOURS[name], markersize=5, zorder=4)
    aside, side = ((7, -4), "left") if place % 2 else ((-7, -4), "right")
    axes.annotate(words, (x, y), xytext=aside, textcoords="offset points", ha=side, color=_COLOURS[name], fontsize=9)
