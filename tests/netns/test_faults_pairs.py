"""Faults in pairs, each on a rank of its own, against a reference in float64 that leaves out what failed.

Nothing is rotated here, so every row of a result stands for itself: it must be the mean over the healthy ranks and some
of the troubled ones, never one of them twice, never a part of one. Where its owner is in trouble, it may lack healthy
ranks too, or there may be nothing at all.
Rows that are there are the same bits on every rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fault_rows import contributors, same_bits
from lab_team import lab_team
from left_behind import nothing_more
from support import MS, PATIENCE, Team, gradients
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.shape import shape_for
from tailbound.collective.op import Outcome
from tailbound.wire.schema import FIRST_DROP, Verdict
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault, Way
from tailbound_lab.lab.spec import LabSpec
from tailbound_lab.lab.topology import Link

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

RANKS, WIDTH, ROWS = 4, 1408, 256
NUMEL = ROWS * WIDTH
TROUBLED = (1, 2)
SETTINGS: dict[str, Any] = {
    "width": WIDTH,
    "ring_mib": 8.0,
    "rotate": False,
    "share_rows": False,  # who owns a row is known beforehand, also where a rank happens to be late for several ops
    "deadline_1": 1000 * MS,  # a healthy rank's thread may be without a core for nearly as long
    "deadline_2": 1000 * MS,
    "stage_max": 5000 * MS,  # of cold ops, on a loaded machine
    "start_max": 1000 * MS,
    "quiet": 30 * MS,
}
#: Seconds from the launch to the end of a healthy rank's op. With deadlines that are kept it takes 3.1 s; a thread
#: without a core adds to that, but less than waiting for the end of a stage would.
HELD_MOST = (SETTINGS["start_max"] + SETTINGS["stage_max"]) / 1e9
#: Ops until nothing is missing any more: a loaded machine may spoil some of them.
TRIES = 12
#: Slow enough for a rank's rows to take longer than the first deadline after the first burst, which tbf lets through.
SLOW = 1_600_000


@dataclass
class World:
    """A lab, a job in it, and what is going on."""

    lab: Cluster
    job: Team
    undo: ExitStack
    label: int = 0
    #: rows by (receiver, sender) that had been summed before the op in which something fails
    before: dict[tuple[int, int], int] = field(default_factory=dict)
    frozen: dict[int, threading.Event] = field(default_factory=dict)
    unreachable: set[int] = field(default_factory=set)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(RANKS))

    def launch(self, rank: int, data: NDArray[np.float32]) -> Future[tuple[NDArray[np.float32], Outcome, float]]:
        """One all-reduce of ``rank``: result, outcome and seconds."""

        def one() -> tuple[NDArray[np.float32], Outcome, float]:
            out = np.full_like(data, np.nan)
            begun = time.monotonic()
            outcome = self.job[rank].allreduce(data, out).result(PATIENCE)
            return out, outcome, time.monotonic() - begun

        return self.threads.submit(one)

    def cut(self, rank: int) -> None:
        """No packet from or to ``rank`` any more."""
        self.lab.set_link(rank, False, Link.DATA)
        self.unreachable.add(rank)

    def summed(self, at: int, of: int) -> int:
        """Rows of rank ``of`` that the kernel of rank ``at`` has summed."""
        verdicts = self.job[at].job.records.verdicts()[of]
        return int(verdicts[Verdict.STORED] + verdicts[Verdict.ADDED])

    def note(self) -> None:
        """Notes what has been summed so far; nothing is in flight."""
        self.before = {(at, of): self.summed(at, of) for at in range(RANKS) for of in range(RANKS)}

    def come(self, at: int, of: int) -> int:
        """Rows of rank ``of`` that rank ``at`` has summed since then."""
        return self.summed(at, of) - self.before[at, of]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something that has to happen."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"never happened: {what}"
            time.sleep(0.0005)


Step = Callable[[World, int], None]


def _nothing(world: World, rank: int) -> None:
    pass


@dataclass(frozen=True)
class Trouble:
    """One fault of one rank.

    Attributes:
        before: done before anybody launches.
        first: the rank launches before the healthy ones, and this is done before those do.
        launches: ``first``, ``with`` the others, ``after`` them, or ``never``.
        after: done when the healthy ranks are through with the op.
        contributes: whether its rows must (True), must not (False) or may (None) be in the rows of healthy owners.
        owns: the same of the rows it owns, at the healthy ranks.
        again: whether everything is as before in the second op after that (scales settle in the first one).
        refused: what healthy ranks must have counted.
    """

    before: Step = _nothing
    first: Step | None = None
    launches: str = "with"
    after: Step = _nothing
    contributes: bool | None = None
    owns: bool | None = None
    again: bool = True
    refused: Verdict | None = None


def _slow_link(world: World, rank: int) -> None:
    world.lab.set_rate(rank, SLOW, Link.DATA)


def _cut(world: World, rank: int) -> None:
    world.cut(rank)


def _mend(world: World, rank: int) -> None:
    world.lab.set_link(rank, True, Link.DATA)


def _cut_while_sending(world: World, rank: int) -> None:
    """Its first rows are summed, the last ones wait on its interface."""
    world.until(lambda: world.come(0, rank) > 0, f"rows of rank {rank} come in")
    world.cut(rank)


def _cut_as_owner(world: World, rank: int) -> None:
    """Its rows have reached everybody that can be reached, and no healthy rank's have reached it."""
    others = [r for r in range(RANKS) if r != rank and r not in world.unreachable]

    def through() -> bool:
        # the mark may come in front of rows
        marked = all(world.job[r].job.records.contributed(rank, world.label) for r in others)
        return marked and all(world.come(r, rank) == OWN[r] for r in others)

    world.until(through, f"rank {rank} has sent everything")
    world.cut(rank)


