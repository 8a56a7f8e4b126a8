"""Runs the tests of a module over each of its mutants: ``python -m mutation.run [MODULE...]`` in ``tests``.

Tests are loaded once a module, and must pass. Every mutant then gets a process of its own, forked from there, in which
the module's functions are given the mistake, and which runs the tests until one fails. A mutant that no test notices
survives. ``survivors.txt`` lists those that are known, with the reason: they change nothing that can be seen. Any other
survivor makes the run fail, and so does a line of the file that survives no more.

Mistakes are made in Python: what ``host_lib/core`` decides, such as when halves end, is not reached.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import sys
import time
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from mutation.graft import graft
from mutation.mutants import Mutant, mutants

TESTS = Path(__file__).resolve().parents[1]
SURVIVORS = Path(__file__).with_name("survivors.txt")
#: Pure modules of the engine that decide something, and the tests that hold them, fast ones first; all have ``_ALL``.
_ALL = "unit/test_small_mistakes.py"
MODULES: dict[str, tuple[str, ...]] = {
    "collective.step": ("unit/test_step.py",),
    "transport.agreement": ("unit/test_shares.py",),
    "transport.backoff": ("unit/test_agreement.py",),
    "transport.membership": ("unit/test_membership.py", "unit/test_comeback.py"),
    "collective.terms": ("unit/test_halves.py",),
    "transport.sequence": ("unit/test_sequence.py",),
    "transport.steps": ("unit/test_sequence.py",),
}
#: Where it is not all of a module: the names that count.
PARTS = {"collective.terms": ("Overtime",), "transport.agreement": ("Lateness", "Shares", "late_limit")}
#: A mutant whose tests take so many times as long as without it, and so many seconds more, waits for ever.
TIMES, MORE = 2, 3
#: What is loaded before pytest is not rewritten by it, which is as it should be here.
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
#: What a process ends with whose mistake cannot be made.
_NOT_MADE = 99


class Trial:
    """A plugin of pytest that runs its tests over the mutants of one module, instead of once.

    Attributes:
        every: the mutants.
        left: those that survive; None: not found out, since the tests fail as it is.
    """

    def __init__(self, module: str) -> None:
        self._module = importlib.import_module(f"tailbound.{module}")
        self._file = str(self._module.__file__)
        found = mutants(Path(self._file).read_text())
        self.every = [each for each in found if each.name.startswith(PARTS.get(module, ("",)))]
        self.left: list[Mutant] | None = None
        self._made = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """An example that fails will do: a search for the smallest one would take most of the time."""
        usual = hypothesis.settings.get_profile("tailbound")
        hypothesis.settings.register_profile(
            "mutation",
            usual,
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            suppress_health_check=(hypothesis.HealthCheck.too_slow,),
            report_multiple_bugs=False,
        )
        hypothesis.settings.load_profile("mutation")

    def pytest_runtestloop(self) -> bool | None:
        """In processes that fork off here the usual loop runs; ``run`` ends them."""
        child = _fork()
        if not child:
            return None
        _, status, used = os.wait4(child, 0)
        if status != 0:
            return True
        limit = int(TIMES * used.ru_utime + MORE)
        self.left = []
        running: dict[int, Mutant] = {}
        for mutant in self.every:
            if len(running) >= len(os.sched_getaffinity(0)):
                self._wait(running)
            child = _fork()
            if not child:
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
                self._make(mutant)
                return None
            running[child] = mutant
        while running:
            self._wait(running)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """The first failure ends the process of a mutant: nobody reads the report of it."""
        if self._made and call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            os._exit(1)

    def _wait(self, running: dict[int, Mutant]) -> None:
        child, status = os.wait()
        mutant = running.pop(child)
        if os.waitstatus_to_exitcode(status) == _NOT_MADE:
            raise AssertionError(f"this mistake cannot be made: {mutant.name}")
        if status == 0 and self.left is not None:
            self.left.append(mutant)

    def _make(self, mutant: Mutant) -> None:
        new = ModuleType(self._module.__name__)
        with contextlib.ExitStack() as stack:
            stack.callback(os._exit, _NOT_MADE)
            exec(mutant.make(self._file), new.__dict__)
            if graft(self._module, new):
                stack.pop_all()
                self._made = True


def _fork() -> int:
    child = os.fork()
    if not child:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    return child


def run(module: str) -> Trial:
    """Tries all mutants of ``module``."""
    trial, own = Trial(module), os.getpid()
    files = [str(TESTS / file) for file in (*MODULES[module], _ALL)]
    # the timers that limit tests usually do not outlast what catches what they raise; a forked process would wait for
    # ever for the end of the one that watches the machine, which its parent holds
    options = ["-x", "--timeout=0", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:stalls", *_QUIET]
    status, said = 1, io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            status = int(pytest.main([*options, *files], [trial]))
    finally:
        if os.getpid() != own:
            os._exit(status)
    if status != 0:
        raise RuntimeError(said.getvalue())
    return trial


def main(names: list[str]) -> int:
    """Runs over ``names`` (none: all); returns the exit status."""
    # ``module place: change  # reason`` a line
    lines = [line for line in SURVIVORS.read_text().splitlines() if line and not line.startswith("#")]
    accepted, failed = {line.partition("  # ")[0] for line in lines}, 0
    for module in names or MODULES:
        began = time.monotonic()
        trial = run(module)
        if trial.left is None:
            print(f"{module}: its tests fail as it is", flush=True)
            return 2
        left = {f"{module} {mutant.name}": mutant for mutant in trial.left}
        new = sorted(left.keys() - accepted, key=lambda name: left[name].old.lineno)
        gone = sorted(name for name in accepted - left.keys() if name.startswith(f"{module} "))
        failed += len(new) + len(gone)
        took, count = time.monotonic() - began, len(trial.every)
        print(f"{module}: {count} mutants, {len(left)} survive, {len(new)} of them new ({took:.0f} s)", flush=True)
        for name in new:
            print(f"  survives, line {left[name].old.lineno}: {name}", flush=True)
        for name in gone:
            print(f"  does not survive any more: {name}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
