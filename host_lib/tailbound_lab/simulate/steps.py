"""Ranks that reduce step after step over one network, each in one job or, one after the other, in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.shape import shape_for
from tailbound.datapath.protocol import MIN_ROWS, sum_ring
from tailbound_lab.simulate.engine import Done
from tailbound_lab.simulate.fabric import US, S
from tailbound_lab.simulate.layouts import Arrangement, Part
from tailbound_lab.simulate.ports import Network, Switching
from tailbound_lab.simulate.world import Rank, World

#: Codes of a row on a path of 1500 bytes.
WIDTH = 1408
#: What a look at the clock takes an engine, ns: it looks some ten times a turn.
_WORK = 2 * US
#: Ranks do not begin at the very same moment, ns.
APART = 50 * US
#: Gradients of ranks begin so many entries apart.
_APART_ENTRIES = 16
#: Rows of a ring of sums at least.
_LEAST = 16
#: A step that takes longer never ends, ns.
_NEVER = 60 * S


@dataclass
class Step:
    """What became of one step.

    Attributes:
        took: ns from a rank's launch to the end of its last op, by rank.
        expected, delivered: rows, of all ranks.
        deadlines: halves of ops that ended by their deadline.
        dropped: packets, by where.
        packets, messages, bytes, marks: that were sent, and marked.
    """

    took: list[int]
    expected: int = 0
    delivered: int = 0
    deadlines: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    packets: int = 0
    messages: int = 0
    bytes: int = 0
    marks: int = 0

    @property
    def slowest(self) -> int:
        """When the last rank was through, ns."""
        return max(self.took)


class Team:
    """Ranks in an arrangement; ``settings`` are of ``transport.config.Config``.

    Attributes:
        late: ns by which the last rank begins every step later than the others.
    """

    def __init__(self, arrangement: Arrangement, switching: Switching, seed: int, **settings: Any) -> None:
        self.arrangement = arrangement
        self.network = network = Network(arrangement.places, seed, switching)
        self.late = 0
        most = {part.job: part.entries for parts in arrangement.parts for part in parts}
        self.worlds = []
        for number, places in enumerate(arrangement.places):
            rows = shape_for(most[number], WIDTH).rows
            ring = max(MIN_ROWS, 1 << (4 * rows - 1).bit_length())
            rings = sum_ring(ring, len(places), _LEAST), ring
            world = World(len(places), seed, width=WIDTH, rows=rings, fabric=network, number=number, **settings)
            world.work = _WORK
            self.worlds.append(world)
        network.take = [world.take for world in self.worlds]
        entries = max(most.values())
        self._ranks = len(arrangement.parts)
        # gradients are parts of one array: making new ones took most of the time
        most_begun = max(part.begin for parts in arrangement.parts for part in parts)
        self._pool = np.random.default_rng(seed).standard_normal(
            entries + most_begun + _APART_ENTRIES * self._ranks, np.float32
        )
        # a rank that goes on takes its shard at once, so that all share what they have it of
        self._shared = np.zeros(entries, np.float32)
        self._outs = [np.zeros(parts[-1].entries, np.float32) for parts in arrangement.parts]
        for world in self.worlds:
            for node in world.nodes:
                node.poke()

    def step(self) -> Step:
        """All ranks reduce one bucket; they begin together, but for a late one."""
        network = self.network
        done = Step([0] * self._ranks)
        before = network.packets, network.messages, network.bytes, network.marks, network.dropped.copy()
        left = set(range(self._ranks))

        def over(rank: int, began: int) -> None:
            left.discard(rank)
            done.took[rank] = network.clock - began

        for rank in range(self._ranks):
            at = network.now + network.random.randrange(APART)
            at += self.late if rank == self._ranks - 1 else 0
            network.at(at, partial(self._phase, rank, 0, self.data(rank), done, partial(over, rank, at)))
        network.run(lambda: not left, _NEVER)
        for world in self.worlds:
            if world.error is not None:
                raise world.error
        packets, messages, sent, marks, dropped = before
        done.packets, done.messages = network.packets - packets, network.messages - messages
        done.bytes, done.marks = network.bytes - sent, network.marks - marks
        done.dropped = dict(network.dropped - dropped)
        return done

    def _phase(self, rank: int, phase: int, data: NDArray[np.float32], step: Step, over: Callable[[], None]) -> None:
        part, *others = self.arrangement.parts[rank][phase:]
        out = self._shared[: part.entries] if others else self._outs[rank]

        def done(one: Done) -> None:
            outcome = one.outcome
            step.expected += outcome.expected
            step.delivered += outcome.delivered
            step.deadlines += outcome.deadline_hits
            if others:
                shard = out[others[0].begin : others[0].begin + others[0].entries]
                shard = np.pad(shard, (0, others[0].entries - len(shard)))
                # not from within the engine's turn
                self.network.at(self.network.clock, partial(self._phase, rank, phase + 1, shard, step, over))
            else:
                over()

        self.node(part).submit(0, data, out, done)

    def data(self, rank: int) -> NDArray[np.float32]:
        """f32[entries] that ``rank`` gives in the first phase: its gradient."""
        part = self.arrangement.parts[rank][0]
        return self._pool[_APART_ENTRIES * rank + part.begin :][: part.entries]

    def result(self, rank: int) -> NDArray[np.float32]:
        """f32[entries] that ``rank`` has of its last phase."""
        return self._outs[rank]

    def node(self, part: Part) -> Rank:
        """Who does ``part``."""
        return self.worlds[part.job].nodes[part.rank]

    def close(self) -> None:
        """Closes what the engines have opened."""
        for world in self.worlds:
            world.close()
