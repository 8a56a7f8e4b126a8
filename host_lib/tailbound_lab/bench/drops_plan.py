"""Which trainings ``tailbound bench drops`` makes, and means of what comes of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from tailbound.errors import ConfigError
from tailbound_lab.bench.losses import PATTERNS, Pattern

#: In the order of the table.
SPREAD = (*PATTERNS[:2], Pattern("one rank", one=True), *PATTERNS[2:])
SHARES = (0.01, 0.05, 0.1, 0.2)
MODELS = ("conv", "gpt")


class Case(NamedTuple):
    """One training; see ``drops_train.train``."""

    model: str
    pattern: Pattern
    share: float
    rotate: bool
    seed: int


def plan(models: Sequence[str], shares: Sequence[float], seeds: int) -> list[Case]:
    """All trainings: nothing lost once, as ``uniform``, then every pattern at every share; rotated and not.

    Raises:
        ConfigError: a share that cannot be, of a burst or of a single rank.
    """
    if seeds < 1 or not models or any(not 0 < share <= 0.2 for share in shares):
        raise ConfigError(
            f"shares {', '.join(map(str, shares))}: give shares above 0 and of at most 0.2, which are four fifths of "
            "what one of four ranks sends and receives"
        )
    losses = [(SPREAD[0], 0.0), *((pattern, share) for share in shares for pattern in SPREAD)]
    return [
        Case(model, pattern, share, rotate, seed)
        for seed in range(1, seeds + 1)
        for model in models
        for pattern, share in losses
        for rotate in (True, False)
    ]


def means(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[tuple[str, float, bool], list[float]]:
    """By pattern, share and rotation: means over seeds of ``keys``."""
    groups: dict[tuple[str, float, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["pattern"], row["share"], row["rotated"]), []).append(row)
    return {case: [fmean(row[key] for row in members) for key in keys] for case, members in groups.items()}
