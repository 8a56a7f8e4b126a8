"""Ranks that are stopped and cut off at random, in virtual time, and whether replicas are what ranks take them for.

No job ends while a majority lives. ``SOON`` steps after the last fault every row is averaged over all ranks. Ranks that
take their replicas for sound hold the same after the same step (``Replicas``, a model of ``torch.resync``).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.engine import Done, Plan, World
from tailbound.torch.resync import _SILENT
from tailbound_lab.simulate.fabric import MS, S

#: For so long faults begin; how long one lasts, ms.
SPAN, SHORTEST, LONGEST = 15 * S, 50, 2500
#: Steps after the last fault until nothing is missing, and steps that are looked at then; of virtual time at most, ns.
SOON, AFTER, MOST = 5, 7, 100 * S


@dataclass
class Replica:
    """What a rank holds: a digest of all averages that it has applied."""

    state: bytes = b""
    sound: bool = True
    step: int = -1  #: the last one that is over
    averages: dict[int, bytes] = field(default_factory=dict)  #: of the step under way, by op
    void: bool = False
    heard: dict[int, bool] | None = None  #: by rank, whether it was sound
    giver: int = -1
    waits: bool = False  #: for the end of the giver's step
    claims: dict[int, bytes] = field(default_factory=dict)  #: by step, what it held since it is sound

    def unsound(self) -> None:
        """It is not what others hold."""
        self.sound = False
        self.claims.clear()


class Replicas(World):
    """A job whose ranks keep replicas equal; a question or a state between two of them takes no time."""

    def __init__(self, ranks: int, seed: int, kinds: tuple[str, ...]) -> None:
        self.random, self.kinds = random.Random(seed), kinds
        self.replicas = [Replica() for _ in range(ranks)]
        plan = Plan((64 * 64, 64 * 32), compute=self.random.choice((5, 20, 80)) * MS)
        super().__init__(ranks, seed, plan=plan, steps=1 << 30, share_rows=True)

    def fail(self) -> int:
        """Has ranks fail at random from the next second on; returns when all of that is over, ns."""
        when = self.fabric.now + S
        end = when + SPAN
        while when < end:
            rank, length = self.random.randrange(self.ranks), self.random.randint(SHORTEST, LONGEST) * MS
            fault = {"stop": self.stop, "cut": self.unplug}[self.random.choice(self.kinds)]
            self.fabric.at(when, lambda fault=fault, rank=rank, length=length: fault(rank, length))  # type: ignore[misc]
            when += int(self.random.expovariate(1) * self.random.choice((200, 700))) * MS
        return end + LONGEST * MS

    def finished(self, rank: int, done: Done, out: NDArray[np.float32]) -> None:
        super().finished(rank, done, out)
        node, own, outcome = self.nodes[rank], self.replicas[rank], done.outcome
        own.void |= outcome.minority or outcome.skipped or outcome.void
        own.averages[done.label] = out.tobytes()
        applied = node._behind and rank in node.engine.job.sequence.map_at(done.step).owners
        if done.step > own.step + 1:  # it has jumped
            own.unsound()
            own.heard = None
        if outcome.missed or outcome.doubtful or applied:
            own.unsound()
        if node._waiting == 1:
            averages = b"".join(own.averages[label] for label in sorted(own.averages))
            own.state = own.state if own.void else hashlib.blake2b(own.state + averages).digest()
            own.step, own.void, own.averages = done.step, False, {}
            self._boundary(rank)

    def _boundary(self, rank: int) -> None:
        own, job = self.replicas[rank], self.nodes[rank].engine.job
        if not own.sound and own.giver >= 0:
            self._take(rank)
        elif not own.sound:
            self._seek(rank, job.membership.alive(job.steps.own), job.membership.alive(job.steps.own, _SILENT))
        self._claim(rank)
        for taker, replica in enumerate(self.replicas):  # it has waited for the end of this step
            if replica.waits and replica.giver == rank:
                self._take(taker)

    def _seek(self, rank: int, live: list[int], others: list[int]) -> None:
        """As ``Resync._seek``: at one boundary it asks, at the next it chooses, and at the one after that it takes."""
        own = self.replicas[rank]
        heard, own.heard = own.heard, None
        if heard is None:
            own.heard = {other: self.replicas[other].sound for other in others if self._reached(rank, other)}
        elif sound := [other for other in others if heard.get(other)]:
            own.giver = self.random.choice(sound)
        elif live and rank < min(others) and heard.keys() >= set(others):
            own.sound = True

    def _take(self, rank: int) -> None:
        """Takes the state of its giver, if both are between the same two steps; else it waits for that once."""
        own, giver = self.replicas[rank], self.replicas[self.replicas[rank].giver]
        if not (giver.sound and self._reached(rank, own.giver)):
            own.giver = -1
        elif (giver.step, giver.averages, own.averages) == (own.step, {}, {}):
            own.state, own.sound, own.giver = giver.state, True, -1
            self._claim(rank)
        elif own.waits:
            own.giver = -1
        own.waits = own.giver >= 0

    def _claim(self, rank: int) -> None:
        own = self.replicas[rank]
        if not own.sound:
            return
        own.claims[own.step] = own.state
        for other, replica in enumerate(self.replicas):
            held = replica.claims.get(own.step, own.state) if self._reached(rank, other) else own.state
            assert held == own.state, f"ranks {rank} and {other} are sound after step {own.step}, and differ"

    def _reached(self, *ranks: int) -> bool:
        """Whether all of ``ranks`` run, and are connected."""
        return not any(self.nodes[r].stopped > self.fabric.now or self.fabric.ends[r].cut for r in ranks)

    def in_step(self) -> bool:
        """Whether all are about as far, and no rank is left out."""
        steps = [node.step for node in self.nodes]
        return max(steps) - min(steps) <= 1 and not any(node.engine.job.membership.suspects for node in self.nodes)

    def check(self, first: int) -> None:
        """From step ``first`` on nothing is missing."""
        for node in self.nodes:
            for done in node.over:
                if first <= done.step < first + AFTER:
                    lost = done.outcome.missed or done.outcome.failed_groups or done.outcome.skipped
                    whole = not lost and not done.missing_of.total()
                    assert whole, f"rank {node.rank}, step {done.step}: {done}"


def play(seed: int, kinds: tuple[str, ...]) -> None:
    """One job, in which nothing raises."""
    with Replicas(random.Random(seed).choice((3, 3, 4, 5)), seed, kinds) as job:
        job.start()
        over = job.fail()
        job.until(lambda: job.fabric.now >= over, MOST)
        job.until(job.in_step, MOST)
        first = max(node.step for node in job.nodes) + SOON
        job.until(lambda: min(node.step for node in job.nodes) >= first + AFTER, MOST)
        job.check(first)
        job.until(lambda: all(replica.sound for replica in job.replicas), MOST)


STOPS, CUTS = ("stop",), ("stop", "cut")


@pytest.mark.parametrize(("seed", "kinds"), [(4, STOPS), (19, CUTS), (21, CUTS), (22, CUTS)])
def test_ranks_that_fail_at_random_end_no_job_and_leave_no_two_states(seed: int, kinds: tuple[str, ...]) -> None:
    """Rules: clock-20, clock-21, clock-37."""
    play(seed, kinds)
