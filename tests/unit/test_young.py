"""The first steps of a job: it has them once, whatever the numbers of its steps."""

from __future__ import annotations

import pytest

from tailbound.transport.steps import STEP_MASK, Young


@pytest.mark.parametrize("first", [0, 7, STEP_MASK - 2])
def test_a_job_is_young_once(first: int) -> None:
    young = Young(first, 5)
    asked = [*range(9), *range(9, 2 * STEP_MASK, 99991), STEP_MASK + 1]
    assert [young.at((first + since) & STEP_MASK) for since in asked] == [True] * 5 + [False] * (len(asked) - 5)


def test_no_first_steps() -> None:
    assert not Young(0, 0).at(0)
