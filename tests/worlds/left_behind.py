"""A test leaves nothing behind: no namespace of this process, no interface. For the folders that make some."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tailbound.lab import namespaces, owner


def _there() -> tuple[list[str], list[str]]:
    return sorted(namespaces.names(f"{owner.PREFIX}{os.getpid()}-")), sorted(os.listdir("/sys/class/net"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What is there afterwards was there before, made by fixtures that outlive the test."""
    before = _there()
    yield
    assert _there() == before
