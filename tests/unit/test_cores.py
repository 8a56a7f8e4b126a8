"""How long a thread has waited for a core, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailbound.transport import cores
from tailbound.transport.cores import RunQueue


def test_threads_that_share_a_core_wait_for_it() -> None:
    """Two processes want all of one core."""
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    queue = RunQueue()
    if queue.waited() is None:
        pytest.skip("this kernel does not count")
    other = None
    try:
        os.sched_setaffinity(0, {core})
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        first = last = queue.waited() or 0
        end = time.thread_time() + 60  # of its own, and so half of what passes
        while last < first + 20_000_000 and time.thread_time() < end:
            last = queue.waited() or 0
        assert last >= first + 20_000_000
    finally:
        os.sched_setaffinity(0, before)
        if other is not None:
            other.kill()
            other.wait()
        queue.close()
    assert queue.waited() is None
    queue.close()


@pytest.mark.parametrize(
    ("text", "waited"), [("1000 250 3\n", 250), ("0 0 0\n", None), ("", None), ("1 2\n", None), ("a b c\n", None)]
)
def test_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, waited: int | None) -> None:
    """Zeros: it does not count."""
    path = tmp_path / "schedstat"
    path.write_text(text)
    monkeypatch.setattr(cores, "_FILE", str(path))
    queue = RunQueue()
    assert queue.waited() == waited
    path.write_text("1000 300 4\n")
    assert queue.waited() == 300
    queue.close()


def test_a_kernel_without_the_file_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "_FILE", str(tmp_path / "none"))
    queue = RunQueue()
    assert queue.waited() is None
    queue.close()
