"""``tailbound bench late``: time of an all-reduce over the delay of one rank that always comes late.

Compared are Gloo and, over its point-to-point messages, a ring and StragglAR, which knows who is late; Tailbound that
waits for everybody (``strict``: deadlines longer than any delay), and Tailbound as it is (``bounded``). Delays are
given in transfer times: what a link needs for the buffer in float32. Time counts from the common start, with the delay
in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tailbound.errors import ConfigError
from tailbound_lab.bench import figures, picture
from tailbound_lab.bench.allreduce import conditions
from tailbound_lab.bench.begin import prepared
from tailbound_lab.bench.late_plot import draw
from tailbound_lab.bench.places import datapath_at
from tailbound_lab.bench.save import save
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.spec import LabSpec

STRICT, BOUNDED = "strict", "bounded"
#: In the order of the table; ours last.
OVER_TCP = ("gloo", "ring", "stragglar")
WAYS = (*OVER_TCP, STRICT, BOUNDED)
#: In transfer times.
DELAYS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
#: Longest delay, ms: what waits for everybody waits longer.
MOST_MS = 1500.0
#: All-reduces with the delay before those that count: for so many ms of lateness, within bounds. That is more than may
#: be waited past deadlines (``transport.overtime``), and enough for rows to be in time.
_LATE_MS, _LEAST, _MOST = 1500.0, 6, 40
#: Seconds without a report: a turn has dozens of all-reduces, and a busy machine takes seconds for each.
_SILENCE = 600.0
#: Who gains on whom, as the delay grows.
_PAIRS = (
    ("stragglar", "ring"),
    ("stragglar", "gloo"),
    (STRICT, "stragglar"),
    (BOUNDED, "stragglar"),
    (BOUNDED, STRICT),
)


def run(
    *,
    workers: Sequence[int] = (4, 8),
    size: int = 8 << 20,
    rate: int = 10**9,
    delays: Sequence[float] = DELAYS,
    iters: int = 12,
    datapath: str = "auto",
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measures, prints tables, writes ``json_file`` after every number of ranks, and the picture; returns the rows.

    Args:
        workers: numbers of ranks; each has a lab of its own. The last rank is late.
        size: bytes of float32.
        rate: of every link in bit/s.
        delays: in transfer times.
        iters: all-reduces of each kind at every delay.
        datapath: ``auto``, ``xdp`` or ``udp``.
        json_file: where the rows go.
        plot: where the picture goes; None: beside ``json_file``, if there is one and matplotlib is there.
        console: where tables go.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    transfer = 8e3 * size / rate
    if not workers or min(workers) < 2 or not delays or min(delays) < 0 or max(delays) * transfer > MOST_MS:
        raise ConfigError(
            f"give two workers or more, and delays of at most {MOST_MS:g} ms ({transfer:g} ms a transfer)"
        )
    if iters < 2 or size < 4096 * max(workers):
        raise ConfigError("give two iterations or more, and 4 KiB for every worker")
    plot = picture.where(plot, json_file, console)
    size -= size % 4
    rows: list[dict[str, Any]] = []
    for count in workers:
        spec = LabSpec(count, rate=rate)
        with prepared(spec, datapath, console) as (place, why_not, line):
            about = conditions(spec, why_not is None) | {"transfer_ms": transfer}
            # a team a delay: what is learned of one says nothing about the next
            for delay in delays:
                StartLine.create(line, count)
                job = {
                    "size": size, "delay_ms": delay * transfer, "iters": iters, "line": str(line),
                    "datapath": datapath_at(place, datapath),
                }  # fmt: skip
                with Team(place, "tailbound_lab.bench.late_worker", job, console, silence=_SILENCE) as team:
                    reports = {rank: message for rank, message in team.gather("times") if message["kind"] == "times"}
                    team.finish()
                rows += summarize(size, delay, [reports[rank] for rank in range(count)], about)
                save(rows, json_file)
                console.print(f"{count} workers, {delay:g} transfer times: done", highlight=False)
        console.print(table([row for row in rows if row["workers"] == count]))
    console.print(breaks_table(breaks(rows)))
    picture.write(draw, rows, plot, console)
    return rows


def warm_ups(name: str, delay_ms: float) -> int:
    """How many all-reduces with the delay come before those that count; waiting for everybody is not learned."""
    if name != BOUNDED or not delay_ms:
        return 1
    return min(_MOST, max(_LEAST, int(_LATE_MS / delay_ms)))


def summarize(
    size: int, delay: float, ranks: Sequence[Mapping[str, Any]], about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of one delay from what every rank reported: by way, ns from the common start to its result."""
    rows = []
    for name in WAYS:
        ends = [report["ends"][name] for report in ranks]
        others = [figures.percentile([ns / 1e6 for ns in figures.slowest(ends[:-1])], p) for p in (50, 99)]
        expected = sum(report["rows"][name][0] for report in ranks) if name not in OVER_TCP else 0
        rows.append(
            {
                "name": name,
                "workers": len(ranks),
                "bytes": size,
                "delay": delay,
                "delay_ms": delay * about["transfer_ms"],
                "others_p50_ms": others[0],
                "others_p99_ms": others[1],
                "all_p50_ms": figures.percentile([ns / 1e6 for ns in figures.slowest(ends)], 50),
                "iters": len(ends[0]),
                "delivered": sum(r["rows"][name][1] for r in ranks) / expected if expected else 1.0,
                **about,
                "datapath": "tcp" if name in OVER_TCP else ranks[0]["datapath"],
            }
        )
    return rows


