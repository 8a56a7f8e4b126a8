"""The cases of clock-31, as plans of what happens to whom and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sim.network import MS, Packets, S, World
from sim.node import Node

#: 25 MiB of float32.
BUCKET = 25 * 2**20 // 4
COMPUTE = 100 * MS


@dataclass
class Case:
    """One case: a job of ``ranks``, and what happens to it.

    ``at`` maps a step of rank 0 (or of the rank that something happens to) to what is done when that rank begins it.
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
    at: dict[tuple[int, int], Callable[[Case, int], None]] = field(default_factory=dict)
    times: dict[int, Callable[[Case], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.ranks, self.seed, self.loss)
        self.nodes = [Node(self.world, r, self, self._layout()) for r in range(self.ranks)]
        self.world.deliver = self._deliver
        self._paused: set[tuple[int, int]] = set()
        #: (time, advertised D1) of rank 0
        self.trace: list[tuple[int, int]] = []

    def _layout(self) -> list[int]:
        return [BUCKET >> (i if self.unequal else 0) for i in range(self.buckets_a_step)]

    def _deliver(self, p: Packets, rows: int, last: bool) -> None:
        if p.last and not last:  # the packet with the mark was lost: the tail was seen all the same
            p.contributed = min(p.contributed, p.label - 1) if p.kind == "contribution" else p.contributed
            p.published = min(p.published, p.label - 1) if p.kind == "result" else p.published
        self.nodes[p.to].take(p, rows, last)

    def run(self) -> Case:
        """Runs it to the end."""
        for node in self.nodes:
            node.begin()
        for when, what in self.times.items():
            self.world.at(self.world.now + when, lambda what=what: what(self))  # type: ignore[misc]
        self.world.run(lambda: all(n.dead or self.over(n) for n in self.nodes), 120 * S)
        return self

    # -- what nodes ask ----------------------------------------------------------------------------------------------

    def over(self, node: Node) -> bool:
        return node.step >= self.steps

    def donor(self, node: Node) -> Node:
        return next(n for n in self.nodes if n is not node and not n.dead and not n.stopped)

    def pause(self, node: Node) -> int:
        what = self.at.pop((node.rank, node.step), None)
        if what is not None:
            what(self, node.rank)
        if node.rank == 0:
            self.trace.append((self.world.now, node.deadlines.advertised))
        key = (node.rank, node.step)
        if key in self.pauses and key not in self._paused:
            self._paused.add(key)
            return self.pauses[key]
        return 0

    def compute(self, node: Node) -> int:
        joined = self.joins.get(node.rank)
        if joined is not None and node.step >= joined:
            return 0
        jitter = 1 + 0.02 * self.world.random.random()
        return int(COMPUTE * self.slow.get(node.rank, 1.0) * jitter)

    def run_queue(self, node: Node) -> int:
        share, mean, most = self.waits
        if not share or self.world.random.random() >= share:
            return 0
        return min(most, int(self.world.random.expovariate(1 / mean)))

    def buckets(self, node: Node) -> list[tuple[int, int]]:
        layout = self.first_layout if self.first_layout and node.step == 0 else node.buckets
        named = list(enumerate(layout))
        if (node.rank, node.step) in self.skips:
            del named[0]
        return named

    # -- what tests ask ------------------------------------------------------------------------------------------------

    def missing(self, first: int, last: int, between: list[int] | None = None) -> float:
        """Share of the rows from and to ranks of ``between`` (default: all) missing in steps ``first`` to ``last``."""
        lost = expected = 0
        ranks = range(self.ranks) if between is None else between
        for node in (self.nodes[r] for r in ranks):
            for op in node.log:
                if first <= op.step <= last:
                    lost += sum(op.missing_of[r] for r in ranks)
                    expected += op.expected * len(ranks) // self.ranks
        return lost / max(1, expected)

    def bad_steps(self, first: int, last: int, between: list[int] | None = None, limit: float = 0.02) -> list[int]:
        """Steps in which more than ``limit`` of the rows were missing."""
        return [s for s in range(first, last + 1) if self.missing(s, s, between) > limit]

    def durations(self, first: int, last: int, ranks: list[int]) -> list[int]:
        """From launch to end of every op of ``ranks`` in these steps, ns."""
        return [op.finished - op.launched for r in ranks for op in self.nodes[r].log if first <= op.step <= last]


def crash(case: Case, rank: int) -> None:
    """The rank dies."""
    case.nodes[rank].die()


def slow_link(rank: int, speed: float) -> Callable[[Case, int], None]:
    """The link of ``rank`` has ``speed`` times its rate from now on."""

    def act(case: Case, _: int) -> None:
        case.world.speed[rank] = speed

    return act


def stop(rank: int, length: int) -> Callable[[Case, int], None]:
    """SIGSTOP, and SIGCONT ``length`` ns later."""
    return lambda case, _: case.nodes[rank].stop(length)
