"""Pairs of faults, each on a rank of its own, in virtual time.

Nothing is rotated, so every row of a result stands for itself: it must be the mean over the healthy ranks and some of
the troubled ones. ``SOON`` steps after it is known who is left, every row is averaged over all of them, if they are a
majority. What ``sim.engine`` checks after every turn is checked as well.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from fault_rows import contributors, same_bits
from sim.engine import Done, Plan, Rank, World
from support import Trouble
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.shape import shape_for
from tailbound.wire.schema import PacketType, Verdict
from tailbound_lab.simulate.fabric import MS, Burst
from tailbound_lab.simulate.machine import Wire

RANKS, WIDTH, ROWS = 4, 64, 128
TROUBLED = (1, 2)
#: Something fails in this step; whole ones before let scales settle. So many steps after it is known who is left, and
#: all of them are back, no row lacks any of them; and so many more show that this lasts.
FAILS, SOON, AFTER = 3, 5, 3
#: Long enough for a map to begin three steps after it is settled.
COMPUTE = 20 * MS
SETTINGS: dict[str, Any] = {
    "rotate": False,
    "share_rows": True,
    "deadline_1": 30 * MS,
    "deadline_2": 30 * MS,
    "stage_max": 200 * MS,
    "start_max": 100 * MS,
    "quiet": 2 * MS,
}
#: How long ranks compute before the op in which something fails: who launches first, all others, and who is slow, which
#: is for longer than they wait.
FIRST, USUAL, SLOW = 10 * MS, 50 * MS, 600 * MS
SEEDS = 20
#: Of virtual time, ns.
LONGEST = 10_000 * MS
#: Owner by row.
OWNERS = place(shape_for(ROWS * WIDTH, WIDTH), OwnerMap(0, tuple(range(RANKS))), RANKS).owner
OWN = np.bincount(OWNERS, minlength=RANKS)


def _nothing(job: Job, rank: int) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """One fault of one rank.

    Attributes:
        before: done when all have begun the step.
        early: its rows leave before the healthy ranks launch.
        when: looked at whenever packets have arrived; what is done as soon as it is true is ``World.kill``.
        late: it launches when the healthy ranks are through.
        after: done when the healthy ranks are through with the op.
        contributes: whether its rows must (True), must not (False) or may (None) be in the rows of healthy owners.
        owns: the same of the rows it owns, at the healthy ranks.
        again: whether nothing is missing at the end.
        refused: what healthy ranks must have counted.
    """

    before: Callable[[Job, int], None] = _nothing
    early: bool = False
    when: Callable[[Job, int], bool] | None = None
    late: bool = False
    after: Callable[[Job, int], None] = _nothing
    contributes: bool | None = None
    owns: bool | None = None
    again: bool = True
    refused: Verdict | None = None


def _linked(**terms: float) -> Callable[[Job, int], None]:
    return lambda job, rank: job.change(rank, 0, **terms)


def _old_cookie(job: Job, rank: int) -> None:
    """What it sends is of a job that was."""
    job.nodes[rank].engine.job._head["cookie"] ^= 0x5A5A


def _stop_and_cut(job: Job, rank: int) -> None:
    job.stop(rank, 0, SLOW)
    job.change(rank, 0, cut=True)


def _lose_results(job: Job, rank: int) -> None:
    """No rank gets any of its results."""
    trouble = Trouble(seed=0, loss=1.0, types=frozenset({PacketType.RESULT}))
    cast(Wire, job.nodes[rank].datapath.socket).trouble = trouble.begin(rank).meet


def _let_results_through(job: Job, rank: int) -> None:
    cast(Wire, job.nodes[rank].datapath.socket).trouble = None


def _jump(job: Job, rank: int) -> None:
    """Its clock is suddenly 5 s ahead of its kernel's stamps, and stays there."""
    job.nodes[rank].ahead = 5_000 * MS


def _some_are_in(job: Job, rank: int) -> bool:
    return job.summed(0, rank) > job.before[0, rank]


def _all_are_in(job: Job, rank: int) -> bool:
    """Its rows have reached everybody that can be reached."""
    others = [r for r in range(RANKS) if r != rank and not job.fabric.ends[r].cut]
    return all(job.summed(r, rank) - job.before[r, rank] == OWN[r] for r in others)


