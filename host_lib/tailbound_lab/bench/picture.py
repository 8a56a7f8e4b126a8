"""Where the picture of a benchmark goes, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import CapabilityError
from tailbound_lab.bench.axes import check


def where(plot: Path | None, json_file: Path | None, console: Console) -> Path | None:
    """``plot``, or beside ``json_file``; None: nowhere. Found out now and not after minutes of measuring.

    Raises:
        CapabilityError: it is asked for and cannot be drawn.
    """
    try:
        check()
    except CapabilityError as error:
        if plot is not None:
            raise
        if json_file is not None:
            console.print(f"no picture beside the JSON file: {error}", highlight=False, soft_wrap=True)
        return None
    return plot or (json_file.with_suffix(".png") if json_file is not None else None)


def write(
    draw: Callable[[Sequence[dict[str, Any]], Path], None],
    rows: Sequence[dict[str, Any]],
    plot: Path | None,
    console: Console,
) -> None:
    """Has ``draw`` write the picture of ``rows`` to ``plot`` (None: nowhere), whose folder is made if it is missing."""
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(rows, plot)
        console.print(str(plot), highlight=False, soft_wrap=True)
