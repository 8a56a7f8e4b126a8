"""All-reduces as rounds of chunks: who sends which chunk to whom, and whether it is added there or replaces. Pure.

In a round all ranks send what they held before it. A chunk that is copied is a whole sum.
"""

from __future__ import annotations

from typing import NamedTuple

from tailbound.errors import ConfigError

ADD, COPY = "add", "copy"
#: Chunks of the parameter server, so that it returns the first while the last ones are on their way.
SERVED = 16


class Move(NamedTuple):
    """``chunk`` goes from rank ``src`` to rank ``dst``, which adds it to its own, or takes it instead (``kind``)."""

    src: int
    dst: int
    chunk: int
    kind: str


Round = tuple[Move, ...]


class Schedule(NamedTuple):
    """Of an all-reduce of a buffer in ``chunks`` parts of the same size."""

    chunks: int
    rounds: tuple[Round, ...]


def scattered(ranks: tuple[int, ...]) -> tuple[Round, ...]:
    """Reduce-scatter around a ring of ``ranks``, a chunk for each: at the end ``ranks[i]`` has the sum of chunk i."""
    n = len(ranks)
    return tuple(
        tuple(Move(ranks[i], ranks[(i + 1) % n], (i - hop - 1) % n, ADD) for i in range(n)) for hop in range(n - 1)
    )


def ring(n: int) -> Schedule:
    """Reduce-scatter and all-gather around a ring: 2 (n - 1) rounds of an n-th (Patarasuk and Yuan, 2009)."""
    gather = tuple(tuple(Move(i, (i + 1) % n, (i - hop) % n, COPY) for i in range(n)) for hop in range(n - 1))
    return Schedule(n, scattered(tuple(range(n))) + gather)


def halving_doubling(n: int) -> Schedule:
    """Exchanges of a half, a quarter and so on, and back (Thakur, Rabenseifner and Gropp, 2005).

    Raises:
        ConfigError: n is no power of two.
    """
    if n & (n - 1):
        raise ConfigError(f"halving-doubling of {n} ranks: give a power of two")
    rounds = []
    distance = n // 2
    while distance:
        # before this round rank i works on chunks of its block of 2 * distance; after it on its own half
        half = [range(i // distance * distance, (i // distance + 1) * distance) for i in range(n)]
        rounds.append(tuple(Move(i, i ^ distance, c, ADD) for i in range(n) for c in half[i ^ distance]))
        distance //= 2
    back = tuple(tuple(Move(dst, src, chunk, COPY) for src, dst, chunk, _ in each) for each in reversed(rounds))
    return Schedule(n, (*rounds, *back))


def parameter_server(n: int) -> Schedule:
    """Everybody sends to rank 0, which returns the sums; chunk by chunk, so that its link is busy both ways."""
    there = [tuple(Move(i, 0, chunk, ADD) for i in range(1, n)) for chunk in range(SERVED)]
    back = [tuple(Move(0, i, chunk, COPY) for i in range(1, n)) for chunk in range(SERVED)]
    return Schedule(SERVED, tuple(a + b for a, b in zip([*there, ()], [(), *back], strict=True)))
