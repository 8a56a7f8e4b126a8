"""A test leaves nothing behind: no namespace of this process, no interface, few open files."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tailbound_lab.lab import namespaces, owner

#: Files that fixtures of the session may hold open: with 1,024, select(2) fails in tests that come later.
_FILES = 512


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Things that are there afterwards were there before, made by fixtures that live longer."""

    def there() -> tuple[list[str], list[str]]:
        return sorted(namespaces.names(f"{owner.PREFIX}{os.getpid()}-")), sorted(os.listdir("/sys/class/net"))

    before = there()
    yield
    assert there() == before
    assert len(os.listdir("/proc/self/fd")) < _FILES