def crossing(delays: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float | None:
    """The smallest delay from which on ``one`` takes less than ``other`` at all delays measured; None: at none.

    Between two delays times are taken to be straight lines.
    """
    found: float | None = None
    for i in reversed(range(len(delays))):
        gap = other[i] - one[i]
        if gap <= 0:
            if found is None:
                return None
            after = other[i + 1] - one[i + 1]
            return delays[i] + (delays[i + 1] - delays[i]) * -gap / (after - gap)
        found = delays[i]
    return found


def breaks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where each of the pairs breaks even, in transfer times: by the time until the others have their results."""
    found = []
    for workers in dict.fromkeys(row["workers"] for row in rows):
        lines = {
            name: sorted((r["delay"], r["others_p50_ms"]) for r in rows if (r["name"], r["workers"]) == (name, workers))
            for name in WAYS
        }
        for one, other in _PAIRS:
            delays = [delay for delay, _ in lines[one]]
            at = crossing(delays, [ms for _, ms in lines[one]], [ms for _, ms in lines[other]])
            found.append({"workers": workers, "faster": one, "than": other, "from": at})
    return found


def breaks_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each pair."""
    result = Table(title="faster from a delay on, in transfer times", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("workers", "who", "than", "from"):
        result.add_column(heading, justify="right", no_wrap=True)
    for each in found:
        at = "nowhere" if each["from"] is None else f"{each['from']:.2f}"
        result.add_row(str(each["workers"]), each["faster"], each["than"], at)
    return result


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a delay: ms until all but the late rank have the result, by way; what of the rows was in it."""
    first = rows[0]
    title = (
        f"{first['workers']} workers, {first['bytes']} B, a transfer is {first['transfer_ms']:.0f} ms: "
        "ms until the others have it"
    )
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("delay\n", "ms\n", *(f"{name}\n" for name in WAYS), "bounded,\nall", "arrived\n%"):
        result.add_column(heading, justify="right", no_wrap=True)
    for delay in dict.fromkeys(row["delay"] for row in rows):
        by_name = {row["name"]: row for row in rows if row["delay"] == delay}
        result.add_row(
            f"{delay:g}", f"{by_name[STRICT]['delay_ms']:.0f}",
            *(f"{by_name[name]['others_p50_ms']:.0f}" for name in WAYS), f"{by_name[BOUNDED]['all_p50_ms']:.0f}",
            f"{100 * by_name[BOUNDED]['delivered']:.1f}",
        )  # fmt: skip
    return result
