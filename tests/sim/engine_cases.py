"""The cases of clock-31 on the real engine (``sim.engine``), as plans of what happens to whom and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sim.engine import Done, Plan, Rank, World
from sim.fabric import MS, S, Terms
from tailbound.transport.pace import Limits

#: 25 MiB of float32 over 10 Gb/s, a two-hundredth of both: 512 rows of 64 codes take as long as theirs.
BUCKET = 64 * 512
NETWORK = Terms(rate=1.25e7, queue=1 << 20, room=64 << 10)
#: A hundredth of the rates of ``pace.Limits``, as of the network's.
LIMITS = Limits(step=2.5e3, first=1.5e6, floor=1e4, free=2.5e7)
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
        buckets = tuple(BUCKET >> (i if self.unequal else 0) for i in range(self.buckets_a_step))
        terms = Terms(NETWORK.rate, NETWORK.queue, NETWORK.room, loss=self.loss)
        self.world = _World(self, terms, Plan(buckets, COMPUTE, gap=1 * MS, spread=0.02))
        self.nodes = self.world.nodes
        #: (time, advertised D1) of rank 0
        self.trace: list[tuple[int, int]] = []
        #: errors of ops
        self.errors: list[str] = []
        #: how often any rank was suspected
        self.suspected = 0
        for node in self.nodes:
            node.engine.job.emit = self._emit  # type: ignore[method-assign]

    def _emit(self, kind: str, *_: object, **__: object) -> None:
        self.suspected += kind == "suspect"

    def run(self) -> Case:
        """Runs it to the end."""
        for when, what in self.times.items():
            self.world.fabric.at(self.world.fabric.now + when, lambda what=what: what(self))  # type: ignore[misc]
        with self.world:
            self.world.run(120 * S)
        return self

    # -- what tests ask ------------------------------------------------------------------------------------------------

    def log(self, rank: int, first: int, last: int) -> list[Done]:
        """Ops of ``rank`` in steps ``first`` to ``last``."""
        return [done for done in self.nodes[rank].over if first <= done.step <= last]

    def missing(self, first: int, last: int, between: list[int] | None = None) -> float:
        """Share of the rows from and to ranks of ``between`` (default: all) missing in steps ``first`` to ``last``."""
        ranks = range(self.ranks) if between is None else between
        ops = [done for rank in ranks for done in self.log(rank, first, last)]
        lost = sum(done.missing[rank] for done in ops for rank in ranks)
        expected = sum(done.outcome.expected * len(ranks) // self.ranks for done in ops)
        return lost / max(1, expected)

    def bad_steps(self, first: int, last: int, between: list[int] | None = None, limit: float = 0.02) -> list[int]:
        """Steps in which more than ``limit`` of the rows were missing."""
        return [s for s in range(first, last + 1) if self.missing(s, s, between) > limit]

    def durations(self, first: int, last: int, ranks: list[int]) -> list[int]:
        """From launch to end of every op of ``ranks`` in these steps, ns."""
        return [done.took for rank in ranks for done in self.log(rank, first, last)]


class _World(World):
    """A world in which things happen as a case says."""

    def __init__(self, case: Case, terms: Terms, plan: Plan) -> None:
        self._case = case
        super().__init__(case.ranks, case.seed, terms, plan, case.steps, limits=LIMITS)

    def before_step(self, node: Rank) -> int:
        case, key = self._case, (node.rank, node.step)
        what = case.at.pop(key, None)
        if what is not None:
            what(case, node.rank)
        if node.rank == 0:
            case.trace.append((self.fabric.now, node.engine.job.deadlines.advertised))
        return case.pauses.get(key, 0)

    def compute_of(self, node: Rank) -> int:
        joined = self._case.joins.get(node.rank)
        if joined is not None and node.step >= joined:
            return 0
        return int(self.vary(COMPUTE) * self._case.slow.get(node.rank, 1.0))

    def buckets_of(self, node: Rank) -> list[tuple[int, int]]:
        case = self._case
        named = list(enumerate(case.first_layout if case.first_layout and node.step == 0 else self.plan.buckets))
        if (node.rank, node.step) in case.skips:
            del named[0]
        return named

    def waits_for_a_core(self) -> int:
        share, mean, most = self._case.waits
        if not share or self.fabric.random.random() >= share:
            return 0
        return min(most, int(self.fabric.random.expovariate(1 / mean)))

    def failed(self, rank: int, error: BaseException) -> None:
        self._case.errors.append(str(error))


def crash(case: Case, rank: int) -> None:
    """The rank dies."""
    case.world.kill(rank, 0)


def slow_link(rank: int, speed: float) -> Callable[[Case, int], None]:
    """The link of ``rank`` has ``speed`` times its rate from now on."""
    return lambda case, _: case.world.change(rank, 0, speed=speed)


def stop(rank: int, length: int) -> Callable[[Case, int], None]:
    """SIGSTOP, and SIGCONT ``length`` ns later."""
    return lambda case, _: case.world.stop(rank, 0, length)
