"""``tailbound simulate``: steps of many ranks, what they take and lose, beside the bound of the bandwidth."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import ConfigError
from tailbound.transport.config import FLOOR
from tailbound_lab.bench.calibrate import RATE_SHARE
from tailbound_lab.bench.figures import percentile
from tailbound_lab.bench.table import Columns, save, show
from tailbound_lab.lab.spec import Background
from tailbound_lab.simulate.fabric import S
from tailbound_lab.simulate.layouts import Arrangement, arrange
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.steps import Step, Team

#: Share of the steps that bursts hit, as in ``bench.calibrate``.
_HIT = 0.25
COLUMNS: Columns = {
    "ranks": ("ranks", "d"), "layout": ("layout", ""), "p50_ms": ("p50 ms", ".3g"), "p99_over_p50": ("p99/p50", ".3g"),
    "over_bound": ("/bound", ".3g"), "dropped_percent": ("drop%", ".3g"), "rows_lost_percent": ("lost%", ".3g"),
    "marked_percent": ("ECN%", ".3g"), "mb_rank": ("MB", ".3g"), "messages_rank": ("msgs", ".3g"),
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What is simulated, besides the number of ranks.

    Attributes:
        layout: see ``layouts.arrange``.
        size: bytes of float32 of a rank and step.
        switching: of the network; ``background`` is said by ``tail`` where that is more than one.
        tail: P99/P50 that foreign bursts would give an all-reduce that waits for everything; 1: there are none.
        late: seconds by which the last rank begins every step that counts later.
        steps: that count.
        warm: steps before them, without bursts and with nobody late.
        seed: of everything.
        wait: every rank waits for every row, so long that no deadline matters: what a reliable transport would do.
        settings: of ``transport.config.Config``.
    """

    layout: str = "flat"
    size: int = 1 << 20
    switching: Switching = field(default_factory=Switching)
    tail: float = 1.0
    late: float = 0.0
    steps: int = 40
    warm: int = 12
    seed: int = 1
    wait: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def arrangement(self, ranks: int) -> Arrangement:
        """Return that of ``ranks``; see ``layouts.arrange``."""
        return arrange(self.layout, ranks, self.size // 4)


def bursts(tail: float, p50: float, ranks: int, rate: int) -> Background:
    """Return foreign bursts that lengthen an all-reduce of ``p50`` seconds by ``tail - 1`` of it, as ``bench tail``."""
    on = max(1e-6, (tail - 1) * p50 / RATE_SHARE)
    off = max(1e-3, ranks * (p50 + on) / _HIT)
    return Background(int(rate * RATE_SHARE), on * 1e3, min(3_600_000, off * 1e3))


def bound(arrangement: Arrangement, rate: int) -> float:
    """Return the seconds that the busiest link needs for the codes of both halves, headers apart."""
    codes: Counter[int] = Counter()
    for parts in arrangement.parts:
        for part in parts:
            ranks = len(arrangement.places[part.job])
            codes[arrangement.places[part.job][part.rank]] += 2 * part.entries * (ranks - 1) // ranks
    return max(codes.values()) * 8 / rate


def simulate(ranks: int, wanted: Wanted) -> tuple[Team, list[Step]]:
    """Run the steps of ``ranks``; return the team, closed, and the steps that count."""
    patient = dict.fromkeys(("deadline_1", "deadline_2", "stage_max", "insist"), 30 * S)
    settings = {**wanted.settings, **(patient if wanted.wait else {})}
    team = Team(wanted.arrangement(ranks), wanted.switching, wanted.seed, **settings)
    try:
        calm = [team.step().slowest / S for _ in range(wanted.warm)]
        if wanted.tail > 1:
            usual = percentile(calm[len(calm) // 2 :], 50)
            team.network.begin_bursts(bursts(wanted.tail, usual, team.network.hosts, wanted.switching.rate))
        team.late = int(wanted.late * S)
        return team, [team.step() for _ in range(wanted.steps)]
    finally:
        team.close()


def summarise(ranks: int, wanted: Wanted, steps: Sequence[Step]) -> dict[str, Any]:
    """Return one row of the table."""
    arrangement = wanted.arrangement(ranks)
    times = [step.slowest / S for step in steps]
    p50, p99 = percentile(times, 50), percentile(times, 99)
    packets, expected = sum(step.packets for step in steps), sum(step.expected for step in steps)
    return {
        "ranks": ranks,
        "layout": arrangement.name,
        "buffer_kib": wanted.switching.buffer / 1024,
        "tail": wanted.tail,
        "steps": len(steps),
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "p99_over_p50": p99 / p50,
        "over_bound": p50 / bound(arrangement, wanted.switching.rate),
        "dropped_percent": 100 * sum(step.dropped.get("port", 0) for step in steps) / max(1, packets),
        "rows_lost_percent": 100 * (expected - sum(step.delivered for step in steps)) / max(1, expected),
        "marked_percent": 100 * sum(step.marks for step in steps) / max(1, packets),
        "mb_rank": sum(step.bytes for step in steps) / len(steps) / ranks / 1e6,
        "messages_rank": sum(step.messages for step in steps) / len(steps) / ranks,
        "about": {
            "size": wanted.size,
            "rate": wanted.switching.rate,
            "loss": wanted.switching.loss,
            "wait": wanted.wait,
            "late": wanted.late,
            "floor": wanted.settings.get("floor", FLOOR),
            "seed": wanted.seed,
            "deadlines": sum(step.deadlines for step in steps),
            "step_ms": [step.slowest / 1e6 for step in steps],
        },
    }


def run(
    ranks: Sequence[int], wanted: Wanted, json_file: Path | None = None, console: Console | None = None
) -> list[dict[str, Any]]:
    """Simulate each number of ranks, print a table, and write ``json_file`` after every row; return the rows.

    Raises:
        ConfigError: what is asked for cannot be, or the file cannot be written.
    """
    console = console or Console()
    for number in ranks:  # all of them, before the first takes minutes
        wanted.arrangement(number)
    rows: list[dict[str, Any]] = []
    _save(rows, json_file)
    for number in ranks:
        console.print(f"{number} ranks: {wanted.warm} + {wanted.steps} steps", highlight=False)
        began = time.perf_counter()
        team, steps = simulate(number, wanted)
        rows.append(summarise(number, wanted, steps))
        rows[-1]["about"] |= {
            "background": str(team.network.switching.background or ""),
            "largest_backlog": max(port.most for port in team.network.last_hops),
            "wall_s": time.perf_counter() - began,
        }
        _save(rows, json_file)
    rate, buffer = wanted.switching.rate / 1e9, wanted.switching.buffer / 1024
    title = f"{wanted.size / 1024:g} KiB of float32, {rate:g} Gbit/s, {buffer:g} KiB a port, tail {wanted.tail:g}"
    show(title, rows, COLUMNS, console)
    return rows


def _save(rows: list[dict[str, Any]], path: Path | None) -> None:
    try:
        save(rows, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --json") from error
