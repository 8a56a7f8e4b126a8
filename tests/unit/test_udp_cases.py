"""The shared tables of cases through the udp datapath: the C library, and the model of its rules in plain Python.

All memory of the two is the same to the byte, stamps included, after each case and after the life of a job under random
packets. Rules: clock-19, kernel-12 to kernel-18, kernel-21.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import cases
import nibble_cases
import rule_cases
from case_worlds import udp_before
from reference_worker import ReferenceTables
from tailbound.datapath.tables import Tables
from tailbound.wire.schema import Verdict
from twins import Attack, Twins
from udp_world import World

#: Only frames or switches can earn these.
ELSEWHERE = {
    Verdict.NOT_LINEAR, Verdict.FRAGMENT, Verdict.ABANDONED, Verdict.ANSWERED, Verdict.FLUSHED, Verdict.FORGED,
}  # fmt: skip
BOTH: tuple[Any, ...] = Tables, ReferenceTables


def same_bytes(one: World, other: World) -> None:
    for name, array in one.tables.arrays.items():
        assert array.tobytes() == other.tables.arrays[name].tobytes(), name


@pytest.mark.parametrize("armed", [False, True], ids=["check", "tag"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(case: cases.Case, armed: bool) -> None:
    """In a job with a key, too (auth-1, auth-2), with FORGED for what is damaged."""
    case, worlds = cases.with_tags(case) if armed else case, []
    for make in BOTH:
        world = udp_before(case, armed=armed, make=make)
        world.tables.take_events()
        world.tables.take_controls()
        sums, results = world.store.sums.copy(), world.store.results.copy()
        assert world.take(case.packet, case.source) == (case.verdict, case.sender)
        assert world.abandoned == case.abandoned
        if case.events is not None:
            assert tuple(kind for kind, _, _ in world.tables.take_events()) == case.events
        assert (world.store.sums != sums).any() == (case.verdict in (Verdict.STORED, Verdict.ADDED))
        assert (world.store.results != results).any() == (case.verdict == Verdict.RESULT_TAKEN)
        passed = [case.packet] if case.verdict == Verdict.CONTROL_PASSED else []
        assert world.tables.take_controls() == passed
        assert world.reflected == (case.verdict == Verdict.REFLECTED)
        worlds.append(world)
    if case.verdict != Verdict.CORRUPT:  # which may leave its codes where no rank reads (kernel-9)
        same_bytes(*worlds)


def test_every_verdict_has_a_case() -> None:
    assert set(Verdict) - ELSEWHERE == {case.verdict for case in cases.CASES}


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("check", rule_cases.CHECKS)
def test_rules(check: Callable[[Any], None], make: Any) -> None:
    check(World(make=make))


@pytest.mark.parametrize("count", nibble_cases.COUNTS)
def test_sums_of_half_bytes(count: int) -> None:
    nibble_cases.check_sums(World(), count)


def test_half_bytes_of_more_than_seventeen_ranks() -> None:
    nibble_cases.check_more(World(ranks=32))


@pytest.mark.parametrize("seed", range(3))
def test_the_life_of_a_job(seed: int) -> None:
    """Random packets while the host goes on: the same verdicts and events one by one, the same memory at the end."""
    twins = Twins(World(), World(make=ReferenceTables))
    twins.live(random.Random(seed), 1500)
    assert len(twins.counts) > 20, twins.counts
    same_bytes(twins.kernel, twins.udp)


def test_an_attack_on_a_job_with_a_key() -> None:
    attack = Attack(World(), World(make=ReferenceTables))
    attack.send(random.Random(7), 500)
    attack.end()
