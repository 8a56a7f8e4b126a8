"""The picture of ``tailbound bench error``: error of the mean by quantiser and bits, and by topology and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailbound_lab.bench.axes import INK, PALETTE, dress, new_figure, save


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture in the format of ``path``'s suffix, of the first data and the most ranks.

    Args:
        rows: of the benchmark, or of its JSON file.
        path: of the picture.

    Raises:
        CapabilityError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    left, right = _panels()
    figure = left.figure
    data = rows[0]["data"]
    coded = [row for row in rows if (row["kind"], row["data"]) == ("quantiser", data)]
    coded = [row for row in coded if row["ranks"] == max(each["ranks"] for each in coded)]
    bits = list(dict.fromkeys(row["bits"] for row in coded))
    for name, colour in zip(dict.fromkeys(row["name"] for row in coded), PALETTE, strict=False):
        found = {row["bits"]: row["nmse"] for row in coded if row["name"] == name}
        _line(left, [str(each) for each in bits if each in found], [found[b] for b in bits if b in found], colour, name)
    _say(left, f"nothing lost: {data}, {coded[0]['ranks']} ranks", "bits of a code")
    lost = [row for row in rows if (row["kind"], row["data"]) == ("loss", data)]
    lost = [row for row in lost if row["pattern"] == lost[0]["pattern"]]
    for name, colour in zip(dict.fromkeys(row["name"] for row in lost), PALETTE, strict=False):
        for rotated in (True, False):
            points = sorted((100 * r["loss"], r["nmse"]) for r in lost if (r["name"], r["rotated"]) == (name, rotated))
            _line(right, [x for x, _ in points], [y for _, y in points], colour, name if rotated else None, rotated)
    _say(right, f"{lost[0]['pattern']} losses, dotted without rotation", "packets lost (%)")
    save(figure, path)


def _panels() -> Any:
    """Two axes of a figure of their own."""
    panels = new_figure(11, 4.2).subplots(1, 2)
    for axes in panels:
        dress(axes)
        axes.set_yscale("log")
    return panels


def _line(axes: Any, x: Sequence[Any], y: Sequence[float], colour: str, label: str | None, solid: bool = True) -> None:
    style = "-" if solid else (0, (1.5, 1.5))
    axes.plot(x, y, color=colour, linewidth=1.6, marker="o", markersize=3, label=label, linestyle=style)


def _say(axes: Any, title: str, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel("error of the mean (NMSE)", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8)
