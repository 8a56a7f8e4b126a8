"""Two ways to average in one lab, in turn: what an interface can carry only one at a time takes turns by teams.

A worker's interface holds one program, and a run of workers one cookie in the switch, so the ways cannot share a
process as Tailbound and Gloo do. Teams of fresh processes alternate instead, in blocks of iterations; every block warms
up on its own, and who begins alternates too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Tailbound in turn with itself, while nothing slows its senders down.
UNPACED = "unpaced"
#: Blocks of each way at most.
BLOCKS = 4

#: Reports by size and rank.
Reports = dict[int, list[dict[str, Any]]]


def blocks(iters: int) -> list[int]:
    """Iterations of every block: at most ``BLOCKS`` of them, none empty."""
    count = min(BLOCKS, iters)
    return [iters // count + (i < iters % count) for i in range(count)]


def in_turn(ways: Mapping[str, str], iters: int, measure: Callable[[str, int], Reports]) -> Reports:
    """Measures ``ways`` (row name: datapath) in blocks; ``measure(datapath, iters)`` runs a team.

    Returns:
        Reports of each size and rank, whose ``times``, ``nmse`` and so on are those of all ways by row name.
    """
    merged: dict[int, list[dict[str, Any]]] = {}
    for number, length in enumerate(blocks(iters)):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            for size, ranks in measure(ways[name], length).items():
                into = merged.setdefault(size, [{} for _ in ranks])
                for rank, report in enumerate(ranks):
                    add(into[rank], name, report)
    return merged


def add(into: dict[str, Any], name: str, report: Mapping[str, Any]) -> None:
    """Adds one rank's report of a block, in which Tailbound ran as ``name``."""
    for list_of in ("times", "nmse"):
        kept = into.setdefault(list_of, {})
        kept[name] = [*kept.get(name, []), *report[list_of]["tailbound"]]
    into["spent"] = [*into.get("spent", []), *([name, *amounts] for _, *amounts in report["spent"])]
    for number in NUMBERS:
        kept = into.setdefault(number, {})
        if (value := _of(report[number], "tailbound")) is not None:
            kept[name] = kept.get(name, 0) + value


#: What a rank counts besides: one number a report, or one by row name.
NUMBERS = ("expected", "delivered", "deadline_hits", "link_bytes")


def number_of(ranks: Sequence[Mapping[str, Any]], what: str, name: str) -> int | None:
    """The sum over ranks of one of ``NUMBERS``, of the row ``name``; None if a rank does not know it."""
    values = [_of(r[what], name) for r in ranks]
    return None if any(value is None for value in values) else sum(value for value in values if value is not None)


def _of(counted: Mapping[str, int] | int | None, name: str) -> int | None:
    return counted.get(name) if isinstance(counted, Mapping) else counted
