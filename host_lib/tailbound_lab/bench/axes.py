"""What the pictures of the demo and of the benchmarks have in common: a figure without a window, and quiet axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tailbound.errors import CapabilityError

INK, FAINT, GREY = "#1f2937", "#9ca3af", "#4b5563"
#: By variant.
COLOURS = {
    "tailbound": "#0f766e", "gloo": "#c2410c", "fp16": "#7c3aed", "powersgd": "#2563eb", "none": "#6b7280",
    "noop": "#a3a3a3", "stragglar": "#b45309", "ring": "#be123c", "halving": "#0369a1", "server": "#4d7c0f",
    "quantised": "#a21caf",
}  # fmt: skip
#: In turn, for lines that are no variants.
PALETTE = ("#0f766e", "#c2410c", "#7c3aed", "#2563eb", "#be123c", "#4d7c0f", "#6b7280")


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of so many inches.

    Raises:
        CapabilityError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError("the picture needs matplotlib: pip install 'tailbound-lab[plots]'") from error
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path, **pads: float) -> None:
    """Writes ``figure`` in the format of ``path``'s suffix; ``pads``: room between panels, as ``tight_layout`` has it.

    Raises:
        OSError: the file cannot be written.
    """
    figure.tight_layout(pad=1.2, **pads)
    figure.savefig(path)


def check() -> None:
    """Whether a picture can be drawn.

    Raises:
        CapabilityError: matplotlib is missing.
    """
    new_figure(1, 1)


def dress(axes: Any) -> None:
    """Takes away what is not needed, and colours the rest."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
