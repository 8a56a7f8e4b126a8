"""``tailbound simulate``: steps of many ranks, what they take and lose, beside the bound of the bandwidth."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tailbound.errors import ConfigError
from tailbound.transport.config import FLOOR
from tailbound_lab.bench import picture
from tailbound_lab.bench.figures import percentile
from tailbound_lab.bench.save import save
from tailbound_lab.lab.build import RateLimit
from tailbound_lab.lab.spec import Background
from tailbound_lab.simulate.fabric import S
from tailbound_lab.simulate.flows import Flows
from tailbound_lab.simulate.layouts import Arrangement, arrange
from tailbound_lab.simulate.plot import draw
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.steps import Step, Team

#: Of the link's rate, as in ``bench.calibrate``; and the share of steps that bursts hit.
_RATE_SHARE, _HIT = 0.9, 0.25
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LATE = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_SECONDS)}|x)")
#: Of a row, and what a table calls it.
_COLUMNS = {
    "ranks": "ranks",
    "layout": "layout",
    "p50_ms": "p50 ms",
    "p99_over_p50": "p99/p50",
    "over_bound": "/bound",
    "dropped_percent": "drop%",
    "rows_lost_percent": "lost%",
    "marked_percent": "ECN%",
    "mb_rank": "MB",
    "messages_rank": "msgs",
}


class Late(NamedTuple):
    """By how much a rank begins later than the others.

    Attributes:
        seconds: so long.
        steps: and so many times the usual step.
    """

    seconds: float = 0.0
    steps: float = 0.0


def parse_late(text: str) -> Late:
    """A time with its unit (``20ms``), or a multiple of the usual step (``2x``).

    Raises:
        ConfigError: it is neither.
    """
    found = _LATE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"a straggler of {text!r}: write for example 20ms, 1.5s or, in usual steps, 2x")
    number, unit = float(found[1]), found[2]
    return Late(steps=number) if unit == "x" else Late(number * _SECONDS[unit])


@dataclass(frozen=True)
class Wanted:
    """What is simulated, besides the number of ranks.

    Attributes:
        layout: of ``layouts.LAYOUTS``.
        size: bytes of float32 of a rank and step.
        switching: of the network; ``background`` is said by ``tail`` where that is more than one.
        tail: P99/P50 that foreign bursts would give an all-reduce that waits for everything; 1: there are none.
        late: of the last rank in every step that counts; none by default.
        steps: that count.
        warm: steps before them, without bursts and with nobody late.
        seed: of everything.
        wait: every rank waits for every row, so long that no deadline matters: what a reliable transport would do.
        flows: the coarse model (``flows``) in place of the engine.
        group, per_host: see ``layouts.arrange``.
        local_rate, rest: see ``Team``; the coarse model has no rest.
        cut: see ``flows.Flows``; the engine has none.
        settings: of ``transport.config.Config``; the coarse model has ``floor`` alone.
    """

    layout: str = "flat"
    size: int = 1 << 20
    switching: Switching = field(default_factory=Switching)
    tail: float = 1.0
    late: Late | None = None
    steps: int = 40
    warm: int = 12
    seed: int = 1
    wait: bool = False
    flows: bool = False
    cut: float = 0.0
    group: int = 0
    per_host: int = 8
    local_rate: float = 100e9
    rest: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def as_in_the_lab(switching: Switching) -> Switching:
    """The same with the buffers and token buckets that the lab's ports and hosts have at this rate (``lab.build``)."""
    port, host = RateLimit(switching.rate), RateLimit(switching.rate, host=True)
    credit, host_credit = (int(limit.burst / limit.rate * S) for limit in (port, host))
    return replace(switching, buffer=port.limit, credit=credit, host_credit=host_credit)


def bursts(tail: float, p50: float, ranks: int, rate: int) -> Background:
    """Foreign bursts that lengthen an all-reduce of ``p50`` seconds by ``tail - 1`` of it, as in ``bench tail``."""
    on = max(1e-6, (tail - 1) * p50 / _RATE_SHARE)
    off = max(1e-3, ranks * (p50 + on) / _HIT)
    return Background(int(rate * _RATE_SHARE), on * 1e3, min(3_600_000, off * 1e3))


