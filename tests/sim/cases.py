"""The cases of clock-31 on simulated ranks that write the engine's turn a second time (``sim.node``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.network import Packets, S, World
from sim.node import Node, Over
from sim.scenario import Scenario


@dataclass
class Case(Scenario):
    """A case, played by ``sim.node``."""

    #: 25 MiB of float32
    bucket = 25 * 2**20 // 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.world = World(self.ranks, self.seed, self.loss)
        self.nodes = [Node(self.world, r, self, self.layout()) for r in range(self.ranks)]
        self.world.deliver = self._deliver
        self._paused: set[tuple[int, int]] = set()

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
        self.begins(node.rank, node.step, self.world.now, node.deadlines.advertised)
        key = (node.rank, node.step)
        if key in self.pauses and key not in self._paused:
            self._paused.add(key)
            return self.pauses[key]
        return 0

    def compute(self, node: Node) -> int:
        return self.compute_of(node.rank, node.step, self.world.random)

    def run_queue(self, node: Node) -> int:
        return self.wait_of(self.world.random)

    def buckets(self, node: Node) -> list[tuple[int, int]]:
        return self.buckets_of(node.rank, node.step, node.buckets)

    # -- what tests ask ----------------------------------------------------------------------------------------------

    def log(self, rank: int) -> list[Over]:
        return self.nodes[rank].log

    @property
    def reached(self) -> Mapping[int, int]:
        return {node.rank: node.step for node in self.nodes}

    @property
    def suspected(self) -> int:
        return sum(node.suspected for node in self.nodes)

    @property
    def suspects(self) -> list[frozenset[int]]:
        found = (node.membership for node in self.nodes)
        return [half.suspects for each in found for half in (each.contribution, each.result)]

    @property
    def advertised(self) -> list[int]:
        return [node.deadlines.advertised for node in self.nodes]

    @property
    def errors(self) -> list[str]:
        return [error for node in self.nodes for error in node.errors]

    def jumps(self, rank: int) -> int:
        return self.nodes[rank].jumps

    def waited(self) -> float:
        return sum(node.overtime.waited for node in self.nodes) / self.ranks

    @property
    def now(self) -> int:
        return self.world.now

    def die(self, rank: int) -> None:
        self.nodes[rank].die()

    def set_speed(self, rank: int, speed: float) -> None:
        self.world.speed[rank] = speed

    def halt(self, rank: int, length: int) -> None:
        self.nodes[rank].stop(length)
