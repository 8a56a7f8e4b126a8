"""The cases of clock-31 for N = 2, 3, 4, 8, in virtual time.

The engine itself, at a hundredth of 10 Gb/s with buckets as much smaller, 100 ms of computing a step. Steps before
``SETTLED`` are warm-up (clock-26).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest

from sim.engine import Plan, Rank, World
from tailbound.collective.terms import FIRST, SHARE
from tailbound.transport.config import FLOOR
from tailbound_lab.simulate.fabric import MS, S, Terms

SETTLED = 15
COMPUTE = 100 * MS
#: A two-hundredth of 25 MiB of float32: 512 rows of 64 codes, half of whose packets are header.
BUCKET = 64 * 512
#: A hundredth of 10 Gb/s, and of the rates of ``transport.pace``. Packets are an eighth of real ones and no less, so
#: that a quantum is twice as long: at a twentieth of the rate it is a burst still, not a packet or two.
NETWORK = Terms(rate=1.25e7, queue=1 << 20, room=64 << 10)
LIMITS = {"speed": 2.5e7, "quantum": 1_000_000}
#: How many ranks jobs have.
SIZES = (2, 3, 4, 8)
#: By (rank, step), what is done when that rank begins that step; if it returns a time, the rank holds for so long, ns.
Events = Mapping[tuple[int, int], Callable[["Job"], int | None]]


class Job(World):
    """A job that has run.

    Args:
        sizes: by (rank, step), the (index, entries) of its buckets; None: two of ``BUCKET``.
        factor: by (rank, step), how many times as long it computes.
        waits: turns of a transport thread that have to wait for a core, and for how long, ns: (share, mean, most).

    Attributes:
        errors: of ops.
        suspected: how often any rank was.
        trace: D1 of rank 0 at the beginning of every step, ns.
    """

    def __init__(
        self,
        ranks: int,
        steps: int,
        events: Events | None = None,
        *,
        sizes: Callable[[int, int], dict[int, int]] = lambda rank, step: {0: BUCKET, 1: BUCKET},
        factor: Callable[[int, int], float] = lambda rank, step: 1.0,
        waits: tuple[float, int, int] = (0.0, 0, 0),
        loss: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.events, self.sizes, self.factor, self.waits = events or {}, sizes, factor, waits
        self.errors, self.suspected, self.trace = list[str](), 0, list[int]()
        plan = Plan((BUCKET, BUCKET), COMPUTE, gap=1 * MS, spread=0.02)
        super().__init__(ranks, seed, replace(NETWORK, loss=loss), plan, steps, limits=LIMITS)
        for node in self.nodes:
            node.engine.job.events.emit = self._emit  # type: ignore[method-assign]
        with self:
            self.run(120 * S)

    def _emit(self, kind: str, *_: object, **__: object) -> None:
        self.suspected += kind == "suspect"

    # -- what ranks ask -----------------------------------------------------------------------------------------------

    def before_step(self, node: Rank) -> int:
        if node.rank == 0:
            self.trace.append(node.engine.job.deadlines.advertised)
        return self.events.get((node.rank, node.step), lambda job: 0)(self) or 0

    def compute_of(self, node: Rank) -> int:
        return int(COMPUTE * self.factor(node.rank, node.step) * (1 + 0.02 * self.fabric.random.random()))

    def waits_for_a_core(self) -> int:
        (share, mean, most), dice = self.waits, self.fabric.random
        return min(most, int(dice.expovariate(1 / mean))) if share and dice.random() < share else 0

    def buckets_of(self, node: Rank) -> list[tuple[int, int]]:
        return list(self.sizes(node.rank, node.step).items())

    def failed(self, rank: int, error: BaseException) -> None:
        self.errors.append(str(error))

    # -- what tests ask -----------------------------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        """No rank was suspected, and deadlines are short."""
        advertised = [node.engine.job.deadlines.advertised for node in self.nodes]
        return not self.suspected and all(FLOOR <= deadline <= 30 * MS for deadline in advertised)

    @property
    def suspects(self) -> set[int]:
        """Ranks that any rank suspects now."""
        return set().union(*(node.engine.job.membership.suspects for node in self.nodes))

    def missing(self, first: int, last: int, between: Collection[int] = ()) -> float:
        """Share of the rows from and to ranks of ``between`` (default: all) missing in steps ``first`` to ``last``."""
        ranks = between or range(self.ranks)
        ops = [op for rank in ranks for op in self.nodes[rank].over if first <= op.step <= last]
        lost = sum(op.missing_of[rank] for op in ops for rank in ranks)
        return lost / max(1, sum(op.expected * len(ranks) // self.ranks for op in ops))

    def bad_steps(self, first: int, last: int, between: Collection[int] = ()) -> list[int]:
        """Steps in which more than 2 % of the rows were missing."""
        return [s for s in range(first, last + 1) if self.missing(s, s, between) > 0.02]

    def durations(self, first: int, last: int, ranks: Collection[int]) -> list[int]:
        """From launch to end of every op of ``ranks`` in these steps, ns, rising."""
        return sorted(op.took for r in ranks for op in self.nodes[r].over if first <= op.step <= last)


def ranks(*everyday: int) -> pytest.MarkDecorator:
    """Jobs of all sizes; those that are not ``everyday`` with ``--thorough`` only."""
    sizes = [pytest.param(n, marks=[] if n in everyday else [pytest.mark.thorough]) for n in SIZES]
    return pytest.mark.parametrize("ranks", sizes)


@ranks(2, 4)
def test_a_new_layout_a_checkpoint_a_rank_without_data_and_a_hold_that_falls_silent(ranks: int) -> None:
    """One after the other in one job, so that it settles once."""
    writes, joins, holds, end = SETTLED + 4, SETTLED + 11, SETTLED + 21, SETTLED + 27
    calm: list[bool] = []

    def look(job: Job, hold: int = 0) -> int:
        calm.append(job.calm)
        return hold

    def dies(job: Job) -> int:
        job.fabric.at(job.fabric.now + 700 * MS, lambda: job.kill(0))
        return look(job, 60 * S)

    job = Job(
        ranks, end, {(0, writes): lambda job: look(job, 2 * S), (0, joins): look, (0, holds): dies},
        sizes=lambda rank, step: {0: BUCKET, 1: BUCKET} if step else {0: 2 * BUCKET},
        factor=lambda rank, step: float(rank > 0 or step < joins),
    )  # fmt: skip
    assert not job.errors
    # DDP makes its buckets anew after the first backward pass
    assert all(op.complete for node in job.nodes for op in node.over if 0 < op.step < writes)
    # rank 0 holds for two seconds, and is waited for
    assert job.missing(0, joins - 1) == 0
    assert job.durations(writes + 2, joins - 1, range(ranks))[-1] < 50 * MS
    # without data it launches everything at once
    assert job.missing(joins, holds - 1) < 0.01
    assert calm == [True, True, True]
    # silence ends a hold (clock-16)
    assert [node.step for node in job.alive] == [end] * (ranks - 1)
    assert job.durations(holds, end, range(1, ranks))[-1] < 3 * S


@pytest.mark.parametrize("seeds", [range(1, 9), pytest.param(range(9, 25), marks=pytest.mark.thorough)])
def test_ranks_that_wait_for_a_core_are_waited_for(seeds: range) -> None:
    """Wake-ups of the transport threads are put off by 20 ms as a rule and by 200 ms at most: rows before tails.

    That is three times in ten steps of every rank. Where a rank was late with its launch, too, and then silent for far
    longer than anybody before (seed 10), its rows are cut off: it cannot be told from a stopped one. How many are is
    chance: of 75 seeds a quarter have some, 0.0003 of the rows on average.
    """
    missing = 0.0
    for seed in seeds:
        job = Job(4, 60, seed=seed, waits=(0.005, 20 * MS, 200 * MS))
        missing += job.missing(SETTLED, 60)
        assert job.suspected == 0
        waited = sum(node.engine.job.overtime.waited for node in job.nodes) / 4
        assert waited <= FIRST + SHARE * job.fabric.now
    assert missing / len(seeds) <= 0.001


@ranks(2, 4)
def test_a_rank_dies(ranks: int) -> None:
    """Others lose two or three ops' deadlines, and never wait for it again; D1 at most doubles.

    Before, without trouble, nothing is missing and deadlines are short. One of two ranks that does not know that the
    other process has ended makes void steps, which last for D_start (clock-38).
    """
    gone, left, calm = ranks - 1, range(ranks - 1), list[bool]()

    def dies(job: Job) -> None:  # once its last results have arrived
        job.fabric.at(job.fabric.now + MS, lambda: job.kill(gone))

    def looks(job: Job) -> None:
        calm.append(job.calm)

    job = Job(ranks, 32, {(0, SETTLED + 1): looks, (gone, SETTLED + 1): dies})
    assert calm == [True]
    assert job.missing(0, SETTLED) == 0
    assert all(op.complete for node in job.nodes for op in node.over if op.step <= SETTLED)
    assert max(job.trace[SETTLED:]) <= 2 * job.trace[SETTLED]
    if ranks == 2:
        assert all(op.outcome.minority for op in job.nodes[0].over if op.step > SETTLED + 1)
        assert job.durations(SETTLED + 1, 32, left)[-1] <= 1100 * MS
    else:
        assert job.durations(SETTLED + 4, 32, left)[-1] <= 2 * job.durations(SETTLED, SETTLED, left)[-1]
        assert job.durations(SETTLED + 1, SETTLED + 3, left)[-1] <= 100 * MS
    assert job.suspects == ({gone} if ranks > 2 else set())


@ranks(4)
def test_a_link_at_a_twentieth_of_its_rate_and_back(ranks: int) -> None:
    """Six steps of four buckets each way, twelve of two; rows of the slow rank may be left out, the others' not."""
    slow, down, up = ranks - 1, SETTLED + 1, SETTLED + 13
    steps = up + 18  # the last of four ranks is back after eight steps, of eight after ten

    def slower(job: Job) -> None:
        job.change(slow, speed=0.05)

    def back(job: Job) -> None:
        job.change(slow, speed=1.0)

    job = Job(ranks, steps, {(0, down): slower, (0, up): back})
    assert len(job.bad_steps(down, steps, between=range(slow))) <= 12
    assert len(job.bad_steps(up, steps)) <= 12
    assert job.bad_steps(steps - 6, steps - 1) == []
    assert [node.step for node in job.nodes] == [steps] * ranks


