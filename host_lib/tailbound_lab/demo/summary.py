"""From what the ranks counted to the figures of the demo. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


#: Accuracies this close are called equal: one point, three or four of the 360 test images.
_EQUAL = 0.01


def headline(summary: Mapping[str, Any]) -> str:
    """What was gained, or lost, in a line: mean time of a step, and settled accuracy of the worst replica.

    Args:
        summary: the content of ``summary.json``.
    """
    ours, theirs = summary["settled_accuracy"], summary["gloo_settled_accuracy"]
    both = f"{ours:.1%} against {theirs:.1%}"
    right = f"equal accuracy ({both})" if abs(ours - theirs) <= _EQUAL else f"an accuracy of {both}"
    ratio = summary["gloo_training_s"] / summary["training_s"]
    if not summary["lab"]:
        return f"No network here, so nothing is said about speed; {right}"
    if 0.95 < ratio < 1.05:
        return f"As fast per step as Gloo, at {right}"
    faster = f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
    return f"{faster} per step than Gloo, at {right}"


def drift(weights: Sequence[NDArray[np.float32]]) -> float:
    """Largest distance of a replica from the mean of all, relative to the length of that mean ([n] each)."""
    mean = np.mean(np.stack(weights), axis=0, dtype=np.float64)
    return float(max(np.linalg.norm(w - mean) for w in weights) / np.linalg.norm(mean))
