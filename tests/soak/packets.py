"""Part two: hostile packets to the worker's program and the udp datapath side by side, and packets without the key.

What is found is told with the seed that finds it again.
"""

from __future__ import annotations

import functools
import random
import time
import traceback
from collections import Counter

from conftest import missing
from kernel_world import KernelWorld
from soak.part import Tell
from twins import Attack, Twins

#: Packets of one seed, of each sort.
COUNT = 4000
_NEEDS = {"bcc": ("bpf", "bcc", "headers"), "clang": ("bpf", "clang", "libbpf")}


@functools.cache
def loaders() -> list[str]:
    """Those that are there."""
    return [name for name, needs in _NEEDS.items() if not any(map(missing, needs))]


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return "" if loaders() else "no BPF program can be loaded: see `tailbound doctor`"


def tried(kernel: KernelWorld, seed: int) -> str:
    """One life and one attack; what goes wrong, or nothing."""
    rng = random.Random(seed)
    try:
        kernel.begin()
        Twins(kernel).live(rng, COUNT)
        kernel.begin()
        attack = Attack(kernel)
        attack.send(rng, COUNT)
        attack.end()
    except AssertionError:
        return f"seed {seed}:\n{traceback.format_exc()}"
    return ""


def work(number: int, seed: int, until: float, tell: Tell) -> None:
    """Seed after seed until ``until`` (monotonic); process ``number`` of several, whose seeds begin with ``seed``."""
    loader = loaders()[number % len(loaders())]
    kernel = KernelWorld(loader)
    try:
        while time.monotonic() < until:
            if found := tried(kernel, seed):
                tell("found", f"{loader}, {found}")
            tell("packets", 2 * COUNT)
            seed += 1
    finally:
        kernel.close()


def said(counts: Counter[str]) -> str:
    """How far it is."""
    return f"{counts['packets']:,} packets, a half of them without the key"