@pytest.mark.parametrize(
    ("ranks", "factor"),
    [
        pytest.param(n, factor, marks=[] if (n, factor) in ((2, 1.5), (4, 1.2)) else [pytest.mark.thorough])
        for n in SIZES
        for factor in (1.2, 1.5)
    ],
)
def test_a_rank_is_slow(ranks: int, factor: float) -> None:
    """What it is worth waiting for is waited for; else its own rows are missing, and no other rank's."""
    slow, left = ranks - 1, range(ranks - 1)
    job = Job(ranks, 26, factor=lambda rank, step: factor if rank == slow else 1.0)
    assert job.missing(0, 26, between=left) == 0
    assert job.missing(0, 26) <= 1.1 / ranks
    # 18 ms on top with links to themselves; up to 46 ms (five seeds) where round trips have limited a rate
    assert job.durations(SETTLED, 26, left)[-1] <= 100 * MS * (factor - 1) + 50 * MS
    assert job.suspects <= {slow}


@ranks(2, 4)
def test_a_rank_is_stopped(ranks: int) -> None:
    """The others lose no more than one deadline an op until it is suspected; it comes back, and all is whole.

    At first no rank can tell it from a rank that waits for a core: in one op each half may last half a deadline longer.
    It is stopped for 0.15, for 1 and for 5 s, one after the other in the same job. After 0.15 s it speaks before that
    is over, so it is waited for: one op lasts until its rows are there, and nothing is missing.
    """
    stopped, left, at, stops = ranks - 1, range(ranks - 1), SETTLED + 3, []
    for length in (150 * MS, 1 * S, 5 * S):
        back = at + 16 + length // (95 * MS)
        stops.append((length, at, back))
        at = back
    events = {(0, first): lambda job, n=length: job.stop(stopped, n) for length, first, _ in stops}
    job = Job(ranks, at, events, sizes=lambda rank, step: {0: BUCKET})
    assert [node.step for node in job.nodes] == [at] * ranks
    for length, first, end in stops:
        took = job.durations(first, end - 1, left)
        if ranks == 2:
            assert took[-1] <= min(length, 1000 * MS) + 100 * MS, length
        else:
            assert took[-1] <= (165 if length == 150 * MS else 125) * MS, length
            assert length > 150 * MS or job.missing(first, end - 1) == 0
            assert sum(each > 100 * MS for each in took) <= len(left), length
        # those that ended the same op with and without one more tenth of a deadline are apart by it: once at most
        assert len(job.bad_steps(first, end - 1, between=left)) <= 1, length
        assert job.bad_steps(end - 4, end - 1) == [], length
    assert job.suspects <= {stopped}


@pytest.mark.parametrize(
    "phase",
    [pytest.param(phase, marks=[] if phase % 60 == 0 else [pytest.mark.thorough]) for phase in range(0, 120, 20)],
)
def test_of_two_ranks_one_comes_back_at_any_point_of_a_step(phase: int) -> None:
    """The other one makes a few steps, which are void, and none of them is lost to the one that comes back."""
    stop = {(0, 26): lambda job: job.stop(1, 5 * S + phase * MS)}
    job = Job(2, 50, stop, sizes=lambda rank, step: {0: BUCKET})
    assert job.nodes[1].engine.job.counters["jumps"] == 0
    void = [{op.step for op in node.over if op.outcome.minority} for node in job.nodes]
    assert void[0] == void[1]
    assert 4 <= len(void[0]) <= 6
    assert job.bad_steps(40, 49) == []
