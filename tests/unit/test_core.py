"""The C library: how it is found, built and refused; its sources compile without a warning."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tailbound.errors import CapabilityError
from tailbound.kernel import built, cache, core
from tailbound.kernel.compile import clang_path


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation without a library, and an empty cache."""
    monkeypatch.setattr(built, "FOLDER", tmp_path / "objects")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("cc", ["gcc", pytest.param(clang_path() or "", marks=pytest.mark.needs("clang"))])
def test_sources_compile_without_a_warning(cc: str, tmp_path: Path) -> None:
    command = core.command(cc, tmp_path / "core.so", core.folders(), ["-Werror"])
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_library_and_compiler_the_error_says_what_helps(
    nothing_kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "compiler", lambda: None)
    assert core.origin() is None
    with pytest.raises(CapabilityError, match="apt-get install gcc libc6-dev"):
        core.find()


def test_a_compiler_that_fails_is_named_with_its_words(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = nothing_kept / "cc"
    bad.write_text("#!/bin/sh\necho no such header >&2\nexit 3\n")
    bad.chmod(0o755)
    monkeypatch.setattr(core, "compiler", lambda: str(bad))
    with pytest.raises(CapabilityError, match=r"failed with 3(?s:.*)no such header"):
        core.find()


def test_a_wheel_has_it_and_only_of_these_sources(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built once as `make wheel` does, it needs no compiler; beside other sources it is not taken."""
    folder = nothing_kept / "objects"
    folder.mkdir()
    (folder / core.name()).write_bytes(core.compiled())
    monkeypatch.setattr(core, "compiler", lambda: None)
    path = core.find()
    assert path.parent == folder
    assert core.origin() == str(path)
    assert core.load(path).fast.tb_fence
    monkeypatch.setattr(core, "signature", lambda: "of other sources")
    with pytest.raises(CapabilityError, match="no C compiler"):
        core.find()
