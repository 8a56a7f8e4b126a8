"""What the kernel tests share: every one of them runs for programs from BCC and from clang."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import cases
import switch_cases
from kept import Kept
from kernel_world import KernelWorld
from left_behind import nothing_left_behind as nothing_left_behind
from switch_world import SwitchWorld


@pytest.fixture(
    params=[
        pytest.param("bcc", marks=pytest.mark.needs("bpf", "bcc", "headers")),
        pytest.param("clang", marks=pytest.mark.needs("bpf", "clang", "libbpf")),
    ]
)
def loader(request: pytest.FixtureRequest) -> str:
    """Who compiles the program."""
    return str(request.param)


@pytest.fixture(scope="session")
def all_kept() -> Iterator[Kept]:
    """Worlds and switches of the whole session: one of each kind and size, as long as a test needs no second one."""
    held = Kept()
    yield held
    held.close()


@pytest.fixture
def kept(all_kept: Kept) -> Iterator[Kept]:
    """The same; what a test takes is given back after it."""
    yield all_kept
    all_kept.give_back()


@pytest.fixture
def make(loader: str, kept: Kept) -> Callable[..., KernelWorld]:
    """Makes worlds; nothing that other tests did with one is left in it."""

    def new(ranks: int = cases.RANKS, registered: Any = None, **sizes: Any) -> KernelWorld:
        world: KernelWorld = kept.take(KernelWorld, loader, **sizes)
        world.begin(ranks, registered)
        return world

    return new


@pytest.fixture
def make_switch(loader: str, kept: Kept) -> Callable[..., SwitchWorld]:
    """Makes switches; nothing that other tests did with one is left in it."""

    def new(jobs: Sequence[switch_cases.Job] = (switch_cases.JOB,), **sizes: Any) -> SwitchWorld:
        world: SwitchWorld = kept.take(SwitchWorld, loader, **sizes)
        world.begin(jobs)
        return world

    return new
