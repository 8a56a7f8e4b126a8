"""A test leaves nothing behind: no namespace of this process, no interface. For the folders that make some."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tailbound_lab.lab import namespaces, owner


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Things that are there afterwards were there before, made by fixtures that live longer."""

    def there() -> tuple[list[str], list[str]]:
        return sorted(namespaces.names(f"{owner.PREFIX}{os.getpid()}-")), sorted(os.listdir("/sys/class/net"))

    before = there()
    yield
    assert there() == before
