"""What compiling costs is said before it begins, and can be paid ahead."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from tailbound import cli
from tailbound.collective import warmup
from tailbound.wire.jit import kept

SOURCE = """
from numba import njit
from tailbound.wire.jit import cached

@cached
@njit(cache=True)
def double(x):
    return 2 * x
"""


def fresh(folder: Path, source: str = SOURCE):
    """The function as another process has it that imports it from ``folder``."""
    path = folder / "doubles.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("doubles", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double


def test_users_who_may_not_write_the_installation_compile_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took each of them most of a minute, though it was "done once for an installation"."""
    import numba.core.config

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert fresh(tmp_path)(4) == 8
    for user in ("first", "second"):
        monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / user))
        double = fresh(tmp_path)
        assert kept(double)
        assert double(4) == 8
        assert sum(double.stats.cache_hits.values()) == 1


def test_whether_machine_code_is_kept(tmp_path: Path) -> None:
    double = fresh(tmp_path)
    assert not kept(double)
    assert double(4) == 8
    assert kept(double)
    assert kept(fresh(tmp_path))
    assert not kept(fresh(tmp_path, SOURCE.replace("2 * x", "3 * x")))


def test_one_line_of_a_host_says_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tailbound"):
        monkeypatch.setattr(warmup, "kept", lambda dispatcher: True)
        warmup.announce_compilation(0)
        monkeypatch.setattr(warmup, "kept", lambda dispatcher: False)
        monkeypatch.setenv("LOCAL_RANK", "1")
        warmup.announce_compilation(3)
        assert not caplog.records
        monkeypatch.setenv("LOCAL_RANK", "0")
        warmup.announce_compilation(2)
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 2: compiling")
    assert "doctor --warm" in record.getMessage()


def test_doctor_compiles_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--warm"]) == 0
    assert capsys.readouterr().out.startswith("compiling ")
