"""The table of ``tailbound top``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from tailbound.top.rows import Row

#: Header, side, and its meaning.
COLUMNS = (
    ("job", "left", "its number in hexadecimal, as in metrics; shown where there are several jobs"),
    ("rank", "right", "in its job"),
    ("state", "left", "ok; steps behind the others; seconds of silence, as of a stopped process"),
    ("op", "right", "the last all-reduce, as step.index"),
    ("op/s", "right", "all-reduces per second"),
    ("p50 ms", "right", "median time of the last 512, from launch to result"),
    ("p99 ms", "right", "their 99th percentile"),
    ("D1/D2/q ms", "right", "learned limits: contributions, results, and silence before a probe"),
    ("cores ms", "right", "waits for a processor: another rank's answer, own wake-up, own op at most"),
    ("Mb/s", "right", "sent"),
    ("pace", "right", "Mbit/s to the slowest paced peer"),
    ("rtt us", "right", "longest round trip to a peer"),
    ("incast", "right", "peers whose packets this rank takes at once"),
    ("map", "left", "number of the owner map; H: rows are rotated; owns 0: sums no rows"),
    ("delivered", "right", "share of expected rows that came in time"),
    ("late", "right", "rows that came too late, or not yet"),
    ("lost", "right", "rows that the network lost"),
    ("refused", "right", "rows that came and were refused"),
    ("repaired", "right", "lost rows that came when asked for again"),
    ("drops", "right", "packets that the datapath refused"),
    ("late now", "left", "ranks with late rows since the last reading"),
    ("losing now", "left", "ranks with lost rows since the last reading"),
    ("suspects", "left", "ranks not waited for: 3c for contributions, 3r for results, 3bye after its goodbye"),
    ("last event", "left", "in the log"),
)


#: Columns that give way where there is no room, the first ones first; job, rank and state never do.
GIVE_WAY = (
    "incast", "map", "pace", "rtt us", "cores ms", "drops", "repaired", "Mb/s", "last event", "D1/D2/q ms", "late now",
    "losing now", "op", "p50 ms", "refused", "lost", "late", "suspects", "p99 ms", "op/s", "delivered",
)  # fmt: skip


def table(rows: Sequence[Row], where: str = "", width: int | None = None) -> Table:
    """One line a rank; what is wrong is red, what is unusual yellow.

    Args:
        rows: of the ranks.
        where: said in the title.
        width: characters of a line; columns beyond it are left out, and said to be. None: as many as it takes.
    """
    cells = [_cells(row) for row in rows]
    names = [name for name, _, _ in COLUMNS]
    needs = {name: max([len(name), *(line[i].cell_len for line in cells)]) for i, name in enumerate(names)}
    shown, left_out = set(names), 0
    if len({row.job for row in rows}) < 2:
        shown.remove("job")
    everything = _wide(needs[each] for each in shown)
    for name in GIVE_WAY:
        if width is None or _wide(needs[each] for each in shown) <= width:
            break
        shown.remove(name)
        left_out += 1
    made = Table(
        title=f"tailbound: {len(rows)} rank(s) {where}".rstrip(), title_justify="left", pad_edge=False,
        caption=f"{left_out} more columns in a terminal of {everything} characters" if left_out else None,
        caption_justify="left",
    )  # fmt: skip
    for name, side, _ in COLUMNS:
        if name in shown:
            made.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    last = None
    for row, line in zip(rows, cells, strict=True):
        if last is not None and row.job != last:
            made.add_section()
        last = row.job
        made.add_row(*(cell for name, cell in zip(names, line, strict=True) if name in shown))
    return made


def meanings() -> str:
    """What the columns say, a line each."""
    return "\n".join(f"  {name:<10}  {meaning}" for name, _, meaning in COLUMNS)


def _wide(columns: Iterable[int]) -> int:
    """Characters of a line: a border and a space on both sides of every column, but none at the edges."""
    return sum(need + 3 for need in columns) - 1


def _cells(row: Row) -> list[Text]:
    owner_map = f"{row.map_id}{'' if row.owns else ' owns 0'}{' H' if row.rotate else ''}"
    bad = "red" if row.delivered < 0.98 else "yellow" if row.delivered < 0.999 else ""
    return [
        Text(row.job),
        Text(str(row.rank)),
        Text(row.state, "" if row.state == "ok" else "red"),
        Text(row.op),
        Text(_figure(row.ops_per_s)),
        Text(f"{row.p50_ms:.1f}"),
        Text(f"{row.p99_ms:.1f}"),
        Text(f"{row.d1_ms:.0f}/{row.d2_ms:.0f}/{row.q_ms:.1f}"),
        Text(f"{row.answer_ms:.0f}/{row.woke_late_ms:.0f}/{row.lack_ms:.0f}"),
        Text(_figure(row.sent_mbit_s, 0)),
        Text(_figure(row.rate_mbit_s, 0)),
        Text(_figure(row.rtt_us, 0)),
        Text(str(row.incast)),
        Text(owner_map, "" if row.owns else "yellow"),
        Text(f"{row.delivered:.3%}", bad),
        Text(str(row.late + row.absent)),
        Text(str(row.lost)),
        Text(str(row.refused)),
        Text(str(row.repaired)),
        Text(str(row.drops)),
        Text(_ranks(row.late_ranks), "yellow"),
        Text(_ranks(row.losing_ranks), "yellow"),
        Text(" ".join(row.suspects), "red"),
        Text(row.event),
    ]


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = " ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown} +{len(ranks) - 6}"
