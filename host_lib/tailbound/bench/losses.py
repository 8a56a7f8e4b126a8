"""Which packets are lost: drawn from a seed, one by one or in bursts, in both halves of an all-reduce or in one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Packets of a burst, on average.
BURST = 8


class Pattern(NamedTuple):
    """Where packets are lost: in the first half (contributions, reduce-scatter), in the second (results, all-gather).

    ``burst``: packets in a row, on average.
    """

    name: str
    first: bool = True
    second: bool = True
    burst: int = 1


PATTERNS = (
    Pattern("uniform"),
    Pattern("bursts", burst=BURST),
    Pattern("first half", second=False),
    Pattern("second half", first=False),
)


def lost(rng: np.random.Generator, links: int, packets: int, rate: float, burst: int = 1) -> NDArray[np.bool_]:
    """Packets lost of each link, in sending order: bool[links, packets].

    A link is in one of two states (Gilbert 1960): it loses ``rate`` of its packets, ``burst`` in a row on average.

    Raises:
        ValueError: ``rate`` is not in 0..1 (1 excluded), ``burst`` below 1, or more than such a link could lose.
    """
    enter = rate / (burst * (1 - rate)) if 0 <= rate < 1 and burst >= 1 else 2.0
    if enter > 1:
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
