"""Pairs of faults, each on a rank of its own, in virtual time.

Nothing is rotated, so every row of a result stands for itself: it must be the mean over the healthy ranks and some of
the troubled ones. ``SOON`` steps after it is known who is left, every row is averaged over all of them, if they are a
majority. What ``sim.engine`` checks after every turn is checked as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

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

RANKS, WIDTH, ROWS = 4, 64, 128
#: The lowest rank, which proposes owner maps, and another one.
TROUBLED = (0, 2)
#: Something fails in this step; whole ones before let scales settle. So many steps after it is known who is left, and
#: all of them are back, no row lacks any of them; and so many more show that this lasts.
FAILS, SOON, AFTER = 3, 5, 3
SETTINGS = {
    "rotate": False, "share_rows": True, "deadline_1": 30 * MS, "deadline_2": 30 * MS, "stage_max": 200 * MS,
    "start_max": 100 * MS, "quiet": 2 * MS,
}  # fmt: skip
#: How long ranks compute: as a rule, which is long enough for a map to begin three steps after it is settled; and
#: before the op in which something fails: who launches first, all others, and who is slow, for longer than they wait.
COMPUTE, FIRST, USUAL, SLOW = 20 * MS, 10 * MS, 50 * MS, 600 * MS
#: Of virtual time, ns.
LONGEST = 10_000 * MS
#: Owner by row, and how many each has.
OWNERS = place(shape_for(ROWS * WIDTH, WIDTH), OwnerMap(0, tuple(range(RANKS))), RANKS).owner
OWN = np.bincount(OWNERS, minlength=RANKS)


def _nothing(job: Job, rank: int) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """One fault of one rank.

    Attributes:
        before: done when all have begun the step; ``after``: when the healthy ranks are over with its op.
        computes: for how long it computes in that step, ns.
        dies: when it does, looked at whenever packets have arrived.
        contributes: whether its rows must (True), must not (False) or may (None) be in the rows of healthy owners.
        owns: the same of the rows it owns, at the healthy ranks.
        again: whether nothing is missing at the end.
        refused: a verdict that healthy ranks must have counted.
    """

    before: Callable[[Job, int], None] = _nothing
    after: Callable[[Job, int], None] = _nothing
    computes: int = USUAL
    dies: Callable[[Job, int], bool] | None = None
    contributes: bool | None = None
    owns: bool | None = None
    again: bool = True
    refused: Verdict | None = None


def _linked(**terms: float) -> Callable[[Job, int], None]:
    return lambda job, rank: job.change(rank, **terms)


def _old_cookie(job: Job, rank: int) -> None:
    """What it sends is of a job that was."""
    job.nodes[rank].engine.job.head.cookie ^= 0x5A5A


def _stop_and_cut(job: Job, rank: int) -> None:
    job.stop(rank, SLOW)
    job.change(rank, cut=True)


def _lose_results(job: Job, rank: int) -> None:
    """No rank gets any of its results."""
    job.nodes[rank].wire.trouble = Trouble(0, loss=1.0, types=frozenset({PacketType.RESULT})).begin(rank).meet


def _let_results_through(job: Job, rank: int) -> None:
    job.nodes[rank].wire.trouble = None


def _jump(job: Job, rank: int) -> None:
    """Its clock is suddenly 5 s ahead of its kernel's stamps, and stays there."""
    job.nodes[rank].ahead = 5_000 * MS


def _some_are_in(job: Job, rank: int) -> bool:
    healthy = job.healthy[0]
    return job.summed(healthy, rank) > job.before[healthy, rank]


def _all_are_in(job: Job, rank: int) -> bool:
    """Its rows have reached everybody that can be reached."""
    others = [r for r in range(RANKS) if r != rank and not job.fabric.ends[r].cut]
    return all(job.summed(r, rank) - job.before[r, rank] == OWN[r] for r in others)


