"""The cases of clock-31 on the engine itself (``sim.engine``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.engine import Done, Plan, Rank, World
from sim.fabric import MS, S, Terms
from sim.scenario import COMPUTE, Scenario
from tailbound.transport.pace import Limits

#: 10 Gb/s, a hundredth of it.
NETWORK = Terms(rate=1.25e7, queue=1 << 20, room=64 << 10)
#: A hundredth of the rates of ``pace.Limits``, as of the network's.
LIMITS = Limits(step=2.5e3, first=1.5e6, floor=1e4, free=2.5e7)


@dataclass
class EngineCase(Scenario):
    """A case, played by the engine."""

    #: a two-hundredth of 25 MiB of float32: 512 rows of 64 codes, half of whose packets are header
    bucket = 64 * 512

    def __post_init__(self) -> None:
        super().__post_init__()
        terms = Terms(NETWORK.rate, NETWORK.queue, NETWORK.room, loss=self.loss)
        self.world = _World(self, terms, Plan(tuple(self.layout()), COMPUTE, gap=1 * MS, spread=0.02))
        self.nodes = self.world.nodes
        self._errors: list[str] = []
        self._suspected = 0
        for node in self.nodes:
            node.engine.job.emit = self._emit  # type: ignore[method-assign]

    def _emit(self, kind: str, *_: object, **__: object) -> None:
        self._suspected += kind == "suspect"

    def run(self) -> EngineCase:
        """Runs it to the end."""
        for when, what in self.times.items():
            self.world.fabric.at(self.world.fabric.now + when, lambda what=what: what(self))  # type: ignore[misc]
        with self.world:
            self.world.run(120 * S)
        return self

    # -- what tests ask ----------------------------------------------------------------------------------------------

    def log(self, rank: int) -> list[Done]:
        return self.nodes[rank].over

    @property
    def reached(self) -> Mapping[int, int]:
        return {node.rank: node.step for node in self.nodes}

    @property
    def suspected(self) -> int:
        return self._suspected

    @property
    def suspects(self) -> list[frozenset[int]]:
        jobs = (node.engine.job for node in self.nodes)
        return [half.suspects for job in jobs for half in (job.contribution_suspicion, job.result_suspicion)]

    @property
    def advertised(self) -> list[int]:
        return [node.engine.job.deadlines.advertised for node in self.nodes]

    @property
    def errors(self) -> list[str]:
        return self._errors

    def jumps(self, rank: int) -> int:
        return self.nodes[rank].engine.job.counters["jumps"]

    def waited(self) -> float:
        return sum(node.engine.job.overtime.waited for node in self.nodes) / self.ranks

    @property
    def now(self) -> int:
        return self.world.fabric.now

    def die(self, rank: int) -> None:
        self.world.kill(rank, 0)

    def set_speed(self, rank: int, speed: float) -> None:
        self.world.change(rank, 0, speed=speed)

    def halt(self, rank: int, length: int) -> None:
        self.world.stop(rank, 0, length)


class _World(World):
    """A world in which things happen as a case says."""

    def __init__(self, case: EngineCase, terms: Terms, plan: Plan) -> None:
        self._case = case
        super().__init__(case.ranks, case.seed, terms, plan, case.steps, limits=LIMITS)

    def before_step(self, node: Rank) -> int:
        self._case.begins(node.rank, node.step, self.fabric.now, node.engine.job.deadlines.advertised)
        return self._case.pauses.get((node.rank, node.step), 0)

    def compute_of(self, node: Rank) -> int:
        return self._case.compute_of(node.rank, node.step, self.fabric.random)

    def buckets_of(self, node: Rank) -> list[tuple[int, int]]:
        return self._case.buckets_of(node.rank, node.step, self.plan.buckets)

    def waits_for_a_core(self) -> int:
        return self._case.wait_of(self.fabric.random)

    def failed(self, rank: int, error: BaseException) -> None:
        self._case.errors.append(str(error))
