"""The shared table of cases through the udp datapath."""

from __future__ import annotations

import pytest

import cases
from tailbound.wire.schema import Verdict, op_slot
from udp_world import World

#: Only frames or switches can earn these.
ELSEWHERE = {
    Verdict.NOT_LINEAR, Verdict.FRAGMENT, Verdict.ABANDONED, Verdict.ANSWERED, Verdict.FLUSHED, Verdict.FORGED,
}  # fmt: skip


def prepared(case: cases.Case, *, armed: bool = False) -> World:
    """The world right before the case's packet."""
    world = World(registered=case.registered)
    if armed:
        world.arm()
    for slot, (op, exponent) in case.expect.items():
        world.store.expect[slot] = (op, exponent, 1)
    if case.expect_results:
        world.store.expect_results[op_slot(case.expect_results[0])] = case.expect_results
    for packet in case.before:
        world.take(packet)
    if case.sealed:
        world.tables.seal(*case.sealed)
    for slot, (op, exponent) in case.told.items():
        world.store.expect[slot] = (op, exponent, 1)
    world.control(**case.control)
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
