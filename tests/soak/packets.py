"""Part two: hostile packets to the worker's program and the switch's, life after life, from both loaders' programs."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import missing
from soak import corpus, switch, worker
from soak.life import Step, Twins, live, relive
from soak.part import Tell
from tailbound.wire.schema import Verdict

#: Lives of the worker's program for each of the switch's, whose twin is slower.
WORKERS = 4
_NEEDS = {"bcc": ("bpf", "bcc", "headers"), "clang": ("bpf", "clang", "libbpf")}
_MAKERS: dict[str, Callable[[str], Any]] = {"worker": worker.Twins, "switch": switch.Twins}


@functools.cache
def loaders() -> list[str]:
    """Those that are there."""
    return [name for name, needs in _NEEDS.items() if not any(map(missing, needs))]


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return "" if loaders() else "no BPF program can be loaded: see `tailbound doctor`"


def shorter(twins: Twins, steps: list[Step], words: str) -> list[Step]:
    """The least of the steps with which the same still goes wrong."""
    kind = words.partition(":")[0]
    return corpus.shortest(steps, lambda fewer: relive(twins, fewer).partition(":")[0] == kind)


def packets_of(program: str, *folders: Path) -> list[bytes]:
    """Every packet that once took part in something that went wrong."""
    lives = corpus.kept(program, *folders)
    return [bytes.fromhex(step[2]) for _, steps in lives for step in steps if step[0] == "packet"]


class Hunt:
    """The programs of one loader, and lives of theirs one after the other.

    Args:
        folder: where what is found is written.
    """

    def __init__(self, loader: str, tell: Tell, folder: Path = corpus.KEPT) -> None:
        self._loader, self._tell, self._folder = loader, tell, folder
        self._cpus = os.sched_getaffinity(0)
        self.cpu = min(self._cpus)  #: on which programs run (``fed.Runner``)
        self.twins: dict[str, Twins] = {name: make(loader) for name, make in _MAKERS.items()}

    def close(self) -> None:
        for twins in self.twins.values():
            twins.close()
        os.sched_setaffinity(0, self._cpus)

    def again(self) -> None:
        """What once went wrong."""
        for name, twins in self.twins.items():
            for path, steps in corpus.kept(name, self._folder):
                self._tell("kept", 1)
                if words := relive(twins, steps):
                    self._tell("found", f"{path.name} with {self._loader}: {words}")

    def one(self, name: str, seed: int, over: Callable[[], bool]) -> None:
        """The life of ``seed`` of a program; what goes wrong is made short, told and kept."""
        twins = self.twins[name]
        before = twins.counts.copy()
        lived = live(twins, seed, packets_of(name, self._folder), over)
        self._tell("packets", lived.packets)
        self._tell(name, lived.packets)
        self._tell("verdicts", {Verdict(i).name: int(n) for i, n in enumerate(twins.counts - before) if n})
        if not lived.words:
            return
        where = f"{name}, {self._loader}, seed {seed}: {lived.words}"
        if relive(twins, lived.steps):
            steps = shorter(twins, list(lived.steps), lived.words)
            where = f"{where}\nin {len(steps)} steps: {corpus.keep(self._folder, name, lived.words, steps)}"
        self._tell("found", where)


def work(number: int, seed: int, until: float, tell: Tell) -> None:
    """Hunts until ``until`` (monotonic); process ``number`` of several, whose seeds begin with ``seed``."""
    hunt = Hunt(loaders()[number % len(loaders())], tell)

    def over() -> bool:
        return time.monotonic() >= until

    try:
        hunt.again()
        while not over():
            hunt.one("switch" if seed % (WORKERS + 1) == 0 else "worker", seed, over)
            seed += 1
    finally:
        hunt.close()


def said(counts: Counter[str]) -> str:
    """How far it is."""
    return f"{counts['packets']:,} packets ({counts['worker']:,} worker, {counts['switch']:,} switch)"


def closing(counts: Counter[str]) -> list[str]:
    """What there is to say in the end: packets by verdict."""
    names = [v.name for v in Verdict if counts[v.name]]
    return ["  ".join(f"{name} {counts[name]:,}" for name in names)]
