"""The cases of clock-31: what happens to whom, and when, in a job of the engine in virtual time (``sim.engine``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Self

from sim.engine import Plan, Rank, World
from tailbound.transport.pace import PaceConfig
from tailbound_lab.simulate.fabric import MS, S, Terms

COMPUTE = 100 * MS
#: A two-hundredth of 25 MiB of float32: 512 rows of 64 codes, half of whose packets are header.
BUCKET = 64 * 512
#: A hundredth of 10 Gb/s, and of the rates of ``pace.PaceConfig``. Packets are an eighth of real ones and no less, so
#: that a quantum is twice as long: at a twentieth of the rate it is a burst still, not a packet or two.
NETWORK = Terms(rate=1.25e7, queue=1 << 20, room=64 << 10)
LIMITS = PaceConfig(step=2.5e3, first=1.5e6, floor=1e4, speed=2.5e7, quantum=1_000_000)
#: Of virtual time, ns.
_LONGEST = 120 * S


class Case(World):
    """A job of ``ranks``, and what happens to it.

    Args:
        loss: of packets, each by itself.
        slow: by rank, how many times as long it computes.
        joins: by rank, the step from which on it has no data and computes nothing.
        pauses: by (rank, step), for how long it holds before it, ns.
        skips: (rank, step) in which the first bucket is not launched.
        first_layout: sizes of the buckets of the first step, in usual ones.
        waits: turns of a transport thread that have to wait for a core, and for how long, ns: (share, mean, most).
        unequal: buckets of different sizes.
        at: by (rank, step), what is done when that rank begins that step.
        times: by time since the beginning, ns, what is done then.
    """

    def __init__(
        self,
        ranks: int,
        *,
        steps: int = 36,
        buckets_a_step: int = 2,
        loss: float = 0.0,
        seed: int = 1,
        slow: Mapping[int, float] | None = None,
        joins: Mapping[int, int] | None = None,
        pauses: Mapping[tuple[int, int], int] | None = None,
        skips: Collection[tuple[int, int]] = (),
        first_layout: list[int] | None = None,
        waits: tuple[float, int, int] = (0.0, 0, 0),
        unequal: bool = False,
        at: Mapping[tuple[int, int], Callable[[Case], None]] | None = None,
        times: Mapping[int, Callable[[Case], None]] | None = None,
    ) -> None:
        self._slow, self._joins, self._pauses = slow or {}, joins or {}, dict(pauses or {})
        self._skips, self._first_layout, self._waits = skips, first_layout, waits
        self._at, self._times = dict(at or {}), times or {}
        self.errors: list[str] = []  #: of ops
        self.suspected = 0  #: how often any rank was
        self.trace: list[int] = []  #: D1 of rank 0 at the beginning of every step, ns
        layout = tuple(BUCKET >> (i if unequal else 0) for i in range(buckets_a_step))
        terms = Terms(NETWORK.rate, NETWORK.queue, NETWORK.room, loss=loss)
        super().__init__(ranks, seed, terms, Plan(layout, COMPUTE, gap=1 * MS, spread=0.02), steps, limits=LIMITS)
        for node in self.nodes:
            node.engine.job.events.emit = self._emit  # type: ignore[method-assign]

    def _emit(self, kind: str, *_: object, **__: object) -> None:
        self.suspected += kind == "suspect"

    def run(self, most: int | None = _LONGEST) -> Self:
        """Runs it to the end."""
        for when, what in self._times.items():
            self.fabric.at(self.fabric.now + when, lambda what=what: what(self))  # type: ignore[misc]
        with self:
            super().run(most)
        return self

    # -- what ranks ask -----------------------------------------------------------------------------------------------

    def before_step(self, node: Rank) -> int:
        what = self._at.pop((node.rank, node.step), None)
        if what is not None:
            what(self)
        if node.rank == 0:
            self.trace.append(node.engine.job.deadlines.advertised)
        return self._pauses.pop((node.rank, node.step), 0)

    def compute_of(self, node: Rank) -> int:
        joined = self._joins.get(node.rank)
        if joined is not None and node.step >= joined:
            return 0
        return int(COMPUTE * self._slow.get(node.rank, 1.0) * (1 + 0.02 * self.fabric.random.random()))

    def waits_for_a_core(self) -> int:
        (share, mean, most), dice = self._waits, self.fabric.random
        if not share or dice.random() >= share:
            return 0
        return min(most, int(dice.expovariate(1 / mean)))

    def buckets_of(self, node: Rank) -> list[tuple[int, int]]:
        first = [times * BUCKET for times in self._first_layout or ()] if node.step == 0 else []
        named = list(enumerate(first or self.plan.buckets))
        return named[1:] if (node.rank, node.step) in self._skips else named

    def failed(self, rank: int, error: BaseException) -> None:
        self.errors.append(str(error))

    # -- what tests ask -----------------------------------------------------------------------------------------------

    @property
    def advertised(self) -> list[int]:
        """D1 of every rank, ns."""
        return [node.engine.job.deadlines.advertised for node in self.nodes]

    @property
    def suspects(self) -> set[int]:
        """Who is suspected now, by anybody."""
        jobs = (node.engine.job for node in self.nodes)
        return {
            rank
            for job in jobs
            for half in (job.membership.contribution, job.membership.result)
            for rank in half.suspects
        }

    def waited(self) -> float:
        """For how long ops have waited past their deadlines, mean of the ranks, ns."""
        return sum(node.engine.job.overtime.waited for node in self.nodes) / self.ranks

    def missing(self, first: int, last: int, between: list[int] | None = None) -> float:
        """Share of the rows from and to ranks of ``between`` (default: all) missing in steps ``first`` to ``last``."""
        lost = expected = 0
        ranks = range(self.ranks) if between is None else between
        for op in (op for rank in ranks for op in self.nodes[rank].over if first <= op.step <= last):
            lost += sum(op.missing_of[r] for r in ranks)
            expected += op.expected * len(ranks) // self.ranks
        return lost / max(1, expected)

    def bad_steps(self, first: int, last: int, between: list[int] | None = None, limit: float = 0.02) -> list[int]:
        """Steps in which more than ``limit`` of the rows were missing."""
        return [s for s in range(first, last + 1) if self.missing(s, s, between) > limit]

    def durations(self, first: int, last: int, ranks: list[int]) -> list[int]:
        """From launch to end of every op of ``ranks`` in these steps, ns."""
        return [op.took for r in ranks for op in self.nodes[r].over if first <= op.step <= last]


def crash(rank: int) -> Callable[[Case], None]:
    """The rank dies."""
    return lambda case: case.kill(rank, 0)


def slow_link(rank: int, speed: float) -> Callable[[Case], None]:
    """The link of the rank has ``speed`` times its rate from now on."""
    return lambda case: case.change(rank, 0, speed=speed)


def stop(rank: int, length: int) -> Callable[[Case], None]:
    """SIGSTOP, and SIGCONT ``length`` ns later."""
    return lambda case: case.stop(rank, 0, length)
