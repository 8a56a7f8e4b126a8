"""Runs the tests of a module over each of its mutants: ``python -m mutation.run [MODULE...]`` in ``tests``.

Every mutant gets a process of its own, forked before anything of the package is imported, in which the module is loaded
with the mistake in it. A mutant that no test notices survives. ``survivors.txt`` lists those that are known, with the
reason: most change nothing that can be seen. Any other survivor makes the run fail, and so does a line of the file that
survives no more.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import hypothesis  # noqa: F401 - loaded once for all
import numba  # noqa: F401
import numpy  # noqa: F401
import pytest

from mutation.mutants import Mutant, mutants

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "host_lib/tailbound"
SURVIVORS = Path(__file__).with_name("survivors.txt")
#: Pure modules of the engine, and the tests that hold them, fast ones first.
MODULES: dict[str, tuple[str, ...]] = {
    "collective.repair": ("unit/test_repair.py",),
    "collective.step": ("unit/test_step.py",),
    "transport.backoff": ("unit/test_backoff.py", "unit/test_repair.py", "unit/test_flush.py"),
    "transport.clock": ("unit/test_clock.py", "unit/test_stage.py"),
    "transport.flush": ("unit/test_flush.py",),
    "transport.incast": ("unit/test_incast.py",),
    "transport.membership": ("unit/test_membership.py",),
    "transport.overtime": ("unit/test_overtime.py", "unit/test_stage.py"),
    "transport.sequence": ("unit/test_sequence.py",),
    "transport.shares": ("unit/test_shares.py",),
    "transport.stage": ("unit/test_stage.py",),
    "transport.steps": ("unit/test_steps.py",),
    "transport.suspicion": ("unit/test_suspicion.py",),
    "transport.tail_probe": ("unit/test_tail_probe.py",),
}
#: What is loaded before pytest is not rewritten by it, which is as it should be here.
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
#: A mutant whose tests take longer than this is noticed: it waits for ever, as a rule.
LIMIT = 60


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module with a mistake in it."""

    def __init__(self, name: str, code: CodeType) -> None:
        self._name, self._code = name, code

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._code.co_filename
        exec(self._code, module.__dict__)


def begin(module: str, mutant: Mutant | None) -> int:
    """Starts the tests of ``module`` with ``mutant`` in it (None: as it is); returns the process."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        signal.alarm(LIMIT)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        if mutant is not None:
            file = str(PACKAGE / f"{module.replace('.', '/')}.py")
            sys.meta_path.insert(0, _Finder(f"tailbound.{module}", compile(mutant.tree, file, "exec")))
            importlib.import_module(f"tailbound.{module}")  # before pytest takes imports over
        files = [str(TESTS / file) for file in MODULES[module]]
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *_QUIET, *files]))
    finally:
        os._exit(status)


def survive(module: str, every: Iterator[Mutant]) -> Iterator[Mutant]:
    """Those of ``every`` that no test notices; as many processes as there are cores."""
    running: dict[int, Mutant] = {}

    def wait() -> Iterator[Mutant]:
        child, status = os.wait()
        mutant = running.pop(child)
        if status == 0:
            yield mutant

    for mutant in every:
        running[begin(module, mutant)] = mutant
        if len(running) >= len(os.sched_getaffinity(0)):
            yield from wait()
    while running:
        yield from wait()


def known() -> dict[str, str]:
    """Reasons by survivor, from ``survivors.txt``: ``module place: change  # reason`` a line."""
    lines = SURVIVORS.read_text().splitlines() if SURVIVORS.exists() else []
    found = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.partition("  # ")
            found[name] = reason
    return found


def main(names: list[str]) -> int:
    """Runs over ``names`` (none: all); returns the exit status."""
    accepted, failed = known(), 0
    for module in names or MODULES:
        began = time.monotonic()
        if os.waitstatus_to_exitcode(os.waitpid(begin(module, None), 0)[1]) != 0:
            print(f"{module}: its tests fail as it is", flush=True)
            return 2
        every = list(mutants((PACKAGE / f"{module.replace('.', '/')}.py").read_text()))
        left = {f"{module} {mutant.name}": mutant for mutant in survive(module, iter(every))}
        new = sorted(left.keys() - accepted.keys(), key=lambda name: left[name].line)
        gone = sorted(name for name in accepted.keys() - left.keys() if name.startswith(f"{module} "))
        failed += len(new) + len(gone)
        took = time.monotonic() - began
        print(f"{module}: {len(every)} mutants, {len(left)} survive, {len(new)} of them new ({took:.0f} s)", flush=True)
        for name in new:
            print(f"  survives, line {left[name].line}: {name}", flush=True)
        for name in gone:
            print(f"  does not survive any more: {name}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
