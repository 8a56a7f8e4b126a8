"""How long the foreign bursts must be for Gloo's iteration P99/P50 to be a given one. No I/O; the caller measures.

The length is searched for, not the frequency: with a few per cent of iterations hit, P99 lies inside the slow ones and
moves with the length of a burst, while it jumps from end to end where the share of slow iterations passes 1 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailbound_lab.bench.figures import percentile
from tailbound_lab.lab.spec import Background

#: Of the link's rate; what is left keeps TCP alive, which would otherwise wait for its retransmission timer.
RATE_SHARE = 0.9
#: Bursts in one measurement; fewer where they would hit more of Gloo's iterations than this, and move its P50.
_BURSTS, _MOST_HIT = 12, 0.25
#: How near the ratio has to come, relative.
TOLERANCE = 0.05
_LONGEST_MS = 10_000.0


def guess(target: float, p50: float, workers: int, rate: int, seconds: float) -> Background:
    """Bursts that lengthen an iteration of ``p50`` seconds by ``target - 1`` of it, if nothing but they mattered.

    Args:
        target: P99/P50.
        p50: of Gloo's iterations in a calm network.
        workers: each has bursts of its own.
        rate: of a link in bit/s.
        seconds: how long will be measured.
    """
    on = max(1e-3, (target - 1) * p50 / RATE_SHARE)
    off = max(workers * seconds / _BURSTS, workers * (p50 + on) / _MOST_HIT)
    return Background(int(rate * RATE_SHARE), min(_LONGEST_MS, on * 1e3), off * 1e3)


def tail(times: Sequence[float]) -> float:
    """P99 over P50 of iteration times."""
    return percentile(times, 99) / percentile(times, 50)


def corrected(background: Background, ratio: float, target: float) -> Background:
    """The same with bursts that are longer or shorter as ``ratio`` is below or above ``target``; by 3 at most."""
    factor = 3.0 if ratio <= 1 else min(3.0, max(1 / 3, (target - 1) / (ratio - 1)))
    on = min(_LONGEST_MS, background.on_ms * factor)
    return Background(background.rate, on, background.off_ms)


def search(
    target: float, first: Background, measure: Callable[[Background], Sequence[float]], probes: int = 4
) -> tuple[Background, list[tuple[float, float]]]:
    """Background with which Gloo's P99/P50 is ``target``, after at most ``probes`` probes from ``first`` on.

    Args:
        measure: times of Gloo's iterations under a background.

    Returns:
        The background, and (burst length in ms, ratio) of every probe. What came nearest, if none came near enough.
    """
    tried: list[tuple[float, float]] = []
    best, error = first, float("inf")
    background = first
    for _ in range(probes):
        ratio = tail(measure(background))
        tried.append((background.on_ms, ratio))
        if abs(ratio - target) < error:
            best, error = background, abs(ratio - target)
        if abs(ratio / target - 1) <= TOLERANCE:
            break
        background = corrected(background, ratio, target)
    return best, tried
