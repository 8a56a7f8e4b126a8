"""The kernel's clock is that of stamps, so a process with another one is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailbound.errors import CapabilityError
from tailbound.kernel import clock

CODE = "import sys; sys.path[:0] = sys.argv[1:]\nfrom tailbound.kernel import clock\nclock.refuse_other()\n"


def test_an_offset_is_refused_by_name(tmp_path: Path) -> None:
    offsets = tmp_path / "offsets"
    offsets.write_text("monotonic           0         0\nboottime          100         0\n")
    clock.refuse_other(offsets)
    clock.refuse_other(tmp_path / "missing")  # a kernel without time namespaces
    offsets.write_text("monotonic        -100         5\nboottime            0         0\n")
    with pytest.raises(CapabilityError, match=r"time namespace, -100 s from the kernel's clock"):
        clock.refuse_other(offsets)


@pytest.mark.needs("root")
def test_in_a_time_namespace() -> None:
    """Where the kernel has them."""
    if not Path("/proc/self/ns/time").exists():
        pytest.skip("missing capability 'time namespaces'")
    argv = [sys.executable, "-c", CODE, *[p for p in sys.path if p]]
    for offset, status in ((0, 0), (1000, 1)):
        command = ["unshare", "--time", "--fork", "--monotonic", str(offset), *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stderr
        assert ("1000 s from the kernel's clock" in done.stderr) == bool(status)
