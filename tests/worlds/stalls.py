"""A test that failed while the machine stood still runs once more; whoever fails without that, fails.

A virtual machine loses a core now and then, for seconds. Whatever compares within deadlines fails then through no fault
of the code, and no deadline is long enough for all of them. So a process beside the tests has one real-time thread per
core that wakes up every 20 ms. Threads of ordinary tests cannot hold it up: if it comes late by more than
``LEAST`` seconds, the machine did not run it. The report of the failure has late threads and times.

The repetition is that of ``pytest-rerunfailures``, and ``-raR`` lists it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

#: Seconds without a core from which a failure says nothing.
LEAST = 0.25
_EVERY = 0.02


class Watch:
    """The process that wakes up on every core; true where the machine stood still since the present test began."""

    def __init__(self) -> None:
        # closing its input ends it, and so does the end of this process, however that comes about
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdout is not None
        self._said = self._process.stdout
        self._said.readline()  # all threads have begun
        os.set_blocking(self._said.fileno(), False)
        self._since, self._rest, self._found = 0.0, b"", list[str]()

    def __bool__(self) -> bool:
        *lines, self._rest = (self._rest + (self._said.read() or b"")).split(b"\n")
        for line in lines:
            core, seconds, ended = line.split()
            if float(ended) > self._since:
                self._found.append(f"core {int(core)} did not run for {float(seconds):.2f} s")
        return bool(self._found)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=1, condition=self))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        bool(self)  # what was said until now is of the test before
        self._since, self._found = time.monotonic(), []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        if report.failed and self:
            report.sections.append(("The machine stood still", "\n".join(self._found)))
        return report

    def pytest_sessionfinish(self) -> None:
        self._process.communicate()


def pytest_sessionstart(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        session.config.pluginmanager.register(Watch(), "stall watch")


def _wake(core: int, begun: threading.Barrier) -> None:
    """Writes a line ``core seconds end`` for every time that this thread is not given ``core``."""
    os.sched_setaffinity(0, {core})
    with contextlib.suppress(PermissionError):  # who may not: then other processes can hold this thread up as well
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    before = time.monotonic()
    begun.wait()
    while True:
        time.sleep(_EVERY)
        now = time.monotonic()
        if now - before > LEAST + _EVERY:
            with contextlib.suppress(BlockingIOError):  # nobody has read for long
                os.write(1, f"{core} {now - before} {now}\n".encode())
        before = now


def _main() -> None:
    os.set_blocking(1, False)
    cores = os.sched_getaffinity(0)
    begun = threading.Barrier(len(cores) + 1)
    for core in cores:
        threading.Thread(target=_wake, args=(core, begun), daemon=True).start()
    begun.wait()
    os.write(1, b"begun\n")
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    _main()