FAULTS: dict[str, Fault] = {
    "dies-before": Fault(before=lambda j, r: j.kill(r, 0), contributes=False, owns=False, again=False),
    "dies-sending": Fault(before=_linked(speed=0.02), early=True, when=_some_are_in, owns=False, again=False),
    "dies-as-owner": Fault(early=True, when=_all_are_in, contributes=True, owns=False, again=False),
    "stopped": Fault(before=lambda j, r: j.stop(r, 0, SLOW), contributes=False, owns=False),
    "slow": Fault(late=True, contributes=False),
    "slow-link": Fault(before=_linked(speed=0.004), after=_linked(speed=1.0)),
    "down-and-up": Fault(before=_linked(cut=True), after=_linked(cut=False), contributes=False, owns=False),
    "stopped-and-cut": Fault(before=_stop_and_cut, after=_linked(cut=False), contributes=False, owns=False),
    "no-results": Fault(before=_lose_results, after=_let_results_through, owns=False),
    "one-way-loss": Fault(before=_linked(loss=0.3), after=_linked(loss=0.0)),
    "disorder": Fault(
        before=_linked(twice=0.2, late=0.3), after=_linked(twice=0.0, late=0.0), refused=Verdict.DUPLICATE
    ),
    "clock-jump": Fault(before=_jump, again=False),
    "old-cookie": Fault(before=_old_cookie, contributes=False, owns=False, again=False, refused=Verdict.WRONG_COOKIE),
}


