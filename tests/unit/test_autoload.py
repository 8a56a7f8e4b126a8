"""What ``import torch`` calls must never raise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailbound.autoload import register_backend

pytestmark = pytest.mark.needs("torch")


def test_it_registers_once() -> None:
    import torch.distributed as dist

    register_backend()
    register_backend()
    assert dist.Backend.backend_list.count("tailbound") == 1
    assert dist.Backend("tailbound") == "tailbound"


def test_a_torch_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def refuse(*_: object, **__: object) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    register_backend()


#: Nothing is writable, as for a service account with a read-only installation; the temporary folder is.
BARE = """
import os, sys, tempfile
os.access = lambda *_, **__: False
import torch
import tailbound.autoload
assert "NUMBA_CACHE_DIR" not in os.environ
ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("tailbound", "numba"))
assert ours == ["tailbound", "tailbound.autoload"], ours
assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tailbound")]
"""
#: Whoever compiles finds a place all the same.
COMPILING = """
import tailbound.wire.jit
import numba.core.config
assert numba.core.config.CACHE_DIR == os.path.join(tempfile.gettempdir(), f"tailbound-numba-{os.geteuid()}")
"""


def test_importing_torch_does_nothing_but_register(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")} | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", BARE + COMPILING], env=env, check=True)
