"""Which all-reduce of a pass ends its step."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("torch")


def ends(passes: list[list[int]]) -> list[tuple[list[bool], bool]]:
    """(answers to the calls, whether an empty op has to end the step) of every pass."""
    from tailbound.torch.passes import Passes

    follower = Passes()
    return [([follower.call(module) for module in modules], follower.over()) for modules in passes]


def test_the_first_pass_is_ended_by_an_empty_op_and_those_like_it_are_not() -> None:
    assert ends([[2, 1, 0]] * 3) == [([False] * 3, True), ([False, False, True], False), ([False, False, True], False)]


def test_a_pass_through_fewer_modules() -> None:
    assert ends([[2, 1, 0], [2, 1], [2, 1]])[1:] == [([False, False], True), ([False, True], False)]


def test_a_pass_that_broke_off_is_a_step_and_the_next_one_is_like_the_one_before_it() -> None:
    from tailbound.torch.passes import Passes

    follower = Passes()
    found = [
        ([follower.call(module) for module in modules], follower.over(whole=len(modules) > 1))
        for modules in ([2, 1, 0], [2], [2, 1, 0])
    ]
    assert found[1:] == [([False], True), ([False, False, True], False)]


def test_a_pass_through_more_modules_is_two_steps_once() -> None:
    assert ends([[2, 1], [2, 1, 0], [2, 1, 0]])[1:] == [([False, True, False], True), ([False, False, True], False)]


def test_another_order() -> None:
    assert ends([[1, 0], [0, 1], [0, 1]])[1:] == [([False, False], True), ([False, True], False)]


def test_a_module_that_is_used_twice() -> None:
    assert ends([[1, 0, 1], [1, 0, 1]])[1] == ([False, False, True], False)


def test_nothing_happens_without_a_call() -> None:
    assert ends([[1, 0], [], [1, 0]])[1:] == [([], False), ([False, True], False)]
