"""What the kernel tests share: programs and switches that tests take in turn, and a wire between two namespaces."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import cases
import switch_cases
import veths
from kept import Kept
from kernel_world import KernelWorld
from left_behind import nothing_left_behind as nothing_left_behind
from loaders import loader as loader
from switch_world import SwitchWorld
from tailbound.errors import ConfigError
from tailbound.kernel import compile as compile_
from tailbound.kernel import load, pin
from tailbound.kernel.cache import assets
from tailbound.kernel.compile import candidates


@pytest.fixture(autouse=True)
def _clang_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test leaves the compiler open, clang is asked before BCC, which needs twice as long and makes an object
    for each port and size of a ring."""
    monkeypatch.setattr(load, "candidates", lambda: sorted(candidates(), reverse=True))


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


@pytest.fixture(scope="session")
def wires() -> Iterator[list[str]]:
    """Two namespaces and a veth ``tbx`` in each, ranks 0 and 1."""
    with veths.pair("tbx", (cases.ip_of(0), cases.ip_of(1))) as names:
        yield names


@pytest.fixture
def wire(wires: list[str]) -> Iterator[list[str]]:
    """The names of the two; the test begins in the first. What it pins is taken away."""
    with veths.visit(wires[0]):
        yield wires
        veths.go(wires[0])
        pin.remove("tbx")


@pytest.fixture
def own_wire() -> Iterator[list[str]]:
    """The same for one test alone, which may remove interfaces, and finds no neighbour known."""
    with veths.pair("tbx", (cases.ip_of(0), cases.ip_of(1))) as names, veths.visit(names[0]):
        yield names
        veths.go(names[0])
        with contextlib.suppress(ConfigError):  # the test has taken the interface away
            pin.remove("tbx")


@pytest.fixture
def take_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[str, str, str]]], None]:
    """Has programs made of changed sources from now on: (file, what is in it once, what takes its place)."""

    def change(changes: list[tuple[str, str, str]]) -> None:
        for part in ("ebpf", "xdp_programs"):
            shutil.copytree(assets(part), tmp_path / part)
        for name, old, new in changes:
            text = (tmp_path / name).read_text()
            assert text.count(old) == 1, f"{name} has changed: say here what takes the mend back now: {old!r}"
            (tmp_path / name).write_text(text.replace(old, new))
        monkeypatch.setattr(compile_, "assets", lambda part: tmp_path / part)

    return change
