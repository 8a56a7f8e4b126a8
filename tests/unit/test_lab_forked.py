"""A process that cannot be forked leaves nothing behind."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import pytest

from tailbound_lab.lab.forked import Forked


def test_a_fork_that_fails_leaves_no_descriptors_and_blocks_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> NoReturn:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fork)
    fds, blocked = os.listdir("/proc/self/fd"), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(BlockingIOError, match="no more processes"):
        Forked("/nowhere", "", lambda: 0, {})
    assert os.listdir("/proc/self/fd") == fds
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