def _freeze(world: World, rank: int) -> None:
    """Its transport thread stands still; the kernel goes on, as it does while a process is stopped."""
    go, still = threading.Event(), threading.Event()

    def stand() -> None:
        still.set()
        go.wait(PATIENCE)

    world.job[rank]._engine.call(stand)
    assert still.wait(PATIENCE)
    world.undo.callback(go.set)
    world.frozen[rank] = go


def _thaw(world: World, rank: int) -> None:
    world.frozen[rank].set()


def _lose_one_way(world: World, rank: int) -> None:
    world.lab.set_faults(Fault(loss=0.3), rank, Link.DATA, Way.FROM_WORKER)


def _disorder(world: World, rank: int) -> None:
    world.lab.set_faults(Fault(duplicate=0.2, reorder=0.3), rank, Link.DATA)


def _heal(world: World, rank: int) -> None:
    world.lab.set_faults(Fault(), rank, Link.DATA)


def _jump(world: World, rank: int) -> None:
    """Its clock is suddenly 5 s ahead of its kernel's stamps, and stays there."""
    world.job[rank].job.now = lambda: time.monotonic_ns() + 5_000 * MS  # type: ignore[method-assign]


def _old_cookie(world: World, rank: int) -> None:
    """What it sends is of a job that was, as after a restart that missed the new rendezvous."""
    world.job[rank].job._head["cookie"] ^= 0x5A5A


