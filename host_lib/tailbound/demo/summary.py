"""From what the ranks reported to the figures of the demo. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.bench.figures import percentile, slowest

#: Accuracy whose time is told.
TARGET = 0.95


@dataclass
class Curve:
    """One training as it went.

    Attributes:
        iterations: seconds of every step (the slowest rank's).
        points: (seconds of training, accuracy of the worst replica) at every look, the first before any step.
    """

    iterations: list[float] = field(default_factory=list)
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, times: Sequence[Sequence[float]], accuracies: Sequence[float]) -> None:
        """Takes one look: times of the steps before it by rank and step, accuracies by rank."""
        self.iterations += slowest(times)
        self.points.append((sum(self.iterations), min(accuracies)))

    @property
    def seconds(self) -> float:
        """Training time."""
        return sum(self.iterations)

    @property
    def accuracy(self) -> float:
        """At the end."""
        return self.points[-1][1]

    def time_to(self, accuracy: float) -> float | None:
        """Seconds until ``accuracy`` was reached for the first time; None if it never was."""
        return next((seconds for seconds, reached in self.points if reached >= accuracy), None)

    def figures(self) -> dict[str, Any]:
        """What is told of it."""
        ms = [1e3 * seconds for seconds in self.iterations]
        return {
            "accuracy": self.accuracy,
            "iter_p50_ms": percentile(ms, 50),
            "iter_p99_ms": percentile(ms, 99),
            "iter_max_ms": max(ms),
            "time_to_accuracy_s": self.time_to(TARGET),
            "training_s": self.seconds,
        }

    def curve(self) -> dict[str, list[float]]:
        """The points of the picture."""
        return {
            "seconds": [s for s, _ in self.points],
            "accuracy": [a for _, a in self.points],
            "iteration_end_s": list(accumulate(self.iterations)),
        }


def differences(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Counters that have grown, by how much."""
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in grown.items() if count}


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counters summed by name, largest first."""
    sums: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def delivery(warm: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of rows and packets after the warm-up, over all ranks.

    Args:
        warm, last: every rank's statistics after the warm-up and at the end.
    """
    counters = total(differences(w["counters"], s["counters"]) for w, s in zip(warm, last, strict=True))
    expected = counters.get("rows_expected", 0)
    return {
        "delivered": counters.get("rows_delivered", 0) / expected if expected else 1.0,
        "ops": counters.get("ops", 0),
        "ops_incomplete": counters.get("ops_incomplete", 0),
        "deadline_hits": counters.get("seal_deadline_hits", 0) + counters.get("result_deadline_hits", 0),
        "drops": total(differences(w["drops"], s["drops"]) for w, s in zip(warm, last, strict=True)),
        "rows_summed": sum(int(s["rows_summed"]) for s in last),
    }


def drift(weights: Sequence[NDArray[np.float32]]) -> float:
    """Largest distance of a replica from the mean of all, relative to the length of that mean ([n] each)."""
    mean = np.mean(np.stack(weights), axis=0, dtype=np.float64)
    return float(max(np.linalg.norm(w - mean) for w in weights) / np.linalg.norm(mean))
