"""Part seven: jobs beside each other and beside TCP in the simulator, with other ranks, sizes and pauses every time.

Ports are shallow and mark, links have a known speed. They are held to the aims of docs/simulate.md: hardly a row is
lost to incast, two jobs share evenly, TCP that knows of marks keeps half of its fair share, and a job four fifths of
its own (of a second's ops a few more or less are a tenth).
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable

from soak.part import Tell, is_over
from tailbound_lab.simulate.neighbours import share
from tailbound_lab.simulate.ports import Switching

MARKING = Switching(rate=100_000_000, buffer=64 << 10, mark=16 << 10)
KIB = 1 << 10


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return ""


def incast(chance: random.Random, seed: int) -> str:
    """Many ranks, out of step."""
    ranks, size, apart = chance.randrange(4, 17), chance.randrange(256, 1025) * KIB, chance.randrange(1, 11)
    got = share(ranks, size, MARKING, apart=apart * 1_000_000, warm=0.5, seconds=0.5, seed=seed)
    lost = 1 - got.delivered / max(1, got.expected)
    if not got.expected or lost > 0.001:
        return f"incast of {ranks} ranks, {size} bytes, {apart} ms apart: {100 * lost:.3f} % of the rows lost"
    return ""


def two_jobs(chance: random.Random, seed: int) -> str:
    """On the same hosts."""
    ranks, size = chance.randrange(3, 9), chance.randrange(256, 1025) * KIB
    got = share(ranks, size, MARKING, jobs=2, apart=2_000_000, warm=0.5, seconds=1.0, seed=seed)
    if got.jain is None or got.jain < 0.95:
        return f"two jobs of {ranks} ranks, {size} bytes: Jain's index is {got.jain}"
    return ""


def beside_tcp(chance: random.Random, seed: int) -> str:
    """A job and a flow that knows of marks."""
    ranks, size = chance.randrange(3, 7), chance.randrange(256, 1025) * KIB
    alone = share(ranks, size, MARKING, warm=0.3, seconds=0.5, seed=seed)
    beside = share(ranks, size, MARKING, tcp=1, warm=0.6, seconds=1.0, seed=seed)
    tcp, kept = beside.tcp[0], beside.ops[0] / alone.ops[0]
    if tcp < 0.25 or kept < 0.4:
        return (
            f"{ranks} ranks, {size} bytes beside TCP: it has {tcp:.2f} of the link, the job {kept:.2f} of what it had"
        )
    return ""


CASES: tuple[Callable[[random.Random, int], str], ...] = (incast, two_jobs, beside_tcp)


def work(number: int, seed: int, until: float, tell: Tell) -> None:
    """Cases until ``until`` (monotonic)."""
    logging.disable(logging.CRITICAL)
    while time.monotonic() < until and not is_over():
        chance = random.Random(seed)
        case = CASES[seed % len(CASES)]
        if wrong := case(chance, seed):
            tell("found", f"seed {seed}: {wrong}")
        tell(case.__name__, 1)
        seed += 1


def said(counts: Counter[str]) -> str:
    """How far it is."""
    return ", ".join(f"{counts[case.__name__]} times {case.__name__.replace('_', ' ')}" for case in CASES)
