"""Which all-reduce of a pass ends its step."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("torch")


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
    from tailbound.torch.backend import Passes

    follower = Passes()
    found, left = [], ""
    for modules in passes.split():
        found.append("".join(str(int(follower.call(module))) for module in modules.strip("!-")) or "-")
        left += str(int(follower.over(whole=not modules.endswith("!"))))
    assert (found, left) == (ends.split(), unended)
