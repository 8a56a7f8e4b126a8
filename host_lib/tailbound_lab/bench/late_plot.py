"""The picture of ``tailbound bench late``: a panel for every number of ranks, a line for every way to average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailbound_lab.bench.axes import COLOURS, FAINT, INK, dress, new_figure, save

_LABELS = {
    "gloo": "Gloo", "ring": "ring", "stragglar": "StragglAR", "strict": "Tailbound, waits for all",
    "bounded": "Tailbound, bounded",
}  # fmt: skip
_STYLES = {"gloo": (0, (1.5, 1.5)), "strict": (0, (5, 2))}
_TICKS = [a * 10**b for b in range(5) for a in (1, 2, 5)]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture in the format of ``path``'s suffix.

    Args:
        rows: of the benchmark, or of its JSON file.
        path: of the picture.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    counts = list(dict.fromkeys(row["workers"] for row in rows))
    figure = new_figure(5.5 * len(counts), 4.2)
    for workers, axes in zip(counts, figure.subplots(1, len(counts), squeeze=False)[0], strict=True):
        chosen = [row for row in rows if row["workers"] == workers]
        dress(axes)
        for name, label in _LABELS.items():
            points = sorted((row["delay"], row["others_p50_ms"]) for row in chosen if row["name"] == name)
            axes.plot(
                *zip(*points, strict=True), label=label, linewidth=1.6, marker="o", markersize=3,
                linestyle=_STYLES.get(name, "-"), color=COLOURS.get(name, COLOURS["tailbound"]),
            )  # fmt: skip
        delays = sorted({row["delay"] for row in chosen} - {0})
        line = [delay * chosen[0]["transfer_ms"] for delay in delays]
        axes.plot(delays, line, color=FAINT, linewidth=1, label="the delay")
        axes.set_xscale("symlog", base=2, linthresh=0.5)
        axes.set_yscale("log")
        axes.set_xticks([0, *delays], ["0", *(f"{delay:g}" for delay in delays)])
        times = [row["others_p50_ms"] for row in chosen]
        ticks = [tick for tick in _TICKS if min(times) / 2 < tick < 2 * max(times)]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"{workers} ranks, {chosen[0]['bytes'] / 2**20:g} MiB", loc="left", fontsize=10.5, color=INK)
        axes.set_xlabel(f"delay of one rank (transfer times, {chosen[0]['transfer_ms']:.0f} ms)", fontsize=9, color=INK)
        axes.set_ylabel("ms until the others have the result", fontsize=9, color=INK)
        axes.legend(frameon=False, loc="upper left", fontsize=8.5)
    save(figure, path)
