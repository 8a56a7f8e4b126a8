"""The demo's picture: accuracy over time, and how long iterations take, for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tailbound_lab.bench.axes import COLOURS, FAINT, GREY, INK, dress, new_figure
from tailbound_lab.bench.curve import TARGET, Curve

_LABELS = {"tailbound": "Tailbound", "gloo": "Gloo"}

_TICKS = (5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000, 7000, 10_000)


def draw(curves: dict[str, Curve], headline: str, conditions: str, path: Path) -> None:
    """Writes a PNG.

    Args:
        curves: by name, ``tailbound`` and ``gloo``.
        headline: first line above the picture.
        conditions: the lines below it, what both had to bear; a hundred characters each fit.
        path: of the picture.

    Raises:
        CapabilityError: matplotlib is missing.
    """
    figure = new_figure(11, 5)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1]})
    figure.subplots_adjust(left=0.065, right=0.975, top=0.75, bottom=0.125, wspace=0.2)
    figure.text(0.065, 0.925, headline, fontsize=15, fontweight="bold", color=INK)
    figure.text(0.065, 0.905, conditions, fontsize=10, color=GREY, va="top", linespacing=1.5)
    for axes in (left, right):
        dress(axes)
    _accuracy(left, curves)
    _iterations(right, curves)
    figure.savefig(path)


def _accuracy(axes: Any, curves: dict[str, Curve]) -> None:
    axes.set_title("Accuracy over training time", loc="left", fontsize=11, color=INK)
    times = [time for curve in curves.values() if (time := curve.time_to(TARGET)) is not None]
    for name, curve in curves.items():
        seconds, right = zip(*curve.points, strict=True)
        colour = COLOURS[name]
        axes.plot(seconds, [100 * r for r in right], color=colour, linewidth=2.2, label=_LABELS[name], zorder=3)
        axes.plot(seconds[-1], 100 * right[-1], "o", color=colour, markersize=6, zorder=4)
        reached = curve.time_to(TARGET)
        if reached is not None:
            axes.plot([reached, reached], [0, 100 * TARGET], ":", color=colour, linewidth=1.2)
            first = len(times) > 1 and reached == min(times)  # on either side of a pair of lines that may be close
            axes.annotate(
                f"{reached:.1f} s", (reached, 0), xytext=(-4 if first else 4, 6), textcoords="offset points",
                ha="right" if first else "left", color=colour, fontsize=9,
            )  # fmt: skip
    axes.axhline(100 * TARGET, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{TARGET:.0%}", (0, 100 * TARGET), xycoords=("axes fraction", "data"), xytext=(4, -11),
        textcoords="offset points", color="#6b7280", fontsize=8.5,
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(0, 102)
    axes.set_xlabel("seconds of training", fontsize=9.5, color=INK)
    axes.set_ylabel("test accuracy, worst replica (%)", fontsize=9.5, color=INK)
    axes.legend(frameon=False, loc="lower right", fontsize=10, bbox_to_anchor=(1, 0.08))


def _iterations(axes: Any, curves: dict[str, Curve]) -> None:
    axes.set_title("Time of an iteration: share that took at most this long", loc="left", fontsize=11, color=INK)
    for name, curve in curves.items():
        ms = np.sort(1e3 * np.asarray(curve.iterations))
        share = np.arange(1, ms.size + 1) / ms.size
        colour = COLOURS[name]
        axes.step(np.r_[ms[0], ms], np.r_[0, 100 * share], where="post", color=colour, linewidth=2.2)
        figures = curve.figures()
        for key, height, words in (("iter_p50_ms", 50, "p50"), ("iter_p99_ms", 99, "p99")):
            axes.plot(figures[key], height, "o", color=colour, markersize=5.5, zorder=4)
            # outwards, away from the other curve
            left = all(figures[key] <= other.figures()[key] for other in curves.values())
            aside = (-8, 4 if height > 90 else -3.5) if left else (8, -13 if height > 90 else -3.5)
            axes.annotate(
                f"{words} {figures[key]:.0f} ms", (figures[key], height), xytext=aside, textcoords="offset points",
                ha="right" if left else "left", color=colour, fontsize=9,
            )  # fmt: skip
    axes.set_xscale("log")
    low = min(min(curve.iterations) for curve in curves.values()) * 1e3
    high = max(max(curve.iterations) for curve in curves.values()) * 1e3
    axes.set_xlim(0.6 * low, 1.9 * high)
    wide = high > 10 * low
    ticks = [t for t in (_TICKS[0::2] if wide else _TICKS) if 0.6 * low <= t <= 1.9 * high]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 109)  # with room for the label at the upper end
    axes.set_yticks(range(0, 101, 20))
    axes.set_xlabel("milliseconds (log scale)", fontsize=9.5, color=INK)
    axes.set_ylabel("iterations (%)", fontsize=9.5, color=INK)
