"""One training as it went: its steps, its accuracy, and how much time had passed. Pure.

How long a step takes is said by its slowest rank, but time is not the sum of that: where ranks need not wait for each
other, each may stand still in another step, and all of them at once. Time runs from where all ranks began together
until the last of them is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tailbound_lab.bench.figures import percentile, slowest

#: Accuracy whose time is told.
TARGET = 0.95
#: Looks that the settled accuracy is the mean of.
_LAST_LOOKS = 3


@dataclass
class Curve:
    """One training as it went.

    Attributes:
        iterations: seconds of every step (the slowest rank's).
        ends: seconds of training at the end of every step (the last rank's).
        points: (seconds of training, accuracy of the worst replica) at every look, the first before any step.
    """

    iterations: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, times: Sequence[Sequence[float]], accuracies: Sequence[float] | None = None) -> None:
        """Takes steps that all ranks began together: times by rank and step; after a look, accuracies by rank."""
        begin = self.seconds
        self.iterations += slowest(times)
        self.ends += [begin + max(at) for at in zip(*map(accumulate, times), strict=True)]
        if accuracies is not None:
            self.points.append((self.seconds, min(accuracies)))

    @property
    def settled(self) -> float:
        """Mean accuracy of the last looks: at a constant learning rate a single one swings by a point or two."""
        last = [accuracy for _, accuracy in self.points[-_LAST_LOOKS:]]
        return sum(last) / len(last)

    @property
    def seconds(self) -> float:
        """Training time."""
        return self.ends[-1] if self.ends else 0.0

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
            "settled_accuracy": self.settled,
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
            "iteration_end_s": self.ends,
        }
