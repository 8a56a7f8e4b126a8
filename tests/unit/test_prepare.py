"""Compiling ahead: once for the same sources, versions and processor, and no process where that has been done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tailbound import prepare
from tailbound.errors import TransportError


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what says that all has been compiled."""
    monkeypatch.setattr(prepare, "_KEPT", tmp_path)
    return tmp_path


def test_nothing_is_started_where_all_has_been_compiled(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.sys, "executable", "/bin/false")
    with prepare.Preparation() as preparation, pytest.raises(TransportError, match="two ranks on loopback"):
        preparation.wait()
    prepare._keep_stamp(prepare.stamp())
    with prepare.Preparation() as preparation:
        preparation.wait()


def test_whatever_makes_numba_compile_again_makes_another_stamp(
    kept: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path_factory.mktemp("package")
    source = package / "codec.py"
    source.write_text("1")
    stamps = [prepare.stamp(package)]
    assert prepare.stamp(package) == stamps[0]
    os.utime(source, ns=(1, 1))
    stamps.append(prepare.stamp(package))
    (package / "more.py").write_text("2")
    stamps.append(prepare.stamp(package))
    monkeypatch.setenv("NUMBA_OPT", "1")
    stamps.append(prepare.stamp(package))
    monkeypatch.setattr(prepare, "_processor", lambda: "another one")
    stamps.append(prepare.stamp(package))
    assert len(set(stamps)) == len(stamps)
    for one in stamps:
        prepare._keep_stamp(one)
    assert list(kept.iterdir()) == [stamps[-1]]


def test_a_folder_that_cannot_be_written_is_no_error(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_KEPT", kept / "nowhere")
    prepare._keep_stamp(prepare.stamp())
    assert not prepare.stamp().exists()
