"""``tailbound top``: reads the statuses of this host's ranks and shows them as a table until Ctrl-C.

The table has one entry for each column, with its meaning and what it shows of a status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tailbound.observe import status as files
from tailbound.wire.schema import MISSING, Fate, Verdict

Status = Mapping[str, Any]

#: Seconds after which a status that was not replaced says that its process is stopped.
SILENT_AFTER = 2.0
#: Characters of a text in a status that are shown, and advices below the table.
_LONGEST, _ADVICES = 40, 4


class Column(NamedTuple):
    """A column.

    Attributes:
        name: its header.
        side: left or right.
        meaning: for ``--help``.
        show: from a status and an earlier one (None: there is none) to text, or to text and style.
    """

    name: str
    side: Literal["left", "right"]
    meaning: str
    show: Callable[[Status, Status | None], str | tuple[str, str]]


def rows(status: Status, kind: str) -> int:
    """Rows of all peers of a status: ``expected``, ``taken``, or those of a fate."""
    return sum(int(peer[kind]) for peer in status["peers"].values())


def _rate(name: str, scale: float, digits: int) -> Callable[[Status, Status | None], str]:
    def show(now: Status, before: Status | None) -> str:
        seconds = float(now["monotonic"]) - float(before["monotonic"]) if before else 0.0
        if before is None or seconds <= 0:
            return "-"
        return f"{(int(now[name]) - int(before[name])) * scale / seconds:.{digits}f}"

    return show


def _state(now: Status, _: Status | None) -> tuple[str, str]:
    if float(now["age"]) > SILENT_AFTER:
        return f"silent {float(now['age']):.0f} s", "red"
    behind = int(now["behind"])
    return (f"{behind} behind", "red") if behind > 0 else ("ok", "")


def _deadlines(now: Status, _: Status | None) -> str:
    d1, d2, q = (float(now["deadlines_ms"][name]) for name in ("d1", "d2", "q"))
    return f"{d1:.0f}/{d2:.0f}/{q:.1f}"


def _delivered(now: Status, _: Status | None) -> tuple[str, str]:
    share = float(now["delivered"])
    return f"{share:.3%}", "red" if share < 0.98 else "yellow" if share < 0.999 else ""


def _rows(kind: str) -> Callable[[Status, Status | None], str]:
    return lambda now, _: str(rows(now, kind))


def _grown(now: Status, before: Status | None) -> dict[Fate, list[int]]:
    """By fate the peers of whom more rows are missing since the earlier status; without one, since the start."""
    grown: dict[Fate, list[int]] = {}
    for peer, one in now["peers"].items():
        then = before["peers"].get(peer, {}) if before else {}
        for fate in MISSING:
            if int(one[fate]) > int(then.get(fate, 0)):
                grown.setdefault(fate, []).append(int(peer))
    return grown


def _now(now: Status, before: Status | None) -> tuple[str, str]:
    return ", ".join(f"{fate} {_ranks(ranks)}" for fate, ranks in _grown(now, before).items()), "yellow"


def _suspects(now: Status, _: Status | None) -> tuple[str, str]:
    return " ".join(f"{peer}{one['suspect']}" for peer, one in now["peers"].items() if one["suspect"]), "red"


COLUMNS = (
    Column("job", "left", "its number in hexadecimal, as in metrics; shown where there are several jobs",
           lambda now, _: str(now["cookie"])),
    Column("rank", "right", "in its job", lambda now, _: str(int(now["rank"]))),
    Column("state", "left", "ok; steps behind the others; seconds of silence, as of a stopped process", _state),
    Column("op", "right", "the last all-reduce, as step.index", lambda now, _: str(now["op"])),
    Column("op/s", "right", "all-reduces per second", _rate("ops", 1.0, 1)),
    Column("p50 ms", "right", "median time of the last 512, from launch to result",
           lambda now, _: f"{float(now['p50_ms']):.1f}"),
    Column("p99 ms", "right", "their 99th percentile", lambda now, _: f"{float(now['p99_ms']):.1f}"),
    Column("D1/D2/q ms", "right", "learned limits: contributions, results, and silence that ends a half", _deadlines),
    Column("Mb/s", "right", "sent", _rate("sent_bytes", 8e-6, 0)),
    Column("delivered", "right", "share of expected rows that came in time", _delivered),
    Column("missing", "right", f"rows expected and not taken: the sum of {', '.join(MISSING)}",
           lambda now, _: str(rows(now, "expected") - rows(now, "taken"))),
    *(Column(fate.value, "right", fate.meaning, _rows(fate)) for fate in MISSING),
    Column("now", "left", "fates of rows since the last reading, and the peers that should have brought them", _now),
    Column("suspects", "left", "ranks not waited for: 3c for contributions, 3r for results, 3bye after its goodbye",
           _suspects),
    Column("last event", "left", "in the log",
           lambda now, _: str(now["events"][-1]["event"]) if now["events"] else ""),
)  # fmt: skip

#: Columns that give way where there is no room, the first ones first; job, rank and state never do.
GIVE_WAY = (
    "Mb/s", "last event", "D1/D2/q ms", "now", "op", "p50 ms", "missing", "absent", "refused", "lost", "late",
    "suspects", "p99 ms", "op/s", "delivered",
)  # fmt: skip


class Line(NamedTuple):
    """One rank: a cell for each of ``COLUMNS``, and what to do about its missing rows and drops."""

    cells: tuple[Text, ...]
    advice: tuple[str, ...]


def lines(statuses: Iterable[Status], before: Iterable[Status] = ()) -> list[Line]:
    """A line for each status of this version, by job and rank; ``before``: earlier statuses, for rates."""
    earlier = {_identity(status): status for status in before}
    found = []
    for status in statuses:
        try:
            found.append((str(status["cookie"]), int(status["rank"]), _line(status, earlier.get(_identity(status)))))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError):
            continue
    return [line for _, _, line in sorted(found, key=lambda each: each[:2])]


def _line(now: Status, before: Status | None) -> Line:
    cells = []
    for column in COLUMNS:
        shown = column.show(now, before)
        text, style = shown if isinstance(shown, tuple) else (shown, "")
        # root reads files that others have written
        cells.append(Text("".join(c for c in text[:_LONGEST] if c.isprintable()), style))
    dropped = before["drops"] if before else {}
    reasons = [v for v in Verdict if int(now["drops"].get(v.name, 0)) > int(dropped.get(v.name, 0))]
    advice = [f"{fate}: {fate.meaning}. {fate.advice}." for fate in _grown(now, before) if fate != Fate.REFUSED]
    advice += [f"{v.name}: {v.meaning}. {v.advice}." for v in reasons if v.fate in (Fate.REFUSED, Fate.UNTRUSTED)]
    return Line(tuple(cells), tuple(advice))


def _identity(status: Status) -> tuple[str, ...]:
    return tuple(str(status.get(name)) for name in ("cookie", "rank", "pid", "pidns"))  # others wrote them


def table(ranks: Sequence[Line], where: str = "", width: int | None = None) -> Table:
    """One line a rank; errors are red, unusual values yellow; below it what to do about missing rows.

    Args:
        ranks: their lines.
        where: said in the title.
        width: characters of a line; columns beyond it are left out, and the caption counts them. None: no limit.
    """
    names = [column.name for column in COLUMNS]
    needs = {name: max([len(name), *(line.cells[i].cell_len for line in ranks)]) for i, name in enumerate(names)}
    shown, caption = set(names), list(dict.fromkeys(text for line in ranks for text in line.advice))[:_ADVICES]
    if len({line.cells[0].plain for line in ranks}) < 2:
        shown.remove("job")
    everything = _wide(needs[each] for each in shown)
    left_out = 0
    for name in GIVE_WAY:
        if width is None or _wide(needs[each] for each in shown) <= width:
            break
        shown.remove(name)
        left_out += 1
    if left_out:
        caption.insert(0, f"{left_out} more columns in a terminal of {everything} characters")
    made = Table(
        title=f"tailbound: {len(ranks)} rank(s) {where}".rstrip(), title_justify="left", pad_edge=False,
        caption=Text("\n".join(caption)) if caption else None, caption_justify="left",
    )  # fmt: skip
    for column in COLUMNS:
        if column.name in shown:
            made.add_column(column.name, justify=column.side, no_wrap=True)
    last = None
    for line in ranks:
        if last is not None and line.cells[0] != last:
            made.add_section()
        last = line.cells[0]
        made.add_row(*(cell for name, cell in zip(names, line.cells, strict=True) if name in shown))
    return made


def _wide(columns: Iterable[int]) -> int:
    """Characters of a line: a border and a space on both sides of every column, but none at the edges."""
    return sum(need + 3 for need in columns) - 1


def _ranks(ranks: Sequence[int]) -> str:
    shown = " ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown} +{len(ranks) - 6}"


class _Explained(click.Command):
    """Help that explains the columns."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        meanings = "\n".join(f"  {column.name:<10}  {column.meaning}" for column in COLUMNS)
        formatter.write(f"\nColumns:\n{meanings}\n")


@click.command(cls=_Explained, context_settings={"show_default": True})
@click.option("--once", is_flag=True, help="Show one reading and end.")
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=1.0, help="Seconds between readings.")
def top(once: bool, interval: float) -> None:
    """Show every rank on this host: pace, deadlines, and the fates of rows that did not come in time.

    Rates are those between two readings. Rows are counted since the start; «now» has those since the last reading.
    Below the table stands what to do about them. Statuses are read from TAILBOUND_STATUS, or from the usual places.
    """
    where = files.folders()
    readings, named, console = _readings(where, interval, once), ", ".join(map(str, where)), Console()
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


def _readings(where: Sequence[Path], interval: float, once: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """Readings, each with the one before; a single one is made of two, shortly after each other."""
    before: list[dict[str, Any]] = files.read(where)
    if not once:
        yield before, []
    while True:
        if before or not once:
            time.sleep(min(interval, 2.5 * files.PERIOD) if once else interval)
        now = files.read(where)
        yield now, before
        if once:
            return
        before = now
