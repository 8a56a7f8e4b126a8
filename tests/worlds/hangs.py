"""A run that hangs ends red within minutes, with the stacks of all threads.

``pytest-timeout`` fails a test by a signal. Python handles it in the main thread: never, while that thread is in C with
the GIL held. A thread of ``faulthandler`` needs no GIL. It writes all stacks and ends the process ``GRACE`` seconds
after ``pytest-timeout`` was to. With ``-n`` the test has failed, and another process takes the rest. Imports, compilers
and the end of the interpreter have a limit, too, and so has the whole run.
"""

from __future__ import annotations

import faulthandler
import os
import time
from typing import Any

import pytest

#: Seconds: beyond a test's own limit; for all that is not a test; for a run, and with ``--thorough``.
GRACE, BETWEEN, RUN, THOROUGH = 30.0, 300.0, 2700.0, 14400.0


class Watch:
    """Arms the thread anew whenever something else begins."""

    def __init__(self, config: pytest.Config) -> None:
        self._end = time.monotonic() + (THOROUGH if config.getoption("--thorough", False) else RUN)
        self._stderr = os.dup(2)  # later it is captured
        #: of several processes the one without tests of its own, which has no other limit
        self._leads = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
        self._arm(BETWEEN)

    def _arm(self, seconds: float) -> None:
        left = max(1.0, self._end - time.monotonic())
        faulthandler.dump_traceback_later(left if self._leads else min(seconds, left), exit=True, file=self._stderr)

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        """A test begins, and pytest-timeout is about to limit it."""
        self._arm(settings.timeout + GRACE)

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        """A phase has failed; both pytest and pytest-timeout have just let go, for a debugger."""
        self._arm(BETWEEN)

    def pytest_runtest_logfinish(self) -> None:
        """A test has ended."""
        self._arm(BETWEEN)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Only the end is left."""
        self._leads = False
        self._arm(BETWEEN)


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly and config.getoption("timeout", None) != 0:
        config.pluginmanager.register(Watch(config), "hang watch")
