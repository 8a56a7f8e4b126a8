"""The shared tables of cases through the udp datapath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import bare_cases
import cases
import nibble_cases
import rule_cases
from case_worlds import udp_before
from tailbound.wire.schema import Verdict
from udp_world import World

#: Only frames or switches can earn these.
ELSEWHERE = {
    Verdict.NOT_LINEAR, Verdict.FRAGMENT, Verdict.ABANDONED, Verdict.ANSWERED, Verdict.FLUSHED, Verdict.FORGED,
}  # fmt: skip


def prepared(case: cases.Case, *, armed: bool = False) -> World:
    """The world right before the case's packet."""
    world = udp_before(case, armed=armed)
    world.tables.take_events()
    world.tables.take_controls()
    return world


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(case: cases.Case) -> None:
    world = prepared(case)
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


def test_cases_with_tags() -> None:
    """All of them in a job with a key (auth-1, auth-2): the same verdicts, and FORGED for what is damaged."""
    for case in map(cases.with_tags, cases.CASES):
        world = prepared(case, armed=True)
        assert world.take(case.packet, case.source) == (case.verdict, case.sender), case.name
        assert world.abandoned == case.abandoned, case.name


def test_every_verdict_has_a_case() -> None:
    assert set(Verdict) - ELSEWHERE == {case.verdict for case in cases.CASES}


@pytest.mark.parametrize("check", rule_cases.CHECKS)
def test_rules(check: Callable[[Any], None]) -> None:
    check(World())


@pytest.mark.parametrize("count", nibble_cases.COUNTS)
def test_sums_of_half_bytes(count: int) -> None:
    nibble_cases.check_sums(World(), count)


def test_half_bytes_of_more_than_seventeen_ranks() -> None:
    nibble_cases.check_more(World(ranks=32))


def test_a_switch_has_no_key_and_nobody_else_lacks_it() -> None:
    """Rule: auth-7."""
    world = World()
    world.arm()
    assert bare_cases.wrong(world) == {}
