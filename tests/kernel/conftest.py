"""What the kernel tests share: every one of them runs for programs from BCC and from clang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kernel_world import KernelWorld
from left_behind import nothing_left_behind as nothing_left_behind

Make = Callable[..., KernelWorld]


@pytest.fixture(
    params=[
        pytest.param("bcc", marks=pytest.mark.needs("bpf", "bcc", "headers")),
        pytest.param("clang", marks=pytest.mark.needs("bpf", "clang", "libbpf")),
    ]
)
def loader(request: pytest.FixtureRequest) -> str:
    """Who compiles the program."""
    return str(request.param)


@pytest.fixture
def make(loader: str) -> Iterator[Make]:
    """Makes worlds, and closes them after the test."""
    worlds: list[KernelWorld] = []

    def new(**arguments: Any) -> KernelWorld:
        worlds.append(KernelWorld(loader, **arguments))
        return worlds[-1]

    yield new
    for world in worlds:
        world.close()
