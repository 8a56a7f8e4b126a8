"""Rows of a benchmark as a table on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["show"]


def show(title: str, rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Prints ``rows``, a column for each of their keys, numbers to the right; None, or no such key: nothing to say."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        words = any(isinstance(row.get(name), str) for row in rows)
        table.add_column(name, justify="left" if words else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    (console or Console()).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