class Job(World):
    """A job in which something fails.

    Args:
        troubles: by rank.
        seed: of everything.
    """

    def __init__(self, troubles: dict[int, Fault], seed: int) -> None:
        self.troubles = troubles
        self.healthy = [rank for rank in range(RANKS) if rank not in troubles]
        self.left = {*self.healthy, *(rank for rank, trouble in troubles.items() if trouble.again)}
        #: who is not there any more, as the others see it
        self.gone = {rank for rank, trouble in troubles.items() if not trouble.again and trouble.owns is False}
        self.before: dict[tuple[int, int], int] = {}  # rows by (receiver, sender) summed before the step that fails
        self.results: dict[int, NDArray[np.float32]] = {}  # of that step, by rank
        self.void: dict[int, bool] = {}  # of that step, by rank
        self._began: set[int] = set()
        self._pending = {rank: trouble.when for rank, trouble in troubles.items() if trouble.when is not None}
        super().__init__(RANKS, seed, plan=Plan((ROWS * WIDTH,), COMPUTE), steps=1 << 30, **SETTINGS)

    def summed(self, at: int, of: int) -> int:
        """Rows of rank ``of`` that rank ``at`` has summed."""
        verdicts = self.nodes[at].engine.job.records.verdicts()[of]
        return int(verdicts[Verdict.STORED] + verdicts[Verdict.ADDED])

    def refused(self, verdict: Verdict) -> int:
        """Packets with this verdict at the first healthy rank."""
        return int(self.nodes[self.healthy[0]].engine.job.records.verdicts()[:, verdict].sum())

    def before_step(self, node: Rank) -> int:
        if node.step == FAILS:
            self._began.add(node.rank)
            if len(self._began) == RANKS and not self.before:
                self.before = {(at, of): self.summed(at, of) for at in range(RANKS) for of in range(RANKS)}
                for rank, trouble in self.troubles.items():
                    trouble.before(self, rank)
        return 0

    def compute_of(self, node: Rank) -> int:
        if node.step != FAILS:
            return super().compute_of(node)
        trouble = self.troubles.get(node.rank, Fault())
        return FIRST if trouble.early else SLOW if trouble.late else USUAL

    def take(self, burst: Burst) -> None:
        super().take(burst)
        for rank, ready in list(self._pending.items()):
            if self.before and ready(self, rank):
                del self._pending[rank]
                self.kill(rank, 0)

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        super().finished(rank, done, out)
        if done.step == FAILS:
            self.results[rank], self.void[rank] = out, done.outcome.minority
            if rank in self.healthy and set(self.healthy) <= set(self.results):
                for troubled, trouble in self.troubles.items():
                    trouble.after(self, troubled)

    def check_rows(self) -> None:
        """Every row that a healthy rank has got in the step that fails is what it must be.

        Where healthy ranks are no majority of it by themselves, and nothing of the others has come, it may be void.
        """
        inputs = [self.gradient(rank, FAILS, 0, ROWS * WIDTH) for rank in range(RANKS)]
        missing_owners = {rank for rank, trouble in self.troubles.items() if trouble.owns is not True}
        for rank in self.healthy:
            if self.void[rank]:
                assert all(trouble.contributes is not True for trouble in self.troubles.values())
                continue
            found = contributors(self.results[rank], inputs, set(range(RANKS)), WIDTH)
            for k, who in enumerate(found):
                owner = int(OWNERS[k])
                if who is None:
                    assert owner in missing_owners, f"row {k} of healthy rank {owner} is missing at rank {rank}"
                    continue
                if owner in self.troubles:
                    assert self.troubles[owner].owns is not False, f"row {k} of rank {owner} at rank {rank}"
                    continue
                assert set(self.healthy) <= who, f"row {k} of healthy rank {owner} is the mean of {sorted(who)}"
                for r, trouble in self.troubles.items():
                    if trouble.contributes is not None:
                        assert (r in who) == trouble.contributes, f"row {k} at rank {rank} is the mean of {sorted(who)}"
            same_bits(self.results[rank], self.results[self.healthy[0]], WIDTH)

    def may_be_missed(self, step: int) -> set[int]:
        """The troubled ranks, and those that the step before has cost time or scales.

        They waited for the troubled ones until a deadline, or had no results of theirs where others did: what they send
        by older scales is refused once.
        """
        before = ((rank, done) for rank in self.healthy for done in self.nodes[rank].over if done.step == step - 1)
        return set(self.troubles) | {r for r, done in before if done.outcome.deadline_hits or done.outcome.missed}

    def caught_up(self) -> bool:
        """Whether all are through the step that fails, and those that are left are in step, and know who is left."""
        newest = max(self.nodes[rank].step for rank in self.healthy)
        suspects = [self.nodes[rank].engine.job.membership.suspects for rank in self.left]
        known = all(found & (self.left | self.gone) == self.gone for found in suspects)
        return (
            known
            and all(n.step > FAILS for n in self.alive)
            and all(self.nodes[r].step >= newest - 1 for r in self.left)
        )

    def failed(self, rank: int, error: BaseException) -> None:
        """Whom no rank hears any more ends by an error, as it averages nothing (clock-37)."""
        if rank not in self.gone:
            raise error

    def check_left(self, first: int) -> None:
        """From step ``first`` on every row is averaged over all who are left, and nothing is skipped."""
        left = self.left
        if 2 * len(left) <= RANKS or len(left | self.gone) < RANKS:
            return
        for node in (self.nodes[rank] for rank in left):
            for done in node.over:
                if done.step >= first:
                    assert not sum(done.missing_of[rank] for rank in left), f"rank {node.rank}, step {done.step}"
                    lost = done.outcome.missed or done.outcome.failed_groups or done.outcome.skipped
                    assert not lost, f"rank {node.rank}, step {done.step}: {done.outcome}"

    def check_end(self) -> None:
        """Refused rows, missed ranks, and whether all is as before."""
        for trouble in self.troubles.values():
            assert trouble.refused is None or self.refused(trouble.refused) > 0, f"no {trouble.refused}"
        for node in self.alive:
            for done in node.over:
                if node.rank in self.healthy and not done.outcome.skipped:  # what all skip no rank waits for
                    assert done.outcome.missing <= self.may_be_missed(done.step)
                if done.step < FAILS or (done.step == self.steps - 1 and all(t.again for t in self.troubles.values())):
                    assert not sum(done.missing_of.values()), f"step {done.step} of rank {node.rank} is not whole"


def play(names: tuple[str, ...], seed: int) -> None:
    """One job whose troubled ranks have the faults ``names``."""
    with Job({rank: FAULTS[name] for rank, name in zip(TROUBLED, names, strict=False)}, seed) as job:
        job.start()
        job.until(job.caught_up, LONGEST)
        assert job.caught_up()
        whole = max(node.step for node in job.alive) + SOON
        job.steps = whole + AFTER
        job.finish()
        job.check_rows()
        job.check_left(whole)
        job.check_end()


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


CASES = [(name,) for name in FAULTS] + list(itertools.combinations(FAULTS, 2))


#: Of pairs a fifth: each fault is among two at least.
EVERYDAY = [names for names in CASES if len(names) == 1 or sum(map([*FAULTS].index, names)) % 5 == 0]


@pytest.mark.parametrize("names", EVERYDAY, ids="+".join)
def test_the_others_go_on_without_what_failed(names: tuple[str, ...]) -> None:
    play(names, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_all_pairs_with_other_seeds(names: tuple[str, ...]) -> None:
    for seed in range(SEEDS):
        play(names, seed)
