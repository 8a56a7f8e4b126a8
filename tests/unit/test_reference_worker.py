"""The C library against the model of its rules in plain Python: cases, and the life of a job under random packets.

After both, all memory is the same to the byte, stamps included. Rules: clock-19, kernel-12 to kernel-18, kernel-21.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import cases
import rule_cases
from case_worlds import udp_after, udp_before
from reference_worker import ReferenceTables
from tailbound.wire.schema import Verdict
from twins import Attack, Twins
from udp_world import World


def same_bytes(one: World, other: World, what: object) -> None:
    for name, array in one.tables.arrays.items():
        assert array.tobytes() == other.tables.arrays[name].tobytes(), (what, name)


@pytest.mark.parametrize("armed", [False, True], ids=["check", "tag"])
def test_cases(armed: bool) -> None:
    for case in (cases.with_tags(case) for case in cases.CASES) if armed else cases.CASES:
        world = udp_before(case, armed=armed, make=ReferenceTables)
        world.tables.take_events()
        world.tables.take_controls()
        assert world.take(case.packet, case.source) == (case.verdict, case.sender), case.name
        assert world.abandoned == case.abandoned, case.name
        if case.events is not None:
            assert tuple(kind for kind, *_ in world.tables.take_events()) == case.events, case.name
        if case.verdict != Verdict.CORRUPT:
            same_bytes(world, udp_after(case, armed=armed), case.name)


@pytest.mark.parametrize("check", rule_cases.CHECKS)
def test_rules(check: Callable[[Any], None]) -> None:
    check(World(make=ReferenceTables))


@pytest.mark.parametrize("seed", range(3))
def test_the_life_of_a_job(seed: int) -> None:
    """Random packets while the host goes on: the same verdicts and events one by one, the same memory at the end."""
    twins = Twins(World(), World(make=ReferenceTables))
    twins.live(random.Random(seed), 1500)
    assert len(twins.counts) > 20, twins.counts
    same_bytes(twins.kernel, twins.udp, "life")


def test_an_attack_on_a_job_with_a_key() -> None:
    attack = Attack(World(), World(make=ReferenceTables))
    attack.send(random.Random(7), 500)
    attack.end()
