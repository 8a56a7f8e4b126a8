"""``tailbound top``: reads the statuses of this host's ranks and shows them until Ctrl-C."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tailbound.observe import status

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
    """Show every rank on this host: pace, deadlines, and the fates of rows that did not come in time.

    Rates are those between two readings. Rows are counted since the start; «now» has those since the last reading.
    Below the table stands what to do about them.
    """
    where = [folder] if folder is not None else status.folders()
    readings = _readings(where, interval, once)
    if as_json:
        for now, _ in readings:
            click.echo(json.dumps({"time": time.time(), "statuses": now}))
        return
    from rich.console import Console
    from rich.live import Live

    from tailbound.top.table import lines, table

    named = ", ".join(map(str, where))
    console = Console()
    if once:
        for now, before in readings:
            if found := lines(now, before):
                console.print(table(found, width=console.width))
            else:
                console.print(f"no rank of Tailbound writes its status to {named}", markup=False)
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        for now, before in readings:
            live.update(table(lines(now, before), f"in {named}", console.width), refresh=True)


def _readings(where: list[Path], interval: float, once: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """Readings, each with the one before; a single one is made of two, shortly after each other."""
    before: list[dict[str, Any]] = status.read(where)
    if not once:
        yield before, []
    while True:
        if before or not once:
            time.sleep(min(interval, 2.5 * status.PERIOD) if once else interval)
        now = status.read(where)
        yield now, before
        if once:
            return
        before = now
