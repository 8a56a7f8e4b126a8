"""Part one: jobs with several ops in flight and random faults, in virtual time (``sim.team``).

A seed gives ranks, settings, sizes, and what befalls whom. Every fault ends by itself, and ranks that were killed come
back. ``sim.engine`` checks each turn. Ranks that count as equal must have equal bits, and the mean when all is mended.
Of a job that fails those faults are told that it takes.
"""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from sim.engine import switch_of
from sim.team import Member, SimTeam, sim_team
from soak.part import Tell
from support import hasty, patient
from tailbound.collective.communicator import Handling
from tailbound.collective.op import Outcome
from tailbound.wire.schema import serial_distance
from tailbound_lab.simulate.fabric import MS, S, Terms

#: Steps at least until all are in step again; then, until nothing is missing, and in which that is so.
STEPS, SOON, AFTER = 30, 8, 3
TERMS = None, Terms(jitter=3 * MS), Terms(loss=0.02), Terms(queue=96 << 10), Terms(rate=1e7, room=8 << 10)


class Trainer:
    """A rank with as many steps in flight as its course is deep. It rests between each and the one that follows it."""

    def __init__(self, course: Course, member: Member, lost: bool = False) -> None:
        self.course, self.member, self.rank, self.lost = course, member, member.config.rank, lost
        self.step = self.flying = 0  # and how many ops are in flight
        for chain in range(course.depth):
            course.job.at(1000 * chain + 50 * self.rank, partial(self.go, chain))

    @property
    def in_step(self) -> bool:
        """Whether it is about as far as others, and suspects none."""
        newest = max(other.step for other in self.course.trainers)
        return self.step >= newest - 1 and not self.member.job.membership.suspects

    def go(self, chain: int) -> None:
        """Launches the next step; joins the others first where it is lost."""
        course, job, again = self.course, self.course.job, partial(self.go, chain)
        if self.member.node.dead or self.step >= course.last or chain >= course.depth:
            return
        if (self.lost or self.member.lost) and not self.flying:
            self.step, self.lost = self.step + self.member.node._join(), False
        step, self.step = self.step, self.step + 1
        chance, calm = random.Random(f"{course.seed} {self.rank} {step}"), step >= course.calm
        behind = self.member.behind >= course.depth  # it applies what others have, to catch up (clock-20)
        tensors = course.tensors(self.rank, step)
        left, contribute = len(tensors), not behind and (calm or chance.random() > 0.03)
        self.flying += left
        for bucket, data in enumerate(tensors):
            if not calm and chance.random() < course.ill:
                data[len(data) // 2] = np.nan
            out = chance.choice((data, np.empty_like(data)))
            starts = {0, *random.Random(bucket).choices(range(len(data)), k=3)} if bucket % 2 else ()

            def done(outcome: Outcome, bucket: int = bucket, out: Any = out) -> None:
                nonlocal left
                course.take(self.rank, step, bucket, out, outcome)
                self.flying, left = self.flying - 1, left - 1
                if not left:
                    job.at(0 if behind else 20 * MS + chance.randrange(course.rests[self.rank]), again)

            last, how = bucket == len(tensors) - 1, Handling(starts=tuple(sorted(starts)), bits=course.bits)
            self.member.launch(bucket, data, out, last=last, done=done, contribute=contribute, handling=how)


class Course:
    """What the ranks of ``job`` launch, and what is wrong with what they get."""

    def __init__(self, job: SimTeam, seed: int, chance: random.Random) -> None:
        self.job, self.seed, self.wrong = job, seed, list[str]()
        self._sizes = chance.choices((1, 7, 64, 1000, 5000, 20_000), k=chance.randint(1, 4))
        self._changing, self.bits = chance.random() < 0.3, 8 if job.world.switch else chance.choice((8, 8, 16))
        self.ill, self.depth = chance.choice((0.0, 0.0, 0.1)), chance.choice((1, 2, 4, 8))
        self.calm = self.last = 1 << 30  # steps
        self.rests = [chance.choice((20 * MS, 20 * MS, 900 * MS, 3 * S)) for _ in range(len(job))]
        self.got: dict[tuple[int, int], tuple[str, str]] = {}  # the first average of a bucket, and whose
        self.trainers = [Trainer(self, member) for member in job.communicators]

    def tensors(self, rank: int, step: int) -> list[Any]:
        """f32[n] of each bucket of a step."""
        random = np.random.default_rng((self.seed, rank, step))
        count = 1 + step // 3 % len(self._sizes) if self._changing else len(self._sizes)
        return [random.standard_normal(size, np.float32) for size in self._sizes[:count]]

    def take(self, rank: int, step: int, bucket: int, out: Any, outcome: Outcome) -> None:
        """Compares a rank's average with the first that was to be the same, and with the mean."""
        told, world = f"rank {rank}, step {step}, bucket {bucket}: {outcome}", self.job.world
        # a switch that began anew has forgotten rows, with what others had of them
        forgot = world._forgot >= 0 >= serial_distance(outcome.label, world._forgot)
        if not (outcome.missed or outcome.doubtful or outcome.skipped or outcome.overwritten or forgot):
            digest = hashlib.blake2b(out.tobytes()).hexdigest() if out.any() else "zero"
            first, by = self.got.setdefault((step, bucket), (digest, told))
            self.wrong += [f"unequal: {by}\n{told}"] if digest != first else []
        self.wrong += [told] if outcome.error else []
        if step >= self.calm + SOON:
            tensors = np.array([self.tensors(other, step)[bucket] for other in range(len(self.job))], np.float64)
            # scales of a switch clip
            error = 0.0 if world.switch else np.mean((out - tensors.mean(0)) ** 2) / np.mean(tensors**2)
            if outcome.missing or outcome.delivered < outcome.expected or error > 2e-3:
                self.wrong.append(f"not the mean ({error:.2g}): {told}")

    def until(self, condition: Callable[[Trainer], bool], what: str) -> None:
        self.job.until(lambda: self.wrong or all(map(condition, self.trainers)), what, 3000 * S)

    def change(self, rank: int, length: int, **terms: float) -> None:
        self.job.world.change(rank, **terms)
        self.job.at(length, lambda: self.job.world.change(rank, **{name: float(name == "speed") for name in terms}))

    def kill(self, rank: int, length: int) -> None:
        """A process ends, and a new one comes in its place."""
        world, members = self.job.world, self.job.communicators

        def come_back() -> None:
            world.revive(rank)
            members[rank] = Member(world.nodes[rank], members)
            self.trainers[rank] = Trainer(self, members[rank], lost=True)

        if len(world.alive) > 2 and not members[rank].config.keyed:  # keys of a new process are told over TCP
            world.kill(rank)
            self.job.at(length, come_back)


#: What befalls a rank for so many ns.
FAULTS: dict[str, Callable[[Course, int, int], None]] = {
    "stop": lambda course, rank, length: course.job.world.stop(rank, length),
    "cut": lambda course, rank, length: course.job.world.unplug(rank, length),
    "lose": lambda course, rank, length: course.change(rank, length, loss=0.3),
    "mute": lambda course, rank, length: course.change(rank, length, loss=1.0),
    "slow": lambda course, rank, length: course.change(rank, length, speed=0.02),
    "disorder": lambda course, rank, length: course.change(rank, length, twice=0.2, late=0.3),
    "kill": Course.kill,
    "map": lambda course, rank, length: course.job.world.propose(tuple({*range(len(course.job))} - {rank}) or (0,)),
    "switch": lambda course, rank, length: course.job.world.switch and course.job.world.restart_switch(length),
}


def play(seed: int, tell: Tell, happens: Sequence[tuple[str, int, int, int]]) -> str:
    """One job, to which faults happen: which, to whom, when, how long, ms. Says what is wrong."""
    chance = random.Random(seed)
    ranks, terms, base = chance.choice((1, 2, 3, 4, 5, 8)), chance.choice(TERMS), chance.choice((hasty, patient))
    kind = chance.choice(({}, {}, {}, {"key_file": "given"}, {"switch": switch_of(ranks)}))
    kind |= {"share_rows": chance.random() < 0.7 and "switch" not in kind, "ring_mib": chance.choice((0.25, 0.5, 1.0))}
    kind |= {"first_step": chance.choice((0, 0, (1 << 22) - 20))}  # where labels wrap
    try:
        with sim_team(ranks, base(width=64, **kind), seed=seed, terms=terms) as job:
            course = Course(job, seed, chance)
            for name, rank, begins, length in happens:
                job.at(begins * MS, partial(FAULTS[name], course, rank % ranks, length * MS))
            ends = max((begins + length for _, _, begins, length in happens), default=0) * MS
            course.until(lambda one: job.now > ends and one.step >= STEPS, "faults are over")
            course.depth, course.rests, job.world.fabric.terms = 1, [1] * ranks, Terms()
            newest = max(one.step for one in course.trainers)
            course.until(lambda one: one.in_step and one.step > newest, "all are in step")
            course.calm = max(one.step for one in course.trainers)
            course.last = course.calm + SOON + AFTER
            course.until(lambda one: one.step >= course.last and not one.flying, "all are through")
            tell("jobs", 1)
    except Exception:
        return traceback.format_exc()
    return "\n".join(course.wrong[:3])


def life(seed: int, tell: Tell) -> str:
    """A job with all faults of a seed. Says what is wrong with as few of them as that takes."""
    chance = random.Random(~seed)
    draw, one = chance.randrange, chance.choice
    happens = [(one([*FAULTS]), draw(8), draw(2000), one((5, 40, 300, 1500))) for _ in range(draw(9))]
    wrong = play(seed, tell, happens)
    for fault in list(happens) if wrong else ():
        fewer = [other for other in happens if other is not fault]
        if found := play(seed, tell, fewer):
            happens, wrong = fewer, found
    return f"play({seed}, ..., {happens})\n{wrong}" if wrong else ""
