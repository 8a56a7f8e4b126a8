"""The list that every switch must pass, in bmv2 (kernel-24)."""

from __future__ import annotations

import pytest

import p4_world
import switch_cases

pytestmark = pytest.mark.needs("root", "netns", "p4c", "bmv2", "thrift")

#: Rows of two whole chunks, of one and every kind of rest, of the rests alone, and of the shortest.
LENGTHS = (512, 496, 240, 16)


def run(world: p4_world.World, case: switch_cases.Case) -> None:
    with world.jobs(case.jobs):
        for step in case.steps:
            p4_world.play(world, case.jobs, step)


@pytest.mark.parametrize("case", switch_cases.CASES, ids=lambda case: case.name)
def test_case(world: p4_world.World, case: switch_cases.Case) -> None:
    run(world, case)


@pytest.mark.parametrize("codes", LENGTHS)
def test_basic_sums_of_other_lengths(world: p4_world.World, codes: int) -> None:
    listed = [case for case in switch_cases.cases(codes) if case.name in ("basic sum of three workers", "corrupt")]
    assert len(listed) == 2
    for case in listed:
        run(world, case)
