"""Who compiles a program, and what a signal or a compiler that fails does to loading it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import compile as compiling
from tailbound.kernel import load, syscalls


def interrupted(times: int) -> Any:
    """bpf(2) whose verifier a signal interrupts so often, then a descriptor."""
    calls = iter(range(times + 1))

    def bpf(*_: Any) -> tuple[int, bytes]:
        if next(calls) < times:
            raise OSError(errno.EAGAIN, "interrupted")
        return 77, b""

    return bpf


def test_signals_during_verification_are_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_bpf", interrupted(9))
    assert syscalls.prog_load(bytes(16), name="x") == 77


def test_signals_without_end_are_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_bpf", interrupted(1 << 60))
    monkeypatch.setattr(syscalls, "_PATIENCE_S", 0.0)
    with pytest.raises(syscalls.VerifierError) as caught:
        syscalls.prog_load(bytes(16), name="x")
    assert caught.value.errno == errno.EAGAIN


@pytest.mark.parametrize(
    ("bcc", "headers", "clang", "libbpf", "found"),
    [
        (True, True, True, True, ["bcc", "clang"]),
        (True, False, True, True, ["clang"]),  # BCC without headers does not stand in front of a clang that works
        (True, True, True, False, ["bcc"]),
        (False, False, True, True, ["clang"]),
        (True, False, True, False, "headers"),
        (True, False, False, False, "headers"),
        (False, True, True, False, "libbpf-dev"),
        (False, False, False, False, "neither"),
    ],
)
def test_candidates(
    bcc: bool, headers: bool, clang: bool, libbpf: bool, found: list[str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr(compiling, "bcc_path", lambda: Path("/bcc") if bcc else None)
    monkeypatch.setattr(compiling.headers, "running", lambda: None)
    monkeypatch.setattr(compiling.headers, "installed", lambda: Path("/headers") if headers else None)
    monkeypatch.setattr(compiling, "clang_path", lambda: "/clang" if clang else None)
    monkeypatch.setattr(compiling, "LIBBPF", Path("/" if libbpf else "/nowhere"))
    if isinstance(found, list):
        assert compiling.candidates() == found
        return
    with pytest.raises(CapabilityError, match=found):
        compiling.candidates()


def given(monkeypatch: pytest.MonkeyPatch, error: CapabilityError) -> list[str]:
    """Both compilers are there, and BCC fails; returns who has been tried."""
    tried: list[str] = []

    def compiled(*arguments: Any) -> bytes:
        tried.append(arguments[4])
        if arguments[4] == "bcc":
            raise error
        return b""

    monkeypatch.setattr(load.built, "find", lambda *_: None)
    monkeypatch.setattr(load, "candidates", lambda: ["bcc", "clang"])
    monkeypatch.setattr(load, "compile_program", compiled)
    monkeypatch.setattr(load, "_into_kernel", lambda *_: 5)
    return tried


def test_a_compiler_that_fails_is_followed_by_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = given(monkeypatch, CapabilityError("bcc failed with 1\nand so on"))
    with caplog.at_level(logging.WARNING, "tailbound"):
        assert load.load("worker.bpf.c", load.WORKER, {}, (), {}, "auto") == 5
    assert tried == ["bcc", "clang"]
    assert "by bcc cannot be had, trying clang: bcc failed with 1" in caplog.text
    assert "and so on" not in caplog.text


def test_no_compiler_makes_up_for_missing_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = given(monkeypatch, load._Powerless("no"))
    with pytest.raises(CapabilityError, match="no"):
        load.load("worker.bpf.c", load.WORKER, {}, (), {}, "auto")
    assert tried == ["bcc"]


@pytest.mark.parametrize(
    ("built", "compilers", "tried"),
    [
        (True, ["clang"], ["object", "clang"]),  # an object that the kernel refuses is followed by who is there
        (True, [], ["object"]),
        (False, ["bcc", "clang"], ["bcc", "clang"]),
    ],
)
def test_objects_come_before_compilers(
    built: bool, compilers: list[str], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def candidates() -> list[str]:
        if not compilers:
            raise CapabilityError("neither BCC nor clang")
        return compilers

    monkeypatch.setattr(load.built, "find", lambda *_: b"" if built else None)
    monkeypatch.setattr(load, "candidates", candidates)
    assert load._sources("worker.bpf.c", {}, (), "auto", "xdp") == tried


def test_a_node_with_neither_is_told_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load.built, "FOLDER", tmp_path)
    with pytest.raises(CapabilityError, match="did not come with this installation as an object: install a wheel"):
        load.load("worker.bpf.c", load.WORKER, {"TB_WIDTH": 1408}, (), {}, "object")
    with pytest.raises(ConfigError, match="choose auto, object, bcc or clang"):
        load.load("worker.bpf.c", load.WORKER, {"TB_WIDTH": 1408}, (), {}, "gcc")


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"clang": 14}, "clang"),
        ({"clang": 14, "clang-16": 16, "clang-19": 19}, "clang-19"),
        ({"clang": 22, "clang-15": 15}, "clang-15"),  # one that is tried, before a newer one
        ({"clang": 22, "clang-20": 20}, "clang-20"),
        ({"clang": 13, "clang-13": 13}, None),  # the verifier refuses what it makes
        ({"clang": 0}, None),
        ({}, None),
    ],
)
def test_which_clang(there: dict[str, int], chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(compiling, "_major", there.__getitem__)
    assert compiling.clang_path.__wrapped__() == chosen
