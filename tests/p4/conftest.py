"""One switch for all tests here: compiling and starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import p4_world
from left_behind import nothing_left_behind as nothing_left_behind


@pytest.fixture(scope="session")
def world() -> Iterator[p4_world.World]:
    """A running switch with four ports; tests install their own jobs."""
    with p4_world.world() as made:
        yield made