def bound(arrangement: Arrangement, size: int, rate: int, local_rate: float) -> float:
    """Seconds that the busiest link needs for the codes of both halves, headers apart, and a host for its own part."""
    ranks = {job: len(places) for job, places in enumerate(arrangement.places)}
    codes: dict[int, float] = {}
    for parts in arrangement.parts:
        for part in parts:
            host = arrangement.places[part.job][part.rank]
            codes[host] = codes.get(host, 0) + 2 * part.entries * (ranks[part.job] - 1) / ranks[part.job]
    local = 2 * size * 8 / local_rate if arrangement.local else 0.0
    return max(codes.values()) * 8 / rate + local


def simulate(ranks: int, wanted: Wanted, told: Callable[[Step, bool], None]) -> tuple[Team | Flows, float]:
    """Runs the steps of ``ranks``; ``told`` gets each, and whether it counts.

    Returns:
        The team, closed, and the seconds that a step takes at least.

    Raises:
        ConfigError: the coarse model does not have what is asked for.
    """
    arrangement = arrange(wanted.layout, ranks, wanted.size // 4, group=wanted.group, per_host=wanted.per_host)
    switching = wanted.switching
    least = bound(arrangement, wanted.size, switching.rate, wanted.local_rate)
    team: Team | Flows
    if wanted.flows:
        racks = switching.rack or arrangement.local
        if racks or wanted.wait or wanted.late or switching.loss or switching.mark:
            raise ConfigError(
                "--flows has no racks, hosts, ECN, losses besides, straggler, or --wait: leave out these or "
                "leave out --flows"
            )
        team = Flows(arrangement, switching, wanted.seed, cut=wanted.cut, **wanted.settings)
    else:
        settings = {**wanted.settings, **({"strict": 30 * S} if wanted.wait else {})}
        team = Team(arrangement, switching, wanted.seed, local_rate=wanted.local_rate, rest=wanted.rest, **settings)
    try:
        calm = []
        for _ in range(wanted.warm):
            step = team.step()
            calm.append(step.slowest / S)
            told(step, False)
        usual = percentile(calm[len(calm) // 2 :], 50)
        if wanted.tail > 1:
            hosts = len({host for places in arrangement.places for host in places})
            team.begin_bursts(bursts(wanted.tail, usual, hosts, switching.rate))
        if wanted.late is not None and isinstance(team, Team):
            team.late = int((wanted.late.seconds + wanted.late.steps * usual) * S)
        for _ in range(wanted.steps):
            told(team.step(), True)
    finally:
        team.close()
    return team, least


def summarise(ranks: int, wanted: Wanted, steps: Sequence[Step], least: float, name: str) -> dict[str, Any]:
    """One row of the table."""
    times = [step.slowest / S for step in steps]
    p50, p99 = percentile(times, 50), percentile(times, 99)
    packets = sum(step.packets for step in steps)
    dropped: dict[str, int] = {}
    for step in steps:
        for where, count in step.dropped.items():
            dropped[where] = dropped.get(where, 0) + count
    at_ports = dropped.get("port", 0) + dropped.get("spine", 0)
    expected = sum(step.expected for step in steps)
    lost = expected - sum(step.delivered for step in steps)
    return {
        "ranks": ranks,
        "layout": name,
        "buffer_kib": wanted.switching.buffer / 1024,
        "tail": wanted.tail,
        "steps": len(steps),
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "p99_over_p50": p99 / p50,
        "over_bound": p50 / least,
        "dropped_percent": 100 * at_ports / max(1, packets),
        "rows_lost_percent": 100 * lost / max(1, expected),
        "marked_percent": 100 * sum(step.marks for step in steps) / max(1, packets),
        "mb_rank": sum(step.bytes for step in steps) / len(steps) / ranks / 1e6,
        "messages_rank": sum(step.messages for step in steps) / len(steps) / ranks,
    }


def run(
    ranks: Sequence[int],
    *wanted: Wanted,
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Simulates each number of ranks of each that is ``wanted``; returns the rows.

    A table is printed for each of these, and ``json_file`` is written after every row. Whoever interrupts it gets what
    there is.

    Args:
        ranks: how many.
        wanted: what is simulated.
        json_file: where the rows go.
        plot: where the picture goes; None: beside ``json_file``, if there is one and matplotlib is there.
        console: where tables go.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be, or the file cannot be written.
    """
    console = console or Console()
    for each in wanted:  # all of them, before the first takes minutes
        for number in ranks:
            arrange(each.layout, number, each.size // 4, group=each.group, per_host=each.per_host)
        if each.cut and not each.flows:
            raise ConfigError("--cut is of the coarse model: give --flows, too")
        if each.tail < 1 or each.steps < 1 or each.warm < 1 or each.switching.oversubscription < 1:
            raise ConfigError("give a tail of 1 or more, an oversubscription of 1 or more, and steps")
    plot = picture.where(plot, json_file, console)
    rows: list[dict[str, Any]] = []
    _save(rows, json_file)
    for each in wanted:
        _run(ranks, each, rows, json_file, console)
    picture.write(draw, rows, plot, console)
    return rows


def _run(
    ranks: Sequence[int], wanted: Wanted, rows: list[dict[str, Any]], json_file: Path | None, console: Console
) -> None:
    """Adds a row for each number of ranks."""
    counted: list[Step] = []
    before = len(rows)
    try:
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            for number in ranks:
                counted.clear()
                task = progress.add_task(f"{number} ranks", total=wanted.warm + wanted.steps)

                def told(step: Step, counts: bool, task: Any = task) -> None:
                    progress.advance(task)
                    if counts:
                        counted.append(step)

                began = time.perf_counter()
                team, least = simulate(number, wanted, told)
                rows.append(_row(number, wanted, counted, least, team, began))
                _save(rows, json_file)
                progress.remove_task(task)
    except KeyboardInterrupt:
        if counted and len(rows) - before < len(ranks):
            number = ranks[len(rows) - before]
            arranged = arrange(wanted.layout, number, wanted.size // 4, group=wanted.group, per_host=wanted.per_host)
            least = bound(arranged, wanted.size, wanted.switching.rate, wanted.local_rate)
            rows.append(summarise(number, wanted, counted, least, arranged.name) | {"interrupted": True})
            _save(rows, json_file)
            console.print(f"interrupted: {number} ranks have {len(counted)} of {wanted.steps} steps", highlight=False)
        raise
    finally:
        console.print(table(rows[before:], wanted))


def table(rows: Sequence[dict[str, Any]], wanted: Wanted) -> Table:
    """The rows as a table of 80 columns."""
    rate, buffer = wanted.switching.rate / 1e9, wanted.switching.buffer / 1024
    title = f"{wanted.size / 1024:g} KiB of float32, {rate:g} Gbit/s, {buffer:g} KiB a port, tail {wanted.tail:g}"
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for key, short in _COLUMNS.items():
        out.add_column(short, justify="left" if key == "layout" else "right", no_wrap=True)
    for row in rows:
        out.add_row(*(f"{value:.3g}" if isinstance(value := row[key], float) else str(value) for key in _COLUMNS))
    return out


def _row(
    number: int, wanted: Wanted, steps: Sequence[Step], least: float, team: Team | Flows, began: float
) -> dict[str, Any]:
    name = f"{team.arrangement.name} ~" if wanted.flows else team.arrangement.name
    row = summarise(number, wanted, steps, least, name)
    about = {
        "size": wanted.size,
        "rate": wanted.switching.rate,
        "oversubscription": wanted.switching.oversubscription,
        "rack": wanted.switching.rack,
        "loss": wanted.switching.loss,
        "background": str(team.background or ""),
        "wait": wanted.wait,
        "late": wanted.late and wanted.late._asdict(),
        "cut": wanted.cut,
        "floor": wanted.settings.get("floor", FLOOR),
        "flows": wanted.flows,
        "seed": wanted.seed,
        "deadlines": sum(step.deadlines for step in steps),
        "largest_backlog": team.largest_backlog,
        "step_ms": [step.slowest / 1e6 for step in steps],
        "wall_s": time.perf_counter() - began,
    }
    return row | {"about": about}


def _save(rows: list[dict[str, Any]], path: Path | None) -> None:
    try:
        save(rows, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --json") from error
