"""Machine code: said before it is made, made ahead, and kept only as long as everything it was made from."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tailbound
from tailbound import cli, prepare
from tailbound.collective import warmup
from tailbound.errors import TransportError
from tailbound.wire.jit import _save, kept

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
    made = fresh(tmp_path)
    assert (kept(made), made(4), kept(made)) == (False, 8, True)
    assert not kept(fresh(tmp_path, SOURCE.replace("2 * x", "3 * x")))
    for user in ("first", "second"):
        monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / user))
        double = fresh(tmp_path)
        assert kept(double)
        assert double(4) == 8
        assert sum(double.stats.cache_hits.values()) == 1


def test_one_line_of_a_host_says_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kept_, rank in ((True, 0), (False, 1), (False, 0)):
        monkeypatch.setattr(warmup, "kept", lambda dispatcher, kept_=kept_: kept_)
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        warmup.announce_compilation(rank)
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 0: compiling")
    assert "doctor --warm" in record.getMessage()


def test_doctor_compiles_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--warm"]) == 0
    assert capsys.readouterr().out.startswith("compiling ")


PACKAGE = {
    "wire/__init__.py": "",
    "low/__init__.py": "",
    "low/number.py": "from numba import njit\n\n\n@njit(nogil=True)\ndef number():\n    return 1\n",
    "low/sum.py": (
        "from tailbound.wire.jit import compiled\nfrom low.number import number\n\n\n"
        "@compiled\ndef one_more(x):\n    return x + number()\n"
    ),
}


def test_a_change_in_another_file_of_the_package_is_noticed(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    code = "from low.sum import one_more; print(one_more(1), sum(one_more.stats.cache_hits.values()))"
    for number, said in ((1, "2 0"), (1, "2 1"), (20, "21 0")):
        (tmp_path / "low/number.py").write_text(PACKAGE["low/number.py"].replace("return 1", f"return {number}"))
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said


def test_no_compiled_function_has_an_argument_to_leave_out() -> None:
    """numba types most calls that leave arguments out in Python, at every call."""
    compiled, found = 0, []
    for path in sorted(Path(tailbound.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", ())))
            if isinstance(node, ast.FunctionDef) and re.search("njit|compiled", decorators):
                compiled += 1
                found += [f"{path.name}: {node.name}"] * bool(node.args.defaults)
    assert compiled > 20
    assert found == []


def test_code_that_no_disk_has_room_for_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        _save(Path("/dev/full").write_bytes, b"1")
    (record,) = caplog.records
    assert "No space left" in record.getMessage()


def test_warm_gives_the_reason_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["doctor", "--warm"]) == 1
    said = capsys.readouterr().err
    assert ("gcc" in said, "Traceback" in said) == (True, False)


@pytest.mark.needs("root")
def test_a_user_with_nothing_to_write_to_can_import() -> None:
    """numba would refuse: the package belongs to root, and there is no home."""
    package = Path(__file__).parents[2] / "host_lib"
    code = "import numpy as n, tailbound.wire.tag as t; print(t.hashed(*n.ones((2, 9), n.uint64), n.uint64(0)))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], user=65534, group=65534, extra_groups=[], cwd="/",
        env={"HOME": "/nonexistent", "PYTHONPATH": str(package), "TMPDIR": "/tmp"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_a_process_that_fails_is_an_error_and_so_is_a_thread_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_LONGEST", 0.1)
    monkeypatch.setattr("tailbound.collective.transpose.Transpose._run", lambda self: None)
    with pytest.raises(TimeoutError):
        prepare.compile_all()
    monkeypatch.setattr(prepare.sys, "executable", "/bin/false")
    with prepare.Preparation() as preparation, pytest.raises(TransportError, match="two ranks on loopback"):
        preparation.wait()
