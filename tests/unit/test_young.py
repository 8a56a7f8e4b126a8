"""The first steps of a job: it has them once, whatever the numbers of its steps."""

from __future__ import annotations

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.config import Config
from tailbound.transport.steps import STEP_MASK, Young
from tailbound.transport.switch import Switch


@pytest.mark.parametrize("first", [0, 7, STEP_MASK - 2])
def test_a_job_is_young_once(first: int) -> None:
    young = Young(first, 5)
    asked = [*range(9), *range(9, 2 * STEP_MASK, 99991), STEP_MASK + 1]
    assert [young.at((first + since) & STEP_MASK) for since in asked] == [True] * 5 + [False] * (len(asked) - 5)


def test_no_first_steps() -> None:
    assert not Young(0, 0).at(0)


def test_steps_of_16_bits_that_cannot_be_are_refused() -> None:
    """Rule: codec-12."""
    with pytest.raises(ConfigError, match="-1 steps of 16 bits"):
        Config(0, 2, fine_steps=-1)
    with pytest.raises(ConfigError, match="none where a switch sums"):
        Config(0, 2, fine_steps=4, switch=Switch("10.0.0.9", 1, 64, "mean"))
    assert Config(0, 2, fine_steps=4).common()["fine_steps"] == "4"
