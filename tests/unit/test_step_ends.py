"""Which all-reduce ends a step: of a backward pass, and of a sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.wire.schema import OP_INDEX_BITS

pytestmark = pytest.mark.needs("torch")


def ends(passes: list[list[int]]) -> list[tuple[list[bool], bool]]:
    """(answers to the calls, whether an empty op has to end the step) of every pass."""
    from tailbound.torch.step_ends import Passes

    follower = Passes()
    return [([follower.call(module) for module in modules], follower.over()) for modules in passes]


def test_the_first_pass_is_ended_by_an_empty_op_and_those_like_it_are_not() -> None:
    assert ends([[2, 1, 0]] * 3) == [([False] * 3, True), ([False, False, True], False), ([False, False, True], False)]


def test_a_pass_through_fewer_modules() -> None:
    assert ends([[2, 1, 0], [2, 1], [2, 1]])[1:] == [([False, False], True), ([False, True], False)]


def test_a_pass_that_broke_off_is_a_step_and_the_next_one_is_like_the_one_before_it() -> None:
    from tailbound.torch.step_ends import Passes

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


def shown(whats: str, ops: int = 1) -> list[str]:
    """What becomes of every all-reduce: number of its bucket (``-``: odd), and ``|`` where a step ends."""
    from tailbound.torch.step_ends import Steps

    steps = Steps()
    turns = [steps.take(what, ops) for what in whats]
    return [f"{'-' if t.odd else t.bucket}{'|' if t.last else ''}" for t in turns]


def test_ddp_with_one_bucket_first() -> None:
    """The first step has one bucket with everything; then they are built anew."""
    assert shown("Aabcabcabcabc") == ["-|"] * 7 + ["0", "1", "2|"] * 2


def test_a_metric_between_steps_is_a_step_of_its_own() -> None:
    assert shown("abababab" + "m" + "abab")[4:] == ["0", "1|", "0", "1|", "-|", "0", "1|", "0", "1|"]


def test_what_comes_within_a_step_ends_it_and_the_next_one_fits() -> None:
    assert shown("abcabcabc" + "a" + "m" + "bc" + "abc")[6:] == ["0", "1", "2|", "0", "-|", "-|", "-|", "0", "1", "2|"]


def test_equal_buckets_within_a_step_do_not_mislead_for_long() -> None:
    """One of them looks like a step by itself, until too much does not fit."""
    assert shown("abbbbc" * 6)[-12:] == ["0", "1", "2", "3", "4", "5|"] * 2


def test_another_layout_is_learned() -> None:
    assert shown("abc" * 10 + "xy" * 5)[-4:] == ["0", "1|"] * 2


def test_a_step_never_has_more_ops_than_can_be_numbered() -> None:
    from tailbound.torch.step_ends import MOST_OPS

    assert MOST_OPS * 2 <= 1 << OP_INDEX_BITS  # a part of the pattern, and what interrupts it
    assert shown("abcd" * 4, MOST_OPS // 2)[8:] == ["0", "1|", "2", "3|"] * 2
    assert shown("ab" * 4, MOST_OPS)[4:] == ["0|", "1|"] * 2


@given(pattern=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), before=st.text("abcdxyz", max_size=20))
def test_what_repeats_is_found(pattern: list[str], before: str) -> None:
    """Whatever came before, in the end few all-reduces of what repeats are odd, and steps are whole repetitions.

    Few, not none: a shorter repetition within it may be taken for the step, and what does not fit that is odd.
    """
    late = shown(before + "".join(pattern) * 40)[-12 * len(pattern) :]
    assert late.count("-|") <= len(late) / 8
    assert late[: len(late) // 2] == late[len(late) // 2 :]


@given(st.text("abc", max_size=200), st.integers(1, 300))
def test_steps_always_end_in_time(whats: str, ops: int) -> None:
    run = 0
    for turn in shown(whats, ops):
        run += ops
        assert run <= 1 << OP_INDEX_BITS
        run = 0 if turn.endswith("|") else run


def test_told_steps_are_like_the_one_before_and_have_no_more_ops_than_can_be_numbered() -> None:
    from tailbound.torch.step_ends import MOST_OPS, Told

    told = Told()

    def step(*ops: int) -> tuple[str, bool]:
        turns = [told.take("x", each) for each in ops]
        return " ".join(f"{turn.bucket}{'|' if turn.last else ''}" for turn in turns), told.over()

    assert [step(1, 1) for _ in range(3)] == [("0 1", True), ("0 1|", False), ("0 1|", False)]
    assert [step(1) for _ in range(2)] == [("0", True), ("0|", False)]
    assert [step(1, 1) for _ in range(2)] == [("0| 1", True), ("0 1|", False)]
    assert step(MOST_OPS, 1)[0] == "0| 1"
    assert step() == ("", False)
