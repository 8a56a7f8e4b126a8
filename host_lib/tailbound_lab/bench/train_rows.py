"""From the reports of the ranks of a training to rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tailbound_lab.bench.curve import Curve
from tailbound_lab.bench.figures import percentile
from tailbound_lab.bench.meter import per_op
from tailbound_lab.bench.table import Columns
from tailbound_lab.bench.train_plan import OVER_TCP, Scenario

#: Parts of a step as workers report them.
PARTS = ("forward", "backward", "update")
COLUMNS: Columns = {
    "name": ("\nwho", ""), "steps": ("\n n", "d"), "steps_per_s": ("steps\n/s", ".2f"),
    "step_p50_ms": ("p50\nms", ".0f"), "step_p99_ms": ("p99\nms", ".0f"), "forward_ms": ("fwd\nms", ".0f"),
    "backward_ms": ("bwd\nms", ".0f"), "update_ms": ("opt\nms", ".0f"), "cpu_ms": ("CPU\nms", ".0f"),
    "busy": ("busy\n", ".0%"), "accuracy": ("accuracy\n", ".2%"), "delivered": ("arrived\n%", "%"),
    "deadline_hits": ("late\n", "d"),
}  # fmt: skip


@dataclass
class Record:
    """One variant's training with one seed.

    Attributes:
        curve: step times of the slowest rank, and accuracies of the worst replica.
        wall: seconds of its turns, from the common start to the end of the last rank.
        busy: seconds of processor time of the whole machine in these.
        parts: seconds of every step's parts, the mean of the ranks.
        losses: of every step's batch, the mean of the ranks.
    """

    curve: Curve = field(default_factory=Curve)
    wall: float = 0.0
    busy: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    losses: list[float] = field(default_factory=list)

    def add(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Takes in one turn as every rank reported it: ``steps`` (seconds of each part), ``losses``, ``wall`` ..."""
        self.wall += max(report["wall"] for report in reports)
        self.busy += reports[0]["busy"]
        for number in range(len(reports[0]["steps"])):
            for at, part in enumerate(PARTS):
                self.parts[part].append(fmean(report["steps"][number][at] for report in reports))
        self.losses += [fmean(losses) for losses in zip(*(report["losses"] for report in reports), strict=True)]
        times = [[sum(step) for step in report["steps"]] for report in reports]
        looked = all(report["accuracy"] is not None for report in reports)
        self.curve.add(times, [report["accuracy"] for report in reports] if looked else None)


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
        name: of the variant.
        record: its training.
        ends: every rank's reports of ``Course.begin`` and ``Course.run``.
        scenario: what was asked for.
        seed: of data and weights.
        settings: of the network (``loss``, ``rate``, ``cpus`` ...).
    """
    ms = [1e3 * seconds for seconds in record.curve.iterations]
    done = len(ms)
    ours = name == "tailbound"
    expected = sum(end["expected"] for end in ends) if ours else 0
    points = record.curve.points
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
        "time_to_accuracy_s": record.curve.time_to(0.95),
        "step_p50_ms": percentile(ms, 50) if ms else None,
        "step_p99_ms": percentile(ms, 99) if ms else None,
        "step_max_ms": max(ms) if ms else None,
        **{f"{part}_ms": 1e3 * fmean(times) if times else None for part, times in record.parts.items()},
        **per_op((entry for end in ends for entry in end["spent"]), name),
        "busy": record.busy / record.wall / settings["cpus"] if done else None,
        "batch": scenario.batch,
        "device": scenario.device,
        "gradient_bytes": ends[0]["gradient_bytes"],
        "delivered": sum(end["delivered"] for end in ends) / expected if expected else 1.0,
        "deadline_hits": sum(end["deadline_hits"] for end in ends) if ours else 0,
        "datapath": _path(name, ends),
        "curve": {"seconds": [s for s, _ in points], "accuracy": [a for _, a in points]},
        "step_ms": ms,
        "step_end_ms": [1e3 * seconds for seconds in record.curve.ends],
        "step_loss": record.losses,
    }  # fmt: skip


def _path(name: str, ends: Sequence[Mapping[str, Any]]) -> str | None:
    """What carried the averages of a variant; None where nothing did."""
    if name == "tailbound":
        return "+".join(sorted({end["datapath"] for end in ends}))
    return "tcp" if name in OVER_TCP else None


def title(first: Mapping[str, Any]) -> str:
    """Return the head of the table of one training; times are those of a step, CPU that of a rank."""
    rate = f", {first['rate'] / 1e6:g} Mbit/s" if first["rate"] else ""
    trouble = f"tail {first['tail']:g}" if first.get("tail") else f"loss {first['loss']:.1%}"
    size = first["gradient_bytes"] / 1e6
    head = f"{first['scenario']}: {first['workers']} workers, {size:.1f} MB of gradients{rate}"
    return f"{head}, {trouble}, seed {first['seed']}"
