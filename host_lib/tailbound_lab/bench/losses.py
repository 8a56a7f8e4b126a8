"""Which packets are lost: drawn from a seed, one by one or in bursts, in both halves of an all-reduce or in one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Packets of a burst, on average.
BURST = 8


class Pattern(NamedTuple):
    """Where packets are lost: in the first half (contributions, reduce-scatter), in the second (results, all-gather).

    ``burst``: packets in a row, on average; ``one``: all of them on the links of the last rank.
    """

    name: str
    first: bool = True
    second: bool = True
    burst: int = 1
    one: bool = False


PATTERNS = (
    Pattern("uniform"),
    Pattern("bursts", burst=BURST),
    Pattern("first half", second=False),
    Pattern("second half", first=False),
)


def lost(rng: np.random.Generator, links: int, packets: int, rate: float, burst: int = 1) -> NDArray[np.bool_]:
    """Packets lost of each link, in sending order: bool[links, packets].

    A link loses ``rate`` of its packets: each by itself, or ``burst`` in a row on average, in one of two states
    (Gilbert 1960).

    Raises:
        ValueError: ``rate`` is not in 0..1 (1 excluded), ``burst`` below 1, or more than such a link could lose.
    """
    possible = 0 <= rate < 1 and burst >= 1
    enter = rate / (burst * (1 - rate)) if possible else 0.0
    if not possible or (burst > 1 and enter > 1):
        raise ValueError(f"a link cannot lose {rate:.0%} of its packets {burst} in a row")
    if burst == 1:
        return rng.random((links, packets)) < rate
    chances = rng.random((packets, links))
    out = np.empty((packets, links), bool)
    state = rng.random(links) < rate
    for at in range(packets):
        out[at] = state
        state = np.where(state, chances[at] >= 1 / burst, chances[at] < enter)
    return out.T


def rates(pattern: Pattern, share: float, links: int) -> tuple[list[float], list[float]]:
    """Loss rate of each link in both halves, so that ``share`` of all packets is lost."""
    rate = 2 * share / (pattern.first + pattern.second)
    each = [0.0] * (links - 1) + [rate * links] if pattern.one else [rate] * links
    return each if pattern.first else [0.0] * links, each if pattern.second else [0.0] * links
