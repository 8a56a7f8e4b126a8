"""Rules that take several packets to see, in the udp datapath: the same cases as the kernel's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rule_cases
from udp_world import World


@pytest.mark.parametrize("check", rule_cases.CHECKS)
def test_rules(check: Callable[[Any], None]) -> None:
    check(World())
