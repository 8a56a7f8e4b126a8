"""The table of ``tailbound top``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tailbound.top.rows import Row

#: Header, and what it says to people who do not know it.
COLUMNS = (
    ("rank", "right"), ("state", "left"), ("op", "right"), ("op/s", "right"), ("p50 ms", "right"), ("p99 ms", "right"),
    ("D1/D2/q ms", "right"), ("Mb/s", "right"), ("pace", "right"), ("rtt us", "right"), ("incast", "right"),
    ("map", "left"), ("delivered", "right"), ("late", "right"), ("lost", "right"), ("repaired", "right"),
    ("drops", "right"), ("late now", "left"), ("losing now", "left"), ("suspects", "left"), ("last event", "left"),
)  # fmt: skip


def table(rows: Sequence[Row], where: str = "") -> Table:
    """One line a rank; what is wrong is red, what is unusual yellow."""
    made = Table(title=f"tailbound: {len(rows)} rank(s) {where}".rstrip(), title_justify="left", pad_edge=False)
    for name, side in COLUMNS:
        made.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    last = None
    for row in rows:
        if last is not None and row.job != last:
            made.add_section()
        last = row.job
        made.add_row(*_cells(row))
    return made


def _cells(row: Row) -> list[Text]:
    owner_map = f"{row.map_id}{'' if row.owns else ' owns 0'}{' H' if row.rotate else ''}"
    bad = "red" if row.delivered < 0.98 else "yellow" if row.delivered < 0.999 else ""
    return [
        Text(str(row.rank)),
        Text(row.state, "" if row.state == "ok" else "red"),
        Text(row.op),
        Text(_figure(row.ops_per_s)),
        Text(f"{row.p50_ms:.1f}"),
        Text(f"{row.p99_ms:.1f}"),
        Text(f"{row.d1_ms:.0f}/{row.d2_ms:.0f}/{row.q_ms:.1f}"),
        Text(_figure(row.sent_mbit_s, 0)),
        Text(_figure(row.rate_mbit_s, 0)),
        Text(_figure(row.rtt_us, 0)),
        Text(str(row.incast)),
        Text(owner_map, "" if row.owns else "yellow"),
        Text(f"{row.delivered:.3%}", bad),
        Text(str(row.late + row.absent)),
        Text(str(row.lost)),
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
