"""Transitions that exploring has seen in the udp datapath's tables, by the kernel program, alone and on two CPUs.

Rules: kernel-15, kernel-16, kernel-17, kernel-19, kernel-20.
"""

from __future__ import annotations

import contextlib
import os

import pytest

from interleave.pairs import Both, kinds_of_pairs, pairs_of
from interleave.scene import SCENES
from interleave.tables import EVERY_DAY, Tables, check_steps, explored

PARTS = tuple(scene for scene in SCENES if scene != "all")
#: By how many short rounds one CPU is later than the other.
DELAYS = ((0, 0), (0, 24), (24, 0))
two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")


def test_every_kind_of_transition(make) -> None:
    """Rules: kernel-12, kernel-14, kernel-15, kernel-16, kernel-17."""
    for scene in SCENES:
        check_steps(Tables(make()), explored(scene, EVERY_DAY[scene]).kinds)


@two_cpus
def test_one_of_the_two_orders(make, loader: str) -> None:
    """A pair of every kind in 200 of the states, spread over them."""
    with contextlib.closing(Both(make(), loader)) as both:
        for scene in PARTS:
            pairs = kinds_of_pairs(scene, EVERY_DAY[scene], 200)
            assert len(pairs) > 50
            assert both.check(pairs, DELAYS) > 10, "the second was never first: the test has not met its races"


@two_cpus
@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", PARTS)
def test_every_pair_in_a_thousand_states(make, loader: str, scene: str) -> None:
    with contextlib.closing(Both(make(), loader)) as both:
        both.check(list(pairs_of(scene, 20_000, 1000)), DELAYS)
