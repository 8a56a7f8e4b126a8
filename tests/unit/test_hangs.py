"""A test that holds the GIL in C for ever ends its run red, with the stacks of all threads (``worlds/hangs.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CONFTEST = """
import hangs
pytest_plugins = ["hangs"]
hangs.GRACE = 1.0
"""
_TEST = """
import ctypes, pytest

def hang():
    mutex = (ctypes.c_char * 64)()
    for _ in range(2):  # a lock that its own thread has
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

@pytest.mark.timeout(0.5)
def test_hangs():
    hang()

def test_after():
    pass
"""


def _run(folder: Path, *options: str) -> tuple[int, str, str]:
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_hanging.py").write_text(_TEST)
    options = ("-p", "no:cacheprovider", "-p", "no:rerunfailures", *options)
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    path = {"PYTHONPATH": str(Path(__file__).parents[1] / "worlds"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_process_that_holds_the_gil_for_ever_ends_with_its_stacks(tmp_path: Path) -> None:
    status, _, err = _run(tmp_path)
    assert status == 1
    assert "Timeout" in err
    assert "in hang" in err


def test_of_several_processes_the_one_that_hangs_ends_and_its_test_has_failed(tmp_path: Path) -> None:
    status, out, err = _run(tmp_path, "-n", "1")
    assert status == 1
    assert "in hang" in err
    assert "1 failed, 1 passed" in out
