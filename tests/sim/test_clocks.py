"""The cases of clock-31 for N = 2, 3, 4, 8, in virtual time.

The engine itself, at a hundredth of 10 Gb/s with buckets as much smaller, 100 ms of computing a step. Steps before
``SETTLED`` are warm-up (clock-26).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest

from sim.engine import Plan, Rank, World
from tailbound.transport.config import FLOOR
from tailbound.transport.overtime import FIRST, SHARE
from tailbound.transport.pace import PaceConfig
from tailbound_lab.simulate.fabric import MS, S, Terms

SETTLED = 15
COMPUTE = 100 * MS
#: A two-hundredth of 25 MiB of float32: 512 rows of 64 codes, half of whose packets are header.
BUCKET = 64 * 512
#: A hundredth of 10 Gb/s, and of the rates of ``pace.PaceConfig``. Packets are an eighth of real ones and no less, so
#: that a quantum is twice as long: at a twentieth of the rate it is a burst still, not a packet or two.
NETWORK = Terms(rate=1.25e7, queue=1 << 20, room=64 << 10)
LIMITS = PaceConfig(step=2.5e3, first=1.5e6, floor=1e4, speed=2.5e7, quantum=1_000_000)
#: Of virtual time, ns.
_LONGEST = 120 * S
#: How many ranks jobs have.
SIZES = (2, 3, 4, 8)


@dataclass
class Case:
    """What happens in a job, and to whom.

    Attributes:
        steps, buckets, loss: how many steps, of buckets of which sizes; of packets, each by itself.
        slow: by rank, how many times as long it computes.
        joins: by rank, the step from which on it has no data and computes nothing.
        pauses: by (rank, step), for how long it holds before it, ns.
        skips: (rank, step) in which the first bucket is not launched.
        first: sizes of the buckets of the first step, if others.
        waits: turns of a transport thread that have to wait for a core, and for how long, ns: (share, mean, most).
        at: by (rank, step), what is done when that rank begins that step.
    """

    ranks: int
    steps: int = 36
    buckets: tuple[int, ...] = (BUCKET, BUCKET)
    loss: float = 0.0
    seed: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)
    joins: Mapping[int, int] = field(default_factory=dict)
    pauses: Mapping[tuple[int, int], int] = field(default_factory=dict)
    skips: Collection[tuple[int, int]] = ()
    first: tuple[int, ...] = ()
    waits: tuple[float, int, int] = (0.0, 0, 0)
    at: Mapping[tuple[int, int], Callable[[Job], None]] = field(default_factory=dict)

    def run(self) -> Job:
        """The job, when it is over."""
        with Job(self) as job:
            job.run(_LONGEST)
        return job


class Job(World):
    """The ranks of a case.

    Attributes:
        errors: of ops.
        suspected: how often any rank was.
        trace: D1 of rank 0 at the beginning of every step, ns.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.errors, self.suspected, self.trace = case, list[str](), 0, list[int]()
        terms, plan = replace(NETWORK, loss=case.loss), Plan(case.buckets, COMPUTE, gap=1 * MS, spread=0.02)
        super().__init__(case.ranks, case.seed, terms, plan, case.steps, limits=LIMITS)
        for node in self.nodes:
            node.engine.job.events.emit = self._emit  # type: ignore[method-assign]

    def _emit(self, kind: str, *_: object, **__: object) -> None:
        self.suspected += kind == "suspect"

    # -- what ranks ask -----------------------------------------------------------------------------------------------

    def before_step(self, node: Rank) -> int:
        if what := self.case.at.get((node.rank, node.step)):
            what(self)
        if node.rank == 0:
            self.trace.append(node.engine.job.deadlines.advertised)
        return self.case.pauses.get((node.rank, node.step), 0)

    def compute_of(self, node: Rank) -> int:
        if node.step >= self.case.joins.get(node.rank, self.steps):
            return 0
        return int(COMPUTE * self.case.slow.get(node.rank, 1.0) * (1 + 0.02 * self.fabric.random.random()))

    def waits_for_a_core(self) -> int:
        (share, mean, most), dice = self.case.waits, self.fabric.random
        return min(most, int(dice.expovariate(1 / mean))) if share and dice.random() < share else 0

    def buckets_of(self, node: Rank) -> list[tuple[int, int]]:
        named = list(enumerate(self.case.first if self.case.first and node.step == 0 else self.plan.buckets))
        return named[1:] if (node.rank, node.step) in self.case.skips else named

    def failed(self, rank: int, error: BaseException) -> None:
        self.errors.append(str(error))

    # -- what tests ask -----------------------------------------------------------------------------------------------

    @property
    def suspects(self) -> set[int]:
        """Who is suspected now, by anybody."""
        of = (node.engine.job.membership for node in self.nodes)
        return {rank for one in of for half in (one.contribution, one.result) for rank in half.suspects}

    def missing(self, first: int, last: int, between: Collection[int] = ()) -> float:
        """Share of the rows from and to ranks of ``between`` (default: all) missing in steps ``first`` to ``last``."""
        ranks = between or range(self.ranks)
        ops = [op for rank in ranks for op in self.nodes[rank].over if first <= op.step <= last]
        lost = sum(op.missing_of[rank] for op in ops for rank in ranks)
        return lost / max(1, sum(op.expected * len(ranks) // self.ranks for op in ops))

    def bad_steps(self, first: int, last: int, between: Collection[int] = ()) -> list[int]:
        """Steps in which more than 2 % of the rows were missing."""
        return [s for s in range(first, last + 1) if self.missing(s, s, between) > 0.02]

    def longest(self, first: int, last: int, ranks: Collection[int]) -> int:
        """What the longest op of ``ranks`` in these steps took, ns."""
        return max(self.durations(first, last, ranks))

    def durations(self, first: int, last: int, ranks: Collection[int]) -> list[int]:
        """From launch to end of every op of ``ranks`` in these steps, ns."""
        return [op.took for r in ranks for op in self.nodes[r].over if first <= op.step <= last]

    def others(self, but: int) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != but]


def ranks(*everyday: int) -> pytest.MarkDecorator:
    """Jobs of all sizes; those that are not ``everyday`` with ``--thorough`` only."""
    sizes = [pytest.param(n, marks=[] if n in everyday else [pytest.mark.thorough]) for n in SIZES]
    return pytest.mark.parametrize("ranks", sizes)


class Seen:
    """What a look in the midst of a case finds: no rank was suspected, and deadlines are short."""

    calm = False

    def __call__(self, job: Job) -> None:
        advertised = [node.engine.job.deadlines.advertised for node in job.nodes]
        self.calm = not job.suspected and all(FLOOR <= deadline <= 30 * MS for deadline in advertised)
        self.suspected = job.suspected


@pytest.fixture(
    scope="module",
    params=[2, 4, pytest.param(3, marks=pytest.mark.thorough), pytest.param(8, marks=pytest.mark.thorough)],
)
def course(request: pytest.FixtureRequest) -> Course:
    """Of a job of N ranks."""
    return Course(request.param)


class Course:
    """A job of which one thing after the other is asked, so that it settles once: rank 0 holds, has no data, is gone.

    The first step has one bucket of both, as DDP makes its buckets anew after the first backward pass.
    """

    #: Steps in which rank 0 begins to write a checkpoint, to have no data, and holds for ever.
    WRITES, JOINS, HOLDS, END = SETTLED + 4, SETTLED + 11, SETTLED + 21, SETTLED + 27

    def __init__(self, ranks: int) -> None:
        self.settled, self.written, self.joined = Seen(), Seen(), Seen()
        self.job = Case(
            ranks,
            steps=self.END,
            first=(2 * BUCKET,),
            pauses={(0, self.WRITES): 2 * S, (0, self.HOLDS): 60 * S},
            joins={0: self.JOINS},
            at={(0, self.WRITES): self.settled, (0, self.JOINS): self.written, (0, self.HOLDS): self._dies},
        ).run()

    def _dies(self, job: Job) -> None:
        self.joined(job)
        job.kill(0, 700 * MS)


def test_another_layout_after_the_first_step(course: Course) -> None:
    """DDP makes its buckets anew after the first backward pass: nothing is missing, and deadlines are short."""
    case, before = course.job, course.WRITES - 1
    assert course.settled.calm
    assert case.missing(0, before) == 0
    assert all(op.complete for node in case.nodes for op in node.over if 0 < op.step <= before)
    assert not case.errors


def test_a_checkpoint_under_hold(course: Course) -> None:
    """Rank 0 writes for two seconds: it is waited for, and nothing is missing afterwards."""
    case, last = course.job, course.JOINS - 1
    assert case.missing(0, last) == 0
    assert course.written.suspected == 0
    assert case.longest(course.WRITES + 2, last, range(case.ranks)) < 50 * MS


def test_join(course: Course) -> None:
    """A rank without data launches everything at once: under 1 % is missing."""
    assert course.job.missing(course.JOINS, course.HOLDS - 1) < 0.01
    assert course.joined.suspected == 0


def test_a_rank_that_holds_and_falls_silent_is_left_out(course: Course) -> None:
    """Silence ends a hold (clock-16)."""
    case = course.job
    assert all(node.step == case.steps for node in case.alive)
    assert len(case.alive) == case.ranks - 1
    assert case.longest(course.HOLDS, case.steps, case.others(0)) < 3 * S


def test_one_percent_of_rows_lost_is_repaired() -> None:
    cases = [Case(4, steps=26, loss=0.01, seed=seed).run() for seed in (1, 2)]
    ops = [done for case in cases for node in case.nodes for done in node.over]
    assert sum(done.outcome.missed == 0 for done in ops) >= 0.97 * len(ops)
    assert max(case.missing(0, case.steps) for case in cases) < 0.002
    settled = [done for done in ops if done.step >= SETTLED]
    # 5.4 % of all halves end by their deadline
    assert sum(done.outcome.deadline_hits for done in settled) <= 0.08 * 2 * len(settled)


@pytest.mark.parametrize(
    ("seed", "most"), [(2, 0.0005), pytest.param(5, 0.0005, marks=pytest.mark.thorough), (4, 0.003)]
)
def test_ranks_that_wait_for_a_core_are_waited_for(seed: int, most: float) -> None:
    """Wake-ups of the transport threads are put off by 20 ms as a rule and by 200 ms at most: rows before tails.

    That is three times in ten steps of every rank. Where a rank was late with its launch, too, and then silent for far
    longer than anybody before (seed 4), its rows are cut off: it cannot be told from a stopped one.
    """
    case = Case(4, steps=60, seed=seed, waits=(0.005, 20 * MS, 200 * MS)).run()
    assert case.missing(SETTLED, case.steps) <= most
    assert case.suspected == 0
    waited = sum(node.engine.job.overtime.waited for node in case.nodes) / case.ranks
    assert waited <= FIRST + SHARE * case.fabric.now


@ranks(2, 4)
def test_a_rank_dies(ranks: int) -> None:
    """Others lose two or three ops' deadlines, and never wait for it again; D1 at most doubles.

    Before, without trouble, nothing is missing and deadlines are short. One of two ranks that does not know that the
    other process has ended makes void steps, which last for D_start (clock-38).
    """
    gone = ranks - 1
    seen = Seen()
    case = Case(ranks, steps=32, at={(0, SETTLED + 1): seen, (gone, SETTLED + 1): lambda job: job.kill(gone, 0)}).run()
    left = case.others(gone)
    assert seen.calm
    assert case.missing(0, SETTLED) == 0
    assert all(op.complete for node in case.nodes for op in node.over if op.step <= SETTLED)
    assert max(case.trace[SETTLED:]) <= 2 * case.trace[SETTLED]
    if ranks == 2:
        assert all(op.outcome.minority for op in case.nodes[0].over if op.step > SETTLED + 1)
        assert case.longest(SETTLED + 1, case.steps, left) <= 1100 * MS
    else:
        assert case.longest(SETTLED + 4, case.steps, left) <= 2 * case.longest(SETTLED, SETTLED, left)
        assert case.longest(SETTLED + 1, SETTLED + 3, left) <= 100 * MS
    assert case.suspects == ({gone} if ranks > 2 else set())


@ranks(4)
def test_a_link_at_a_twentieth_of_its_rate_and_back(ranks: int) -> None:
    """Six steps of four buckets each way, twelve of two; rows of the slow rank may be left out, the others' not."""
    slow, down, up = ranks - 1, SETTLED + 1, SETTLED + 13

    def speed(share: float) -> Callable[[Job], None]:
        return lambda job: job.change(slow, 0, speed=share)

    # the last of four ranks is back after eight steps, of eight after ten
    case = Case(ranks, steps=up + 18, at={(0, down): speed(0.05), (0, up): speed(1.0)}).run()
    assert len(case.bad_steps(down, case.steps, between=case.others(slow))) <= 12
    assert len(case.bad_steps(up, case.steps)) <= 12
    assert case.bad_steps(case.steps - 6, case.steps - 1) == []
    assert all(node.step == case.steps for node in case.nodes)


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
    slow = ranks - 1
    case = Case(ranks, steps=26, slow={slow: factor}).run()
    left = case.others(slow)
    assert case.missing(0, case.steps, between=left) == 0
    assert case.missing(0, case.steps) <= 1.1 / ranks
    late = 100 * MS * (factor - 1)
    # 18 ms on top with links to themselves; up to 46 ms (five seeds) where round trips have limited a rate
    assert case.longest(SETTLED, case.steps, left) <= late + 50 * MS
    assert case.suspects <= {slow}


@ranks(2, 4)
def test_a_rank_is_stopped(ranks: int) -> None:
    """The others lose no more than one deadline an op until it is suspected; it comes back, and all is whole.

    At first no rank can tell it from a rank that waits for a core: in one op each half may last half a deadline longer.
    It is stopped for 0.15, for 1 and for 5 s, one after the other in the same job. After 0.15 s it speaks before that
    is over, so it is waited for: one op lasts until its rows are there, and nothing is missing.
    """
    stopped, at, stops = ranks - 1, SETTLED + 3, []
    for length in (150 * MS, 1 * S, 5 * S):
        back = at + 16 + length // (95 * MS)
        stops.append((length, at, back))
        at = back
    events = {(0, first): lambda job, n=length: job.stop(stopped, 0, n) for length, first, _ in stops}
    case = Case(ranks, steps=at, buckets=(BUCKET,), at=events).run()
    left = case.others(stopped)
    assert all(node.step == case.steps for node in case.nodes)
    for length, first, end in stops:
        worst = case.longest(first, end - 1, left)
        if ranks == 2:
            assert worst <= min(length, 1000 * MS) + 100 * MS, length
        elif length == 150 * MS:
            assert worst <= length + 15 * MS
            assert case.missing(first, end - 1) == 0
        else:
            assert worst <= 125 * MS, length
        if ranks > 2:
            assert sum(took > 100 * MS for took in case.durations(first, end - 1, left)) <= len(left), length
        # those that ended the same op with and without one more tenth of a deadline are apart by it: once at most
        assert len(case.bad_steps(first, end - 1, between=left)) <= 1, length
        assert case.bad_steps(end - 4, end - 1) == [], length
    assert case.suspects <= {stopped}


@pytest.mark.parametrize(
    "phase",
    [pytest.param(phase, marks=[] if phase % 60 == 0 else [pytest.mark.thorough]) for phase in range(0, 120, 20)],
)
def test_of_two_ranks_one_comes_back_at_any_point_of_a_step(phase: int) -> None:
    """The other one makes a few steps, which are void, and none of them is lost to the one that comes back."""
    stop = {(0, 26): lambda job: job.stop(1, 0, 5 * S + phase * MS)}
    case = Case(2, steps=50, buckets=(BUCKET,), at=stop).run()
    assert case.nodes[1].engine.job.counters["jumps"] == 0
    void = [{op.step for op in node.over if op.outcome.minority} for node in case.nodes]
    assert void[0] == void[1]
    assert 4 <= len(void[0]) <= 6
    assert case.bad_steps(40, 49) == []


@ranks(4)
def test_one_rank_skips_a_bucket_once(ranks: int) -> None:
    """The tags disagree from that op on, and both ranks are named: rows are refused, never summed as something else."""
    skipper = ranks - 1
    case = Case(ranks, steps=SETTLED + 6, buckets=(BUCKET, BUCKET >> 1), skips={(skipper, SETTLED + 1)}).run()
    assert any(f"rank {skipper}" in error and f"op {SETTLED + 1}.0" in error for error in case.errors)
    assert case.missing(0, SETTLED) == 0
