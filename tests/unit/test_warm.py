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


def test_whether_machine_code_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "doubles.py"
    path.write_text(SOURCE)

    def fresh():
        spec = importlib.util.spec_from_file_location("doubles", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double

    double = fresh()
    assert not kept(double)
    assert double(4) == 8
    assert kept(double)
    assert kept(fresh())
    path.write_text(SOURCE.replace("2 * x", "3 * x"))
    assert not kept(fresh())


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
