"""Tailbound: an all-reduce for data-parallel training that finishes in bounded time.

Gradients travel as datagrams, are summed inside the kernel by XDP programs on the workers' own interfaces, and a step
never waits for the last packet or the slowest peer longer than a deadline. Start at ``tailbound.torch.register``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__version__ = "0.1.0"


def _find_room_for_machine_code() -> None:
    """numba refuses to import what it cannot cache: with neither this package nor the home writable, use /tmp."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent") / ".cache")
    home = next(p for p in (base, *base.parents) if p.exists())
    if os.environ.get("NUMBA_CACHE_DIR") or any(os.access(p, os.W_OK) for p in (Path(__file__).parent, home)):
        return
    folder = Path(tempfile.gettempdir()) / f"tailbound-numba-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # machine code is loaded from there: a folder of somebody else is not taken
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or folder.is_symlink():
        folder = Path(tempfile.mkdtemp(prefix="tailbound-numba-"))
    os.environ["NUMBA_CACHE_DIR"] = str(folder)


with contextlib.suppress(OSError):  # ``import torch`` runs this (tailbound.autoload); numba says itself what it lacks
    _find_room_for_machine_code()
