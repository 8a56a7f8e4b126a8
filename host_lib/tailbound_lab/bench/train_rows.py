"""From the reports of the ranks of a training to rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Any

from tailbound_lab.bench.figures import percentile, slowest
from tailbound_lab.bench.meter import per_op
from tailbound_lab.bench.table import Columns
from tailbound_lab.bench.train_plan import Scenario

#: Accuracy whose time is told.
TARGET = 0.95
COLUMNS: Columns = {
    "name": ("\nwho", ""), "steps": ("\n n", "d"), "steps_per_s": ("steps\n/s", ".2f"),
    "step_p50_ms": ("p50\nms", ".0f"), "step_p99_ms": ("p99\nms", ".0f"), "cpu_ms": ("CPU\nms", ".0f"),
    "busy": ("busy\n", ".0%"), "accuracy": ("accuracy\n", ".2%"), "delivered": ("arrived\n%", "%"),
    "deadline_hits": ("late\n", "d"),
}  # fmt: skip


@dataclass
class Record:
    """One variant's training with one seed.

    A step takes as long as its slowest rank, but time is not the sum of that: where ranks need not wait for each other,
    each may stand still in another step, and all of them at once. Time runs from where all ranks began together until
    the last of them is through.

    Attributes:
        iterations: seconds of every step (the slowest rank's).
        ends: seconds of training at the end of every step (the last rank's).
        points: (seconds of training, accuracy of the worst replica) at every look, the first before any step.
        wall: seconds of its turns, from the common start to the end of the last rank.
        busy: seconds of processor time of the whole machine in these.
        losses: of every step's batch, the mean of the ranks.
    """

    iterations: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    points: list[tuple[float, float]] = field(default_factory=list)
    wall: float = 0.0
    busy: float = 0.0
    losses: list[float] = field(default_factory=list)

    def add(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Takes in one turn as every rank reported it: ``steps`` (seconds), ``losses``, ``wall`` ..."""
        begin = self.seconds
        self.wall += max(report["wall"] for report in reports)
        self.busy += reports[0]["busy"]
        self.losses += [fmean(losses) for losses in zip(*(report["losses"] for report in reports), strict=True)]
        times = [report["steps"] for report in reports]
        self.iterations += slowest(times)
        self.ends += [begin + max(at) for at in zip(*map(accumulate, times), strict=True)]
        if all(report["accuracy"] is not None for report in reports):
            self.points.append((self.seconds, min(report["accuracy"] for report in reports)))

    @property
    def seconds(self) -> float:
        """Training time."""
        return self.ends[-1] if self.ends else 0.0

    def time_to(self, accuracy: float) -> float | None:
        """Seconds until ``accuracy`` was reached for the first time; None if it never was."""
        return next((seconds for seconds, reached in self.points if reached >= accuracy), None)


class Turns:
    """Trainings of several variants in turn, as ``ranks`` report them; ``records`` has them by variant."""

    def __init__(self, names: Iterable[str], ranks: int) -> None:
        self.records = {name: Record() for name in names}
        self._ranks = ranks
        self._open: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}

    def add(self, rank: int, message: dict[str, Any]) -> str | None:
        """Takes in a report; returns the variant whose turn is complete now, if any."""
        if message["kind"] != "turn":
            return None
        key = name, _ = message["name"], message["number"]
        turn = self._open.setdefault(key, {})
        turn[rank] = message
        if len(turn) < self._ranks:
            return None
        del self._open[key]
        self.records[name].add([turn[each] for each in sorted(turn)])
        return str(name)


def row(
    name: str,
    record: Record,
    ends: Sequence[Mapping[str, Any]],
    scenario: Scenario,
    seed: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The row of one variant with one seed.

    Args:
        ends: every rank's reports of ``Course.begin`` and ``Course.run``.
        settings: of the network (``loss``, ``rate``, ``cpus`` ...).
    """
    ms = [1e3 * seconds for seconds in record.iterations]
    done = len(ms)
    ours = name == "tailbound"
    expected = sum(end["expected"] for end in ends) if ours else 0
    points = record.points
    return {
        "name": name,
        "scenario": scenario.name,
        "model": scenario.model,
        "workers": scenario.workers,
        **settings,
        "seed": seed,
        "steps": done,
        "complete": done == scenario.steps,
        "steps_per_s": done / record.wall if done else 0.0,
        "accuracy": points[-1][1] if points else None,
        "time_to_accuracy_s": record.time_to(TARGET),
        "step_p50_ms": percentile(ms, 50) if ms else None,
        "step_p99_ms": percentile(ms, 99) if ms else None,
        "step_max_ms": max(ms) if ms else None,
        **per_op((entry for end in ends for entry in end["spent"]), name),
        "busy": record.busy / record.wall / settings["cpus"] if done else None,
        "batch": scenario.batch,
        "device": scenario.device,
        "gradient_bytes": ends[0]["gradient_bytes"],
        "delivered": sum(end["delivered"] for end in ends) / expected if expected else 1.0,
        "deadline_hits": sum(end["deadline_hits"] for end in ends) if ours else 0,
        "datapath": "+".join(sorted({end["datapath"] for end in ends})) if ours else "tcp",
        "curve": {"seconds": [s for s, _ in points], "accuracy": [a for _, a in points]},
        "step_ms": ms,
        "step_end_ms": [1e3 * seconds for seconds in record.ends],
        "step_loss": record.losses,
    }  # fmt: skip


def title(first: Mapping[str, Any]) -> str:
    """Return the head of the table of one training; times are those of a step, CPU that of a rank."""
    rate = f", {first['rate'] / 1e6:g} Mbit/s" if first["rate"] else ""
    trouble = f"tail {first['tail']:g}" if first.get("tail") else f"loss {first['loss']:.1%}"
    size = first["gradient_bytes"] / 1e6
    head = f"{first['scenario']}: {first['workers']} workers, {size:.1f} MB of gradients{rate}"
    return f"{head}, {trouble}, seed {first['seed']}"
