"""Teams of communicators as in ``support``, in virtual time: what waits for deadlines there waits for nothing here.

Real are ``Communicator`` but for its start, and all that ``sim.engine`` has: the engine, its send queue, the codec and
the udp datapath's rules. Ops end at once as far as the machine is concerned, and their times are exact, so that every
one is held to its bound without slack (clock-12).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sim.engine import Engine, Rank, SimSwitch, World
from support import Team, Trouble, greeting, whole
from tailbound.collective import comeback
from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.op import Outcome
from tailbound.datapath.protocol import ring_rows
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.fabric import MS, S, Terms

T = TypeVar("T")
Result = tuple[NDArray[np.float32], Outcome]
Pending = tuple[NDArray[np.float32], Future[Outcome]]
#: Ranks do not launch at the very same moment.
_APART = 50_000
#: Virtual time after which an op that has not ended never will.
_NEVER = 600 * S


class Member(Communicator):
    """A communicator whose rank lives in a ``World``."""

    def __init__(self, node: Rank, others: list[Member]) -> None:
        self.node, self._others, self._engine = node, others, node.engine
        self.job, self.config = node.engine.job, node.engine.job.config
        self.greetings = [greeting(rank, ranks=self.job.ranks) for rank in range(self.job.ranks)]
        self.reliable = cast(Any, SimpleNamespace(counts=dict, pull=self._pull))  # no sockets
        self._row_width, self._closed = self.config.width, False
        sums, results = node.world.rows
        rings = [min(results, sums * self.config.ranks) // 2]
        if (switch := self.config.switch) is not None:
            self._row_width = switch.width(self.config.width)
            rings.append(switch.rows // 2)
        self._number(*rings)

    def _pull(self, donor: int, *_: object) -> bytes:
        """Where a rank that is lost may join."""
        position = self._others[donor]._engine.position()
        return comeback.encode(comeback.Entrance(position, self.job.cookie), self.job.world)

    def trouble(self, trouble: Trouble | Callable[[int, list[bytes]], list[bytes]] | None) -> None:
        """Lets ``trouble``, or a function as its ``meet``, have what this rank sends from now on; None: nothing has."""
        wire = self.node.wire
        wire.trouble = trouble.begin(self.config.rank).meet if isinstance(trouble, Trouble) else trouble


class _TeamEngine(Engine):
    """Takes a turn as soon as something is launched, and runs commands at once: nothing else runs meanwhile."""

    node: Rank

    def _poke(self, what: int = 0) -> None:
        self.node.poke()

    def call(self, what: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(what())
        except BaseException as error:
            future.set_exception(error)
        self.node.poke()
        return future


class _TeamRank(Rank):
    """Trains nothing of its own accord."""

    def train(self) -> None:
        pass


class _TeamWorld(World):
    engine, node = _TeamEngine, _TeamRank

    def open(self, *arguments: Any) -> Rank:
        node = super().open(*arguments)
        node.engine.node = node  # type: ignore[attr-defined]
        return node


class SimTeam(Team):
    """Communicators of one job in virtual time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.communicators: list[Member] = []
        self.communicators += [Member(node, self.communicators) for node in world.nodes]
        for node in world.nodes:
            node.poke()

    def __getitem__(self, rank: int) -> Member:
        return self.communicators[rank]

    @property
    def now(self) -> int:
        """Virtual time, ns."""
        return self.world.fabric.now

    @property
    def switch(self) -> SimSwitch:
        """That of the job."""
        assert self.world.switch is not None
        return self.world.switch

    @property
    def suspects(self) -> list[list[int]]:
        """Whom each rank suspects."""
        return [member.stats()["suspects"] for member in self.communicators]

    def placed_by(self, owners: tuple[int, ...], ranks: Sequence[int] | None = None) -> bool:
        """Whether all ``ranks`` place the rows of the next op by the map of these owners."""
        return all(self[r].job.sequence.map.owners == owners for r in ranks or range(len(self)))

    def trouble(self, make: Callable[[], Trouble]) -> list[Trouble]:
        """Troubles what every rank sends; the troubles by rank."""
        made = [make() for _ in self.communicators]
        for member, trouble in zip(self.communicators, made, strict=True):
            member.trouble(trouble)
        return made

    def at(self, delay: int, what: Callable[[], object]) -> None:
        """Does something ``delay`` ns from now."""
        self.world.fabric.at(self.now + delay, lambda: (what(), None)[1])

    def go(self, length: int) -> None:
        """Lets ``length`` ns pass."""
        self.world.go(length)

    def until(self, condition: Callable[[], object], what: str, most: int = _NEVER) -> None:
        """Lets time pass until ``condition()``.

        Raises:
            AssertionError: it is not so after ``most`` ns.
        """
        try:
            self.world.until(lambda: bool(condition()), most)
        except TimeoutError as error:
            raise AssertionError(f"never happened: {what}") from error

    def start(
        self,
        inputs: Sequence[NDArray[np.float32]],
        ranks: Sequence[int] | None = None,
        late: dict[int, int] | None = None,
        silent: Collection[int] = (),
        starts: tuple[int, ...] = (),
    ) -> dict[int, Pending]:
        """Has ``ranks`` launch an all-reduce, some ``late`` by so many ns, some without rows; what they wait for.

        Tensors begin at ``starts``; none: flat.
        """
        pending = {}
        for rank in range(len(self)) if ranks is None else ranks:
            out, done = np.full_like(inputs[rank], np.nan), Future[Outcome]()

            def launch(rank: int = rank, out: NDArray[np.float32] = out, done: Future[Outcome] = done) -> None:
                member, data = self[rank], inputs[rank].copy()
                how, done_with = Handling(starts=starts), done.set_result
                member.launch(0, data, out, last=True, done=done_with, contribute=rank not in silent, handling=how)

            apart = self.world.fabric.random.randrange(_APART)
            self.at((late or {}).get(rank, 0) + apart, launch)
            pending[rank] = out, done
        return pending

    def finish(self, pending: dict[int, Pending]) -> list[Result]:
        """Lets time pass until all of ``pending`` are over; their results in rank order."""
        self.until(lambda: all(done.done() for _, done in pending.values()), "an op ends")
        return [(out, done.result(0)) for out, done in pending.values()]

    def allreduce(self, inputs: Sequence[NDArray[np.float32]], *how: Any, **named: Any) -> list[Result]:
        """One all-reduce of ``inputs[rank]``, see ``start``; (average, outcome) of each."""
        return self.finish(self.start(inputs, *how, **named))

    def right(self, numel: int, seed: int = 0, *how: Any, **named: Any) -> list[Result]:
        """One all-reduce in which nothing is missing: everybody's mean, with the same bits everywhere."""
        inputs, results = self.averaged(numel, seed, *how, **named)
        whole(results, inputs, 1e-2)  # without one of the ranks it would be 0.1
        return results

    def warm_up(self, numel: int, ops: int = 3) -> None:
        """Warm scales, and a layout that can be foreseen."""
        for op in range(ops):
            self.right(numel, 1000 + op)

    def drain(self) -> None:
        """Lets time pass until nothing is in flight and no rank has anything to do for a while."""
        self.until(lambda: all(node.engine.idle for node in self.world.alive), "all are at rest")
        self.go(500 * MS)


def total(job: SimTeam, counter: str) -> int:
    """One of the counters of ``stats()``, of all ranks together."""
    return sum(int(member.stats()["counters"].get(counter, 0)) for member in job.communicators)


def dropped(troubles: list[Trouble], kind: PacketType) -> int:
    """Packets of ``kind`` that were lost on purpose."""
    return sum(count for t in troubles for (_, what), count in t.dropped.items() if what == kind)


@contextmanager
def sim_team(ranks: int, settings: dict[str, Any], *, seed: int = 1, terms: Terms | None = None) -> Iterator[SimTeam]:
    """A job of ``ranks`` communicators in virtual time; ``settings`` as for ``support.team``; its books balance."""
    given = {"share_rows": True} | settings
    width, ring = given.pop("width", 64), given.pop("ring_mib", 1.0)
    with _TeamWorld(ranks, seed, terms, width=width, rows=ring_rows(ring, width, ranks), **given) as world:
        yield SimTeam(world)
        world.check_books()