FAULTS: dict[str, Trouble] = {
    "dies-before": Trouble(before=_cut, launches="never", contributes=False, owns=False, again=False),
    "dies-sending": Trouble(before=_slow_link, first=_cut_while_sending, launches="first", owns=False, again=False),
    "dies-as-owner": Trouble(first=_cut_as_owner, launches="first", contributes=True, owns=False, again=False),
    "stopped": Trouble(before=_freeze, after=_thaw, contributes=False, owns=False),
    "slow": Trouble(launches="after", contributes=False),
    "slow-link": Trouble(before=_slow_link, after=lambda w, r: w.lab.set_rate(r, None, Link.DATA), again=False),
    "down-and-up": Trouble(before=_cut, after=_mend, contributes=False, owns=False),
    "one-way-loss": Trouble(before=_lose_one_way, after=_heal),
    "disorder": Trouble(before=_disorder, after=_heal, contributes=True, owns=True, refused=Verdict.DUPLICATE),
    "clock-jump": Trouble(before=_jump, again=False),
    "old-cookie": Trouble(before=_old_cookie, contributes=False, owns=False, again=False, refused=Verdict.WRONG_COOKIE),
}
#: Every kind of fault once. All pairs meet on the simulated engine (``sim/test_pairs.py``).
CASES = [
    ("dies-before", "slow-link"),
    ("dies-sending", "one-way-loss"),
    ("dies-as-owner", "clock-jump"),
    ("stopped", "disorder"),
    ("slow", "down-and-up"),
    ("old-cookie", None),
]
#: Owner by row, and how many rows each owns.
OWNERS = place(shape_for(NUMEL, WIDTH), OwnerMap(0, tuple(range(RANKS))), RANKS).owner
OWN = np.bincount(OWNERS, minlength=RANKS)


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with nothing_more(), Cluster(LabSpec(workers=RANKS, cables=True)) as made:
        yield made


@pytest.fixture
def world(lab: Cluster) -> Iterator[World]:
    with ExitStack() as undo:
        for rank in TROUBLED:
            undo.callback(lab.set_faults, Fault(), rank, Link.DATA)
            undo.callback(lab.set_rate, rank, None, Link.DATA)
            undo.callback(lab.set_link, rank, True, Link.DATA)
        with lab_team(lab, SETTINGS) as job, undo:
            made = World(lab, job, undo)
            yield made
        made.threads.shutdown()


def whole(world: World, inputs: list[NDArray[np.float32]]) -> bool:
    """An all-reduce of all ranks; whether nothing was missing. Then every row is everybody's mean, else somebody's."""
    futures = [world.launch(rank, inputs[rank]) for rank in range(RANKS)]
    results = [future.result(PATIENCE) for future in futures]
    assert all(outcome.error is None for _, outcome, _ in results)
    world.label = results[0][1].label
    if any(outcome.delivered < outcome.expected for _, outcome, _ in results):
        for out, _, _ in results:
            contributors(out, inputs, set(range(RANKS)), WIDTH)
            same_bits(out, results[0][0], WIDTH)
        return False
    for out, _, _ in results:
        np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
    assert set(contributors(results[0][0], inputs, set(), WIDTH)) == {frozenset(range(RANKS))}
    return True


def settle(world: World, ops: int) -> None:
    """Until nothing was missing in ``ops`` ops running."""
    running = 0
    for seed in range(TRIES):
        running = running + 1 if whole(world, gradients("U", RANKS, NUMEL, seed=10 + seed)) else 0
        if running == ops:
            return
    raise AssertionError(f"never {ops} whole ops running in {TRIES}")


