"""Who should own rows: lateness, and the policy over it (clock-22); limits on loss (clock-15)."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tailbound.errors import ConfigError
from tailbound.kernel.core import core
from tailbound.transport.agreement import Lateness, Shares
from tailbound.transport.config import Limits
from tailbound.wire.packets import record_of
from tailbound.wire.schema import OWNER, Action

MS = 1_000_000
ALL = (0, 1, 2, 3)


def observe(
    shares: Shares, lateness: dict[int, int] | None = None, absent: tuple[int, ...] = (), pace: int = 20
) -> tuple[int, ...]:
    """One observation, in ms."""
    return shares.update({r: ms * MS for r, ms in (lateness or {}).items()}, absent, pace * MS)


def steps_until(shares: Shares, wanted: tuple[int, ...], lateness: dict[int, int] | None = None, **more: int) -> int:
    steps = 1
    while observe(shares, lateness, **more) != wanted:
        assert steps < 2000, shares.owners
        steps += 1
    return steps


def lateness_of(*ops: tuple[int, list[int]]) -> int:
    """After ops, each given as the own launch and the first packets of others."""
    late = Lateness()
    for own, others in ops:
        late.add(own, others)
    return late.value


@pytest.mark.parametrize(
    ("launches", "late"),
    [
        ([0, 50], [1]),
        ([50, 0, 0], [0]),
        ([50, 0, 0, 60], [0, 3]),
        ([0, 50, 0, 70, 0, 60, 0, 90], [1, 3, 5, 7]),
        ([0, 50, 60], []),  # of three ranks two that come together are no stragglers
        ([0, 50, 100], [2]),
        ([0, 0, 0, 0], []),
    ],
)
def test_the_late_ones_see_themselves_and_nobody_else(launches: list[int], late: list[int]) -> None:
    ops = [(own, launches[:rank] + launches[rank + 1 :]) for rank, own in enumerate(launches)]
    assert [rank for rank, op in enumerate(ops) if lateness_of(*[op] * 16) > 25] == late


AT_ONCE, LATE, ALONE = (0, [0, 0]), (10, [0, 0]), (5, list[int]())


@pytest.mark.parametrize(
    ("ops", "value"),
    [
        # half a window is needed, in which others were there
        ([LATE] * 7 + [ALONE], 0),
        ([LATE] * 8 + [ALONE], 10),
        # three of sixteen ops in time are enough not to be late
        ([LATE] * 12 + [(900, [0, 0])] * 4, 10),
        ([AT_ONCE] * 2 + [LATE] * 10 + [(900, [0, 0])] * 4, 10),
        ([AT_ONCE] * 3 + [LATE] * 9 + [(900, [0, 0])] * 4, 0),
        ([LATE] * 16 + [(0, [7])] * 3, 0),
    ],
)
def test_lateness_is_that_of_nearly_all_of_the_last_sixteen_ops(ops: list[tuple[int, list[int]]], value: int) -> None:
    assert lateness_of(*ops) == value


def test_who_goes_is_back_after_a_few_steps_in_time_and_later_each_time_that_this_was_too_early() -> None:
    shares = Shares(4)
    for wait in (8, 16, 32, 64, 128, 128):
        assert steps_until(shares, (0, 1, 3), {2: 50}) == 4
        assert steps_until(shares, ALL) == wait
    for _ in range(1000):
        observe(shares)
    assert steps_until(shares, (0, 1, 3), {2: 50}) == 4
    assert steps_until(shares, ALL, {2: 1}) == 8


@pytest.mark.parametrize(("on", "off", "most"), [(40, 40, 7), (10, 60, 11), (6, 30, 7), (6, 100, 17)])
def test_owners_do_not_change_with_a_rank_that_is_late_and_in_time_in_turn(on: int, off: int, most: int) -> None:
    shares, seen = Shares(4), [ALL]
    for step in range(3000):
        owners = observe(shares, {2: 50} if step % (on + off) < on else {})
        seen += [owners] if owners != seen[-1] else []
    assert len(seen) - 1 <= most


def test_an_absent_rank_goes_at_once_and_comes_back_as_a_late_one_does() -> None:
    shares = Shares(4)
    for wait in (8, 16):
        assert observe(shares, absent=(1,)) == (0, 2, 3)
        assert steps_until(shares, ALL) == wait


@pytest.mark.parametrize(
    ("lateness", "pace"), [({1: 5}, 20), ({1: 4, 2: 400}, 20), ({1: 100, 2: 400}, 20), ({1: 10}, 40), ({1: 30}, 200)]
)
def test_who_is_hardly_late_stays(lateness: dict[int, int], pace: int) -> None:
    """Beside the least that counts, the pace of an op, or one that is far later."""
    shares = Shares(4)
    for _ in range(50):
        assert 1 in observe(shares, lateness, pace=pace)


def test_between_the_limits_nothing_moves_and_one_step_in_time_begins_the_count_anew() -> None:
    shares = Shares(4)
    for step in range(40):
        assert observe(shares, {1: 4 if step % 4 == 3 else 50}) == ALL
    steps_until(shares, (0, 2, 3), {1: 50})
    for _ in range(50):
        assert observe(shares, {1: 4}) == (0, 2, 3)
    assert steps_until(shares, ALL, {1: 5}, pace=40) == 8


@pytest.mark.parametrize(
    ("lateness", "absent", "owners", "least"),
    [
        ((0, 50, 90), (), (0, 1), 1),
        ((0, 50, 90), (0,), (1, 2), 1),
        ((90, 50, 0), (2,), (0, 1), 1),  # none that is there gives way to one that is not
        ((0, 0, 90), (0, 1), (2,), 1),
        ((0, 60, 50, 90), (), (0, 2), 1),
        ((0, 50, 60, 70, 80), (), (0, 1, 2), 1),
        ((90, 80, 70, 0), (), (1, 2, 3), 3),
        ((0, 0, 0), (1, 2), (0, 1), 2),
        ((0, 0, 0), (0, 1, 2), (0,), 1),
        ((0, 0), (1,), (0, 1), 5),
    ],
)
def test_half_of_those_that_are_there_own_rows_and_two_at_least(
    lateness: tuple[int, ...], absent: tuple[int, ...], owners: tuple[int, ...], least: int
) -> None:
    """Rows of a single owner are lost together, and rings have room for a share of so much. Rule: clock-22."""
    shares = Shares(len(lateness), least)
    for _ in range(20):
        observe(shares, dict(enumerate(lateness)), absent)
    assert shares.owners == owners


@pytest.mark.parametrize(
    ("expected", "taken", "action"),
    [
        *((100, 100, Action.NONE), (100, 50, Action.NONE), (100, 49, Action.SKIP), (100, 10, Action.SKIP)),
        *((100, 9, Action.STOP), (8, 0, Action.STOP), (7, 0, Action.NONE), (0, 0, Action.NONE)),
    ],
)
def test_one_op_is_judged_by_its_loss(expected: int, taken: int, action: Action) -> None:
    guard = record_of(OWNER)(stop=0.9, skip=0.5)
    assert core().fast.tb_judge_loss(ctypes.addressof(guard), expected, taken) == action


@pytest.mark.parametrize("wrong", [{"skip": 1.5}, {"stop": -0.1}])
def test_wrong_limits_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