GONE = {"owns": False, "again": False}
AWAY = {"contributes": False, "owns": False}
FAULTS: dict[str, Fault] = {
    "dies-before": Fault(lambda j, r: j.kill(r), contributes=False, **GONE),
    "dies-sending": Fault(_linked(speed=0.02), computes=FIRST, dies=_some_are_in, **GONE),
    "dies-as-owner": Fault(computes=FIRST, dies=_all_are_in, contributes=True, **GONE),
    "stopped": Fault(lambda j, r: j.stop(r, SLOW), **AWAY),
    "slow": Fault(computes=SLOW, contributes=False),
    "slow-link": Fault(_linked(speed=0.004), _linked(speed=1.0)),
    "down-and-up": Fault(_linked(cut=True), _linked(cut=False), **AWAY),
    "stopped-and-cut": Fault(_stop_and_cut, _linked(cut=False), **AWAY),
    "no-results": Fault(_lose_results, _let_results_through, owns=False),
    "one-way-loss": Fault(_linked(loss=0.3), _linked(loss=0.0)),
    "disorder": Fault(_linked(twice=0.2, late=0.3), _linked(twice=0.0, late=0.0), refused=Verdict.DUPLICATE),
    "clock-jump": Fault(_jump, again=False),
    "old-cookie": Fault(_old_cookie, contributes=False, refused=Verdict.WRONG_COOKIE, **GONE),
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
        self.results: dict[int, tuple[NDArray[np.float32], Done]] = {}  # of that step, by rank
        self._began: set[int] = set()
        self._pending = {rank: trouble.dies for rank, trouble in troubles.items() if trouble.dies is not None}
        super().__init__(RANKS, seed, plan=Plan((ROWS * WIDTH,), COMPUTE), steps=1 << 30, **SETTINGS)

    def summed(self, at: int, of: int) -> int:
        """Rows of rank ``of`` that rank ``at`` has summed."""
        verdicts = self.nodes[at].engine.job.records.verdicts()[of]
        return int(verdicts[Verdict.STORED] + verdicts[Verdict.ADDED])

    def before_step(self, node: Rank) -> int:
        if node.step == FAILS:
            self._began.add(node.rank)
            if len(self._began) == RANKS and not self.before:
                self.before = {(at, of): self.summed(at, of) for at in range(RANKS) for of in range(RANKS)}
                for rank, trouble in self.troubles.items():
                    trouble.before(self, rank)
        return 0

    def compute_of(self, node: Rank) -> int:
        return self.troubles.get(node.rank, Fault()).computes if node.step == FAILS else super().compute_of(node)

    def take(self, burst: Burst) -> None:
        super().take(burst)
        for rank, dies in list(self._pending.items()):
            if self.before and dies(self, rank):
                del self._pending[rank]
                self.kill(rank)

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        super().finished(rank, done, out)
        if done.step == FAILS:
            self.results[rank] = out, done
            if rank in self.healthy and set(self.healthy) <= set(self.results):
                for troubled, trouble in self.troubles.items():
                    trouble.after(self, troubled)

    def failed(self, rank: int, error: BaseException) -> None:
        """Whom no rank hears any more ends by an error, as it averages nothing (clock-37)."""
        if rank not in self.gone:
            raise error

    def caught_up(self) -> bool:
        """Whether all have made the step that fails, and those that are left are in step, and know who is left.

        No rank is suspect where the others would be no majority (clock-38).
        """
        newest = max(self.nodes[rank].step for rank in self.healthy)
        suspects = [self.nodes[rank].engine.job.membership.suspects for rank in self.left]
        known = all(found & (self.left | self.gone) == self.gone for found in suspects) or 2 * len(self.left) <= RANKS
        in_step = all(self.nodes[rank].step >= newest - 1 for rank in self.left)
        return known and in_step and all(node.step > FAILS for node in self.alive)

    def check_rows(self) -> None:
        """Every row that a healthy rank has got in the step that fails is what it must be.

        Where healthy ranks are no majority of it by themselves, and nothing of the others has come, it may be void.
        """
        inputs = [self.gradient(rank, FAILS, 0, ROWS * WIDTH) for rank in range(RANKS)]
        there = {rank: trouble.contributes for rank, trouble in self.troubles.items()}
        for rank in self.healthy:
            out, done = self.results[rank]
            if done.outcome.minority:
                assert True not in there.values()
                continue
            for k, who in enumerate(contributors(out, inputs, set(range(RANKS)), WIDTH)):
                owner = self.troubles.get(int(OWNERS[k]))
                if who is None:
                    assert owner is not None, f"row {k} of rank {OWNERS[k]} is missing at rank {rank}"
                    assert owner.owns is not True, f"row {k} of rank {OWNERS[k]} is missing at rank {rank}"
                elif owner is not None:
                    assert owner.owns is not False, f"row {k} of rank {OWNERS[k]} at rank {rank}"
                else:
                    wrong = not set(self.healthy) <= who or any(there[r] not in (None, r in who) for r in there)
                    assert not wrong, f"row {k} of healthy rank {OWNERS[k]} is the mean of {sorted(who)} at rank {rank}"
            same_bits(out, self.results[self.healthy[0]][0], WIDTH)

    def check_left(self, first: int) -> None:
        """From step ``first`` on every row is averaged over all who are left, and nothing is skipped."""
        left = self.left
        if 2 * len(left) <= RANKS or len(left | self.gone) < RANKS:
            return
        for rank in left:
            for done in self.nodes[rank].over:
                if done.step >= first:
                    lost = done.outcome.missed or done.outcome.failed_groups or done.outcome.skipped
                    assert not lost, f"rank {rank}, step {done.step}: {done.outcome}"
                    assert not sum(done.missing_of[other] for other in left), f"rank {rank}, step {done.step}"

    def check_end(self) -> None:
        """Refused rows, missed ranks, and whether all is as before."""
        verdicts = self.nodes[self.healthy[0]].engine.job.records.verdicts()
        for trouble in self.troubles.values():
            assert trouble.refused is None or verdicts[:, trouble.refused].any(), f"no {trouble.refused}"
        again = all(trouble.again for trouble in self.troubles.values())
        over = {rank: {done.step: done.outcome for done in self.nodes[rank].over} for rank in self.healthy}
        for rank, outcomes in over.items():
            for step, outcome in outcomes.items():
                # ranks that the step before has cost time or scales are missed, too: they waited for the troubled ones
                # until a deadline, or had no results of theirs where others did
                before = {r: over[r].get(step - 1) for r in over}
                may = {r for r, last in before.items() if last and (last.deadline_hits or last.missed)}
                assert outcome.skipped or outcome.missing <= may | set(self.troubles), f"rank {rank}, step {step}"
        for node in self.alive:
            for done in node.over:
                if done.step < FAILS or (done.step == self.steps - 1 and again):
                    assert not sum(done.missing_of.values()), f"step {done.step} of rank {node.rank} is not whole"


def play(names: tuple[str, ...], seed: int) -> None:
    """One job whose troubled ranks have the faults ``names``."""
    with Job({rank: FAULTS[name] for rank, name in zip(TROUBLED, names, strict=False)}, seed) as job:
        job.start()
        job.until(job.caught_up, LONGEST)
        whole = max(node.step for node in job.alive) + SOON
        job.steps = whole + AFTER
        job.finish()
        job.check_rows()
        job.check_left(whole)
        job.check_end()


CASES = [(name,) for name in FAULTS] + list(itertools.combinations(FAULTS, 2))


#: Of pairs a fifth: each fault is among two at least.
EVERYDAY = [names for names in CASES if len(names) == 1 or sum(map([*FAULTS].index, names)) % 5 == 0]


@pytest.mark.parametrize("names", EVERYDAY, ids="+".join)
def test_the_others_go_on_without_the_failed_ranks(names: tuple[str, ...]) -> None:
    play(names, 0)


@pytest.mark.parametrize("seed", [5, 17, 27])
def test_no_job_ends_since_its_owners_were_stopped(seed: int) -> None:
    """Nothing came to rank 2 in two steps, of owners that had published nothing. Rule: clock-37."""
    play(("stopped", "clock-jump"), seed)