@pytest.mark.parametrize(("one", "other"), CASES, ids=lambda name: name or "alone")
def test_the_others_go_on_without_what_failed(world: World, one: str, other: str | None) -> None:
    troubles = {rank: FAULTS[name] for rank, name in zip(TROUBLED, (one, other), strict=True) if name is not None}
    settle(world, 3)
    world.note()
    world.label += 1 << 10
    inputs = gradients("U", RANKS, NUMEL, seed=7)
    counted = world.job[0].job.records.verdicts().sum(axis=0)
    healthy = [rank for rank in range(RANKS) if rank not in troubles]

    for rank, trouble in troubles.items():
        trouble.before(world, rank)
    futures = {}
    for rank, trouble in troubles.items():
        if trouble.launches == "first":
            futures[rank] = world.launch(rank, inputs[rank])
            assert trouble.first is not None
            trouble.first(world, rank)
    for rank in range(RANKS):
        if rank in healthy or troubles[rank].launches == "with":
            futures[rank] = world.launch(rank, inputs[rank])
    results = {rank: futures[rank].result(PATIENCE) for rank in healthy}
    for rank, trouble in troubles.items():
        trouble.after(world, rank)
        if trouble.launches == "after":
            futures[rank] = world.launch(rank, inputs[rank])

    missing_owners = {rank for rank, trouble in troubles.items() if trouble.owns is not True}
    for rank, (out, outcome, seconds) in results.items():
        assert outcome.error is None
        assert seconds < HELD_MOST, f"rank {rank} was held for {seconds:.1f} s"
        assert outcome.missing <= set(troubles)
        found = contributors(out, inputs, set(range(RANKS)), WIDTH)
        for k, who in enumerate(found):
            if who is None:
                assert OWNERS[k] in missing_owners, f"row {k} of healthy rank {OWNERS[k]} is missing at rank {rank}"
                continue
            if OWNERS[k] in troubles:  # nothing of one that cannot have published
                assert troubles[int(OWNERS[k])].owns is not False, (rank, k, int(OWNERS[k]))
                continue
            assert set(healthy) <= who, f"row {k} of healthy rank {OWNERS[k]} is the mean of {sorted(who)}"
            for r, trouble in troubles.items():
                if trouble.contributes is not None:
                    assert (r in who) == trouble.contributes, (rank, k, r, sorted(who))
        same_bits(out, results[healthy[0]][0], WIDTH)
    refused = world.job[0].job.records.verdicts().sum(axis=0) - counted
    for trouble in troubles.values():
        if trouble.refused is not None:
            assert refused[trouble.refused] > 0, {v.name: int(refused[v]) for v in Verdict if v >= FIRST_DROP}
    for rank, trouble in troubles.items():
        if rank in futures and trouble.launches != "never":
            _, outcome, seconds = futures[rank].result(PATIENCE)
            bound = world.job[rank].config.bound / 1e9
            assert seconds < bound, f"rank {rank}, which was in trouble, was held for {seconds:.1f} s"
    if all(trouble.again for trouble in troubles.values()):
        for member in world.job.communicators:
            assert member.drain(PATIENCE)
        inputs = gradients("U", RANKS, NUMEL, seed=8)
        for future in [world.launch(rank, inputs[rank]) for rank in range(RANKS)]:
            contributors(future.result(PATIENCE)[0], inputs, set(range(RANKS)), WIDTH)
        settle(world, 1)


def test_a_dead_rank_is_named_and_no_longer_waited_for(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Three ops cost a deadline, then nobody waits for it any more; what is said names rank, op and half."""
    victim, healthy = 1, (0, 2, 3)
    settle(world, 3)
    world.cut(victim)
    waited = []

    def said(rank: int, half: str) -> bool:
        """Whether ``rank`` has said that it misses the victim in ``half`` of an op."""
        texts = [text for text in caplog.messages if text.startswith(f"rank {rank}: rank {victim} ")]
        return any(half in text and "op " in text for text in texts)

    for seed in range(6 + TRIES):
        inputs = gradients("U", RANKS, NUMEL, seed=seed)
        results = [world.launch(rank, inputs[rank]) for rank in healthy]
        waited.append(0)
        good = True  # unless a loaded machine holds up a healthy rank, too
        for future in results:
            out, outcome, seconds = future.result(PATIENCE)
            assert outcome.error is None
            assert seconds < HELD_MOST
            assert victim in outcome.missing
            found = set(contributors(out, inputs, set(range(RANKS)), WIDTH))
            assert not any(victim in who for who in found if who is not None)
            good &= outcome.missing == {victim} and found <= {None, frozenset(healthy)}
            waited[-1] += outcome.deadline_hits
        if good and not waited[-1] and all(said(rank, half) for rank in healthy for half in ("contribution", "result")):
            break
    else:
        pytest.fail(f"still waited for, or not named: {waited}, {caplog.messages}")
    assert min(waited[:3]) > 0
