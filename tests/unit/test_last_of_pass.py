"""Which all-reduce of a backward pass ends its step."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("torch")


def run(passes: list[list[int]]) -> list[tuple[list[bool], bool]]:
    """(answers to the calls, whether an empty op has to end the step) of every pass."""
    from tailbound.torch.last_of_pass import Passes

    follower = Passes()
    return [([follower.call(module) for module in modules], follower.over()) for modules in passes]


def test_the_first_pass_is_ended_by_an_empty_op_and_those_like_it_are_not() -> None:
    assert run([[2, 1, 0]] * 3) == [([False] * 3, True), ([False, False, True], False), ([False, False, True], False)]


def test_a_pass_through_fewer_modules() -> None:
    assert run([[2, 1, 0], [2, 1], [2, 1]])[1:] == [([False, False], True), ([False, True], False)]


def test_a_pass_through_more_modules_is_two_steps_once() -> None:
    assert run([[2, 1], [2, 1, 0], [2, 1, 0]])[1:] == [([False, True, False], True), ([False, False, True], False)]


def test_another_order() -> None:
    assert run([[1, 0], [0, 1], [0, 1]])[1:] == [([False, False], True), ([False, True], False)]


def test_a_module_that_is_used_twice() -> None:
    assert run([[1, 0, 1], [1, 0, 1]])[1] == ([False, False, True], False)


def test_nothing_happens_without_a_call() -> None:
    assert run([[1, 0], [], [1, 0]])[1:] == [([], False), ([False, True], False)]
