"""A failure counts unless the machine stood still meanwhile; shown by stopping what watches it."""

from __future__ import annotations

from pathlib import Path

import pytest

import stalls

pytest_plugins = ["pytester"]

CASE = """
import os, signal, time
from pathlib import Path
import stalls

def test_first_fails():
    again = Path("again")
    if again.exists():
        return
    again.touch()
    if {still}:
        os.kill(stalls._watch.pid, signal.SIGSTOP)
        time.sleep(2 * stalls.LEAST)  # so long it does not run
        os.kill(stalls._watch.pid, signal.SIGCONT)
        until = time.monotonic() + 20
        while not stalls._watch.gaps() and time.monotonic() < until:
            time.sleep(0.01)
    raise AssertionError("in time it was not")
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(stalls.__file__).parent))


@pytest.mark.parametrize("still", [True, False])
def test_a_failure_counts_unless_the_machine_stood_still(pytester: pytest.Pytester, still: bool) -> None:
    pytester.makepyfile(CASE.format(still=still))
    found = pytester.runpytest_subprocess("-raR", "-p", "stalls", f"--rootdir={pytester.path}")
    if still:
        found.assert_outcomes(passed=1)
        found.stdout.fnmatch_lines(["*1 passed, 1 rerun*"])
    else:
        found.assert_outcomes(failed=1)
        assert "1 rerun" not in found.stdout.str()


def test_a_failure_that_repeats_counts_and_says_that_the_machine_stood_still(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASE.format(still=True).replace("if again.exists():", "if False:"))
    found = pytester.runpytest_subprocess("-p", "stalls", f"--rootdir={pytester.path}")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*The machine stood still*", "core * did not run for * s"])
