"""A test leaves nothing behind: no namespace of this process, no interface. For the folders that make some."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tailbound_lab.lab import namespaces, owner


def _there() -> tuple[list[str], list[str]]:
    return sorted(namespaces.names(f"{owner.PREFIX}{os.getpid()}-")), sorted(os.listdir("/sys/class/net"))


@contextlib.contextmanager
def nothing_more() -> Iterator[None]:
    """Things that are there afterwards were there before, made by fixtures that live longer."""
    before = _there()
    yield
    assert _there() == before


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Of every test. A fixture that makes something for a whole module checks itself."""
    with nothing_more():
        yield
