"""The cases of clock-31, as plans of what happens to whom and when, for whichever world plays them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sim.fabric import MS

COMPUTE = 100 * MS


class Finished(Protocol):
    """A finished op of one rank; times in ns."""

    @property
    def step(self) -> int: ...
    @property
    def launched(self) -> int: ...
    @property
    def finished(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def missing_of(self) -> Counter[int]: ...
    @property
    def complete(self) -> bool: ...


@dataclass
class Scenario(ABC):
    """One case: a job of ``ranks``, and what happens to it.

    ``at`` maps a step of rank 0 (or of the rank that something happens to) to what is done when that rank begins it.
    ``bucket`` is the size of the usual bucket, in entries; ``first_layout`` counts in it.
    """

    ranks: int
    steps: int = 36
    buckets_a_step: int = 2
    loss: float = 0.0
    seed: int = 1
    slow: dict[int, float] = field(default_factory=dict)
    joins: dict[int, int] = field(default_factory=dict)
    pauses: dict[tuple[int, int], int] = field(default_factory=dict)
    skips: set[tuple[int, int]] = field(default_factory=set)
    first_layout: list[int] | None = None
    #: turns of a transport thread that have to wait for a core, and for how long, ns: (share, mean, most)
    waits: tuple[float, int, int] = (0.0, 0, 0)
    #: buckets of different sizes
    unequal: bool = False
    at: dict[tuple[int, int], Callable[[Scenario, int], None]] = field(default_factory=dict)
    times: dict[int, Callable[[Scenario], None]] = field(default_factory=dict)

    bucket = 0

    def __post_init__(self) -> None:
        #: (time, advertised D1) of rank 0
        self.trace: list[tuple[int, int]] = []

    # -- what ranks ask -----------------------------------------------------------------------------------------------

    def layout(self) -> list[int]:
        """Entries of the buckets of a step."""
        return [self.bucket >> (i if self.unequal else 0) for i in range(self.buckets_a_step)]

    def begins(self, rank: int, step: int, now: int, advertised: int) -> None:
        """``rank`` begins ``step``: what is to happen then, happens."""
        what = self.at.pop((rank, step), None)
        if what is not None:
            what(self, rank)
        if rank == 0:
            self.trace.append((now, advertised))

    def compute_of(self, rank: int, step: int, dice: random.Random) -> int:
        """For how long ``rank`` computes, ns."""
        joined = self.joins.get(rank)
        if joined is not None and step >= joined:
            return 0
        return int(COMPUTE * self.slow.get(rank, 1.0) * (1 + 0.02 * dice.random()))

    def wait_of(self, dice: random.Random) -> int:
        """For how long a transport thread that could run does not, ns."""
        share, mean, most = self.waits
        if not share or dice.random() >= share:
            return 0
        return min(most, int(dice.expovariate(1 / mean)))

    def buckets_of(self, rank: int, step: int, usual: Sequence[int]) -> list[tuple[int, int]]:
        """(index, entries) of the buckets that ``rank`` launches in ``step``."""
        first = [times * self.bucket for times in self.first_layout or ()] if step == 0 else []
        named = list(enumerate(first or usual))
        if (rank, step) in self.skips:
            del named[0]
        return named

    # -- what tests ask -----------------------------------------------------------------------------------------------

    @abstractmethod
    def log(self, rank: int) -> Sequence[Finished]:
        """Finished ops of ``rank``."""

    @property
    @abstractmethod
    def reached(self) -> Mapping[int, int]:
        """Step of every rank."""

    @property
    @abstractmethod
    def suspected(self) -> int:
        """How often any rank was suspected."""

    @property
    @abstractmethod
    def suspects(self) -> list[frozenset[int]]:
        """Who is suspected now: of every rank, and of each half."""

    @property
    @abstractmethod
    def advertised(self) -> list[int]:
        """D1 of every rank, ns."""

    @property
    @abstractmethod
    def errors(self) -> list[str]:
        """Errors of ops."""

    @abstractmethod
    def jumps(self, rank: int) -> int:
        """How often ``rank`` has left behind what could not be had any more."""

    @abstractmethod
    def waited(self) -> float:
        """For how long ops have waited past their deadlines, mean of the ranks, ns."""

    @property
    @abstractmethod
    def now(self) -> int:
        """Simulated time, ns."""

    @abstractmethod
    def die(self, rank: int) -> None:
        """``rank`` dies."""

    @abstractmethod
    def set_speed(self, rank: int, speed: float) -> None:
        """The link of ``rank`` has ``speed`` times its rate from now on."""

    @abstractmethod
    def halt(self, rank: int, length: int) -> None:
        """SIGSTOP, and SIGCONT ``length`` ns later."""

    def missing(self, first: int, last: int, between: list[int] | None = None) -> float:
        """Share of the rows from and to ranks of ``between`` (default: all) missing in steps ``first`` to ``last``."""
        lost = expected = 0
        ranks = range(self.ranks) if between is None else between
        for op in (op for rank in ranks for op in self.log(rank) if first <= op.step <= last):
            lost += sum(op.missing_of[r] for r in ranks)
            expected += op.expected * len(ranks) // self.ranks
        return lost / max(1, expected)

    def bad_steps(self, first: int, last: int, between: list[int] | None = None, limit: float = 0.02) -> list[int]:
        """Steps in which more than ``limit`` of the rows were missing."""
        return [s for s in range(first, last + 1) if self.missing(s, s, between) > limit]

    def durations(self, first: int, last: int, ranks: list[int]) -> list[int]:
        """From launch to end of every op of ``ranks`` in these steps, ns."""
        return [op.finished - op.launched for r in ranks for op in self.log(r) if first <= op.step <= last]


def crash(case: Scenario, rank: int) -> None:
    """The rank dies."""
    case.die(rank)


def slow_link(rank: int, speed: float) -> Callable[[Scenario, int], None]:
    """``Scenario.set_speed``, for ``Scenario.at``."""
    return lambda case, _: case.set_speed(rank, speed)


def stop(rank: int, length: int) -> Callable[[Scenario, int], None]:
    """``Scenario.halt``, for ``Scenario.at``."""
    return lambda case, _: case.halt(rank, length)
