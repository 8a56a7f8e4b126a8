"""How far runs of the same benchmark are apart, figure by figure. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

#: Runs whose figures differ by more of the smaller one are not the same.
NEAR = 0.15
#: Of the rows of benchmarks, what is said of them. Counts and shares near nothing are left out.
_FIGURES = (
    "p50_ms", "p99_ms", "others_p50_ms", "exposed_ms", "step_p50_ms", "step_p99_ms", "time_to_accuracy_s", "nmse",
    "test_loss", "lab_p50_ms", "lab_p99_ms", "simulated_p50_ms", "simulated_p99_ms",
)  # fmt: skip
#: And what a row is of.
_NAMES = (
    "kind", "scenario", "model", "env", "name", "trouble", "workers", "ranks", "bytes", "delay", "delay_ms", "data",
    "bits", "pattern", "share", "loss", "rotated", "tail", "seed",
)  # fmt: skip
_EVEN_ZERO = ("seed", "delay", "rotated")
#: What is not said where the first of these is: a tail is measured in an environment, and a delay has two units.
_SAID_BY = {"env": "tail", "delay": "delay_ms"}


class Apart(NamedTuple):
    """One figure of one row.

    Attributes:
        row: what the row is of.
        figure: the name of the figure.
        values: of each run.
    """

    row: str
    figure: str
    values: tuple[float, ...]

    @property
    def by(self) -> float:
        """By what part of the smallest the largest is larger."""
        return max(self.values) / min(self.values) - 1

    @property
    def near(self) -> bool:
        """Whether the runs say the same."""
        return self.by <= NEAR


def compare(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[Apart]:
    """Figures of the rows that all ``runs`` have, in the order of the first."""
    named = [dict(_named(rows)) for rows in runs]
    found = []
    for name, first in named[0].items():
        rows = [run.get(name, {}) for run in named]
        for figure in _FIGURES:
            values = [row.get(figure) for row in rows]
            if figure in first and all(isinstance(value, int | float) and value > 0 for value in values):
                found.append(Apart(name, figure, tuple(map(float, values))))  # type: ignore[arg-type]
    return found


def _named(rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Rows by what they are of; of several of the same name each has a number."""
    seen: Counter[str] = Counter()
    for row in rows:
        left_out = {other for known, other in _SAID_BY.items() if known in row}
        of = {key: row.get(key) for key in _NAMES if key not in left_out}
        parts = [
            value if isinstance(value, str) else f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in of.items()
            if isinstance(value, str | int | float) and (value or key in _EVEN_ZERO)
        ]
        name = " ".join(parts)
        seen[name] += 1
        yield (f"{name} #{seen[name]}" if seen[name] > 1 else name), row


def table(found: Mapping[str, Sequence[Apart]]) -> Table:
    """By measurement: how many figures there are, how many agree, and a line for each that does not, marked ``!``."""
    result = Table(title=f"runs within {NEAR:.0%} of each other", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("measurement", "figure", "runs", "apart"):
        result.add_column(heading, justify="right" if heading == "apart" else "left", overflow="fold")
    for name, all_of in found.items():
        agree = sum(each.near for each in all_of)
        worst = max((each.by for each in all_of), default=0.0)
        result.add_row(name, f"{agree} of {len(all_of)} agree", "", f"{worst:.0%}")
        for each in sorted((each for each in all_of if not each.near), key=lambda each: -each.by):
            values = ", ".join(f"{value:.4g}" for value in each.values)
            result.add_row("", f"! {each.row}: {each.figure}", values, f"{each.by:.0%}")
    return result
