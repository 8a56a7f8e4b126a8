"""Time to the loss that plain DDP reaches: from the losses of single steps to who was there when. Pure.

All variants of a seed train on the same batches from the same weights, so that the noise of batches is the same in all
of their losses, and differences are the averages' own. Losses are smoothed over ``WINDOW`` steps. The target is Gloo's
smoothed loss after ``SHARE`` of its steps, before the end, since who is a little behind needs room to get there. Who
does not get there in all of its steps is *censored*: its time is longer than its training was, and no more is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

from tailbound_lab.bench.channel import GLOO

#: Steps that a smoothed loss is the mean of; a sixth of all where that is less.
WINDOW = 20
#: Of Gloo's steps, after which its loss is the target.
SHARE = 0.75


class Arrival(NamedTuple):
    """When one variant reached the target.

    Attributes:
        scenario, tail, seed, name: of which training.
        target: the loss.
        seconds: until it was reached; of who did not reach it, how long was trained.
        reached: whether it was.
        over_plain: ``seconds`` over Gloo's; at least so much, if the target was not reached.
    """

    scenario: str
    tail: float
    seed: int
    name: str
    target: float
    seconds: float
    reached: bool
    over_plain: float


def window_of(steps: int) -> int:
    """Return the steps to smooth a training of ``steps`` over."""
    return max(1, min(WINDOW, steps // 6))


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Return the mean of every step and the ``window`` - 1 before it, from step ``window`` - 1 on."""
    sums = [0.0, *accumulate(losses)]
    return [(sums[at] - sums[at - window]) / window for at in range(window, len(sums))]


def first_below(losses: Sequence[float], target: float, window: int) -> int | None:
    """Return the steps after which the smoothed loss was at most ``target`` for the first time; None: never."""
    return next((at + window for at, loss in enumerate(smoothed(losses, window)) if loss <= target), None)


def target_of(losses: Sequence[float], window: int) -> float:
    """Return the smoothed loss after ``SHARE`` of the steps."""
    steps = max(window, round(SHARE * len(losses)))
    return fmean(losses[steps - window : steps])


def arrivals(rows: Iterable[Mapping[str, Any]]) -> list[Arrival]:
    """Return those of all rows of trainings under bursts; a seed without a whole training of Gloo has none."""
    trainings: dict[tuple[str, float, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["tail"] is not None:
            trainings.setdefault((row["scenario"], row["tail"], row["seed"]), {})[row["name"]] = row
    found = []
    for (scenario, tail, seed), by_name in trainings.items():
        plain = by_name.get(GLOO)
        if plain is None or not plain["complete"]:
            continue
        window = window_of(plain["steps"])
        target = target_of(plain["step_loss"], window)
        times = {name: _time(row, target, window) for name, row in by_name.items()}
        base = times[GLOO][0]
        for name, (seconds, reached) in times.items():
            found.append(Arrival(scenario, tail, seed, name, target, seconds, reached, seconds / base))
    return found


def _time(row: Mapping[str, Any], target: float, window: int) -> tuple[float, bool]:
    """Seconds to ``target``, and whether it was reached."""
    steps = first_below(row["step_loss"], target, window)
    ends = row["step_end_ms"][:steps]  # and not the sum of step_ms, see ``curve``
    return ends[-1] / 1e3 if ends else 0.0, steps is not None


def lines(found: Sequence[Arrival]) -> list[dict[str, Any]]:
    """Return a row of a table for every variant and tail: means over seeds, each ratio, how many seeds got there."""
    rows, groups = [], dict[tuple[str, float, str], list[Arrival]]()
    for each in found:
        groups.setdefault((each.scenario, each.tail, each.name), []).append(each)
    for (scenario, tail, name), members in groups.items():
        there = sum(each.reached for each in members)
        more = "" if there == len(members) else "> "
        rows.append(
            {
                "what": scenario, "tail": tail, "who": name,
                "s": f"{more}{fmean(each.seconds for each in members):.1f}",
                "/gloo": f"{more}{fmean(each.over_plain for each in members):.2f}",
                "each seed": " ".join(f"{'' if each.reached else '>'}{each.over_plain:.2f}" for each in members),
                "there": f"{there}/{len(members)}",
            }
        )  # fmt: skip
    return rows
