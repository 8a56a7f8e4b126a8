"""``tailbound top``: reads the statuses of this host's ranks and shows them until Ctrl-C."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tailbound.observe import status
from tailbound.top.rows import Row, rows_of

__all__ = ["top"]


class _Explained(click.Command):
    """Help that explains the columns; the table, and rich, are imported for that alone."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from tailbound.top.table import meanings

        formatter.write(f"\nColumns:\n{meanings()}\n")


@click.command(cls=_Explained, context_settings={"show_default": True})
@click.option("--once", is_flag=True, help="Show one reading and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a reading instead of a table.")
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=1.0, help="Seconds between readings.")
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path),
    help="Where the ranks write; without it, TAILBOUND_STATUS or the usual places.",
)  # fmt: skip
def top(once: bool, as_json: bool, interval: float, folder: Path | None) -> None:
    """Show every rank on this host: pace, deadlines, who is late, who loses.

    Rates are those between two readings; late and lost rows are counted since the start, «late now» and «losing now»
    name the ranks of which some were since the last reading.
    """
    where = [folder] if folder is not None else status.folders()
    readings = _readings(where, interval, once)
    if as_json:
        for rows, raw in readings:
            click.echo(json.dumps({"time": time.time(), "rows": [r.as_dict() for r in rows], "statuses": raw}))
        return
    from rich.console import Console
    from rich.live import Live

    from tailbound.top.table import table

    named = ", ".join(map(str, where))
    console = Console()
    if once:
        for rows, _ in readings:
            if rows:
                console.print(table(rows, width=console.width))
            else:
                console.print(f"no rank of Tailbound writes its status to {named}", markup=False)
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        for rows, _ in readings:
            live.update(table(rows, f"in {named}", console.width), refresh=True)


def _readings(where: list[Path], interval: float, once: bool) -> Iterator[tuple[list[Row], list[dict[str, Any]]]]:
    """Readings with rates against the one before; a single one is made of two, shortly after each other."""
    before: list[dict[str, Any]] = status.read(where)
    if not once:
        yield rows_of(before), before
    while True:
        if before or not once:
            time.sleep(min(interval, 2.5 * status.PERIOD) if once else interval)
        now = status.read(where)
        yield rows_of(now, before), now
        if once:
            return
        before = now
