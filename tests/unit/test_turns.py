"""Whose turn a step is: of optimizers where it is applied without computing it, and of the all-reduces of a pass."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest

from solo import without_job

pytest.importorskip("torch", reason="missing capability 'torch'")

import torch

from tailbound.torch.absence import step_optimizers
from tailbound.torch.backend import Passes
from tailbound.torch.replica import Replica


def due(steps: list[str]) -> str:
    """Of optimizers named by letters: those due after ``steps``, of which each is the letters of those that stepped."""
    weight = torch.nn.Parameter(torch.zeros(1))
    known = {letter: torch.optim.SGD([weight], 0.1) for letter in "ABC"}
    turns = without_job().steps
    for step in steps:
        for place, letter in enumerate(step):
            turns.note(known[letter], begins=place == 0)
    found = turns.due(list(known.values()))
    return "".join(letter for letter, one in known.items() if one in found)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([], "ABC"),
        (["AB", "AB"], "AB"),
        (["A"] * 9 + ["B"], "B"),
        (["A"] * 9 + ["B"] * 2, "B"),
        (["A", "B"] * 3 + ["A"], "B"),
        (["A", "AB"] * 3, "A"),
        (["A", "A", "A", "B"] * 3 + ["A"] * 3, "B"),
        (["A"] * 40 + ["B", "C"] * 2, "B"),
        (["AA", "A"], "A"),
    ],
)
def test_steps_go_on_as_they_have_repeated(steps: list[str], wanted: str) -> None:
    assert due(steps) == wanted


@pytest.mark.parametrize("kept", [False, True])
def test_an_optimizer_that_was_replaced_or_dropped_steps_no_more(kept: bool) -> None:
    """A second phase of training has a new one. The first stepped on where steps were applied, and kept its state."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    replica = Replica(net)
    state = without_job(resync=SimpleNamespace(replica=replica))
    first = torch.optim.SGD(net.parameters(), 1.0)
    assert replica.adopt(first)
    state.steps.note(first, begins=True)
    left, other = weakref.ref(first), first if kept else None
    del first
    second = torch.optim.SGD(net.parameters(), 0.125)
    assert replica.adopt(second)
    assert state.steps.due([second]) == [second]  # a dropped one is not waited for
    state.steps.note(second, begins=True)
    assert (left() is None) == (other is None)
    assert replica.optimizers == ([other, second] if kept else [second])
    net.weight.grad = torch.ones_like(net.weight)
    step_optimizers(state)
    assert net.weight.item() == -0.125


@pytest.mark.parametrize(
    ("pattern", "apart"),
    [
        ("100" * 5, 1),
        ("100" * 6, 3),
        ("11" + "100" * 50, 1),
        ("00000" + "0011111" * 5, 1),  # a start that reads over what was trained with before, and then bad data
    ],
)
def test_iterations_that_leave_steps_out_now_and_then_are_no_accumulation(pattern: str, apart: int) -> None:
    """One bad batch in twenty on one rank: three distances alike ended its process after some 10,000 batches."""
    optimizer, turns = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1), without_job().steps
    turns.start()
    for step in pattern:
        if step == "1":
            turns.passed()
            turns.note(optimizer, begins=True)
        turns.iterate()
    assert turns.apart == apart


@pytest.mark.parametrize(
    ("passes", "ends", "unended"),
    [
        # the first pass is ended by an empty op, and those like it are not
        ("210 210 210", "000 001 001", "100"),
        ("210 21 21", "000 00 01", "110"),  # through fewer modules
        ("210 2! 210", "000 0 001", "110"),  # one broke off: the next one is like the one before it
        ("21 210 210", "00 010 001", "110"),  # through more modules: two steps, once
        ("10 01 01", "00 00 01", "110"),
        ("101 101", "000 001", "10"),  # a module that is used twice
        ("10 - 10", "00 - 01", "100"),  # nothing happens without a call
    ],
)
def test_each_pass_is_expected_to_be_like_the_one_before(passes: str, ends: str, unended: str) -> None:
    """``ends``: whether a call ends the step; ``unended``: an empty op has to end it after the pass."""
    follower = Passes()
    found, left = [], ""
    for modules in passes.split():
        found.append("".join(str(int(follower.call(module))) for module in modules.strip("!-")) or "-")
        left += str(int(follower.over(whole=not modules.endswith("!"))))
    assert (found, left) == (ends.split(), unended)
