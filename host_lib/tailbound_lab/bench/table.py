"""Rows of a benchmark as a table on standard output, and in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]
#: By key of a row, heading and format of its column: of ``format``, ``ms`` (as many digits as a time needs), ``%`` (of
#: a share, without the sign); empty: as a value of its type is written.
Columns = Mapping[str, tuple[str, str]]


def table(title: str, rows: Sequence[Row], columns: Columns | None = None) -> Table:
    """Return ``rows`` as a table, words to the left and numbers to the right; None, or no such key: a dash.

    ``columns``: which are shown, and how, close together; None: all keys.
    """
    shown = columns or {name: (name, "") for row in rows for name in row}
    found = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=0 if columns else (0, 1, 0, 0), pad_edge=not columns
    )
    for name, (heading, _) in shown.items():
        words = any(isinstance(row.get(name), str) for row in rows)
        found.add_column(heading, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        found.add_row(*(_cell(row.get(name), how) for name, (_, how) in shown.items()))
    return found


def show(title: str, rows: Sequence[Row], columns: Columns | None = None, console: Console | None = None) -> None:
    """Print ``table``."""
    (console or Console()).print(table(title, rows, columns))


def save(rows: Sequence[Row], path: Path | None) -> None:
    """Write ``rows`` to ``path`` (None: nowhere), whose folder is made if it is missing.

    Raises:
        OSError: it cannot be written.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")


def _cell(value: Any, how: str) -> str:
    if value is None:
        return "-"
    if how == "ms":
        return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1e4 else f"{value:.0f}"
    if how == "%":
        return f"{100 * value:.3f}"
    if how:
        return format(value, how)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
