"""Part two: hostile packets to the worker's program and the udp datapath side by side, and packets without the key."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

from conftest import missing
from kernel_world import KernelWorld
from soak.part import Tell
from twins import Attack, Twins

#: Packets of one seed, of each sort.
COUNT = 4000
_NEEDS = {"bcc": ("bpf", "bcc", "headers"), "clang": ("bpf", "clang", "libbpf")}


def loaders() -> list[str]:
    """Those that are there."""
    return [name for name, needs in _NEEDS.items() if not any(map(missing, needs))]


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return "" if loaders() else "no BPF program can be loaded: see `tailbound doctor`"


@contextlib.contextmanager
def trials(number: int, tell: Tell, until: float) -> Iterator[Callable[[int], str]]:
    """One life and one attack a seed, in a program of one of the loaders."""
    kernel = KernelWorld(loaders()[number % len(loaders())])

    def trial(seed: int) -> str:
        rng = random.Random(seed)
        kernel.begin()
        Twins(kernel).live(rng, COUNT)
        kernel.begin()
        attack = Attack(kernel)
        attack.send(rng, COUNT)
        attack.end()
        tell("packets", 2 * COUNT)
        return ""

    try:
        yield trial
    finally:
        kernel.close()
