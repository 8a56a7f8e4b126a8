"""Machine code is kept only as long as everything it was made from."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tailbound

PACKAGE = {
    "wire/__init__.py": "",
    "low/__init__.py": "",
    "low/number.py": "from numba import njit\n\n\n@njit(nogil=True)\ndef number():\n    return 1\n",
    "low/sum.py": (
        "from tailbound.wire.jit import compiled\nfrom low.number import number\n\n\n"
        "@compiled\ndef one_more(x):\n    return x + number()\n"
    ),
}


def run(folder: Path) -> str:
    code = "from low.sum import one_more; print(one_more(1), sum(one_more.stats.cache_hits.values()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_change_in_another_file_of_the_package_is_noticed(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert run(tmp_path) == "2 0"
    assert run(tmp_path) == "2 1"
    (tmp_path / "low" / "number.py").write_text(PACKAGE["low/number.py"].replace("return 1", "return 20"))
    assert run(tmp_path) == "21 0"


def test_no_compiled_function_has_an_argument_to_leave_out() -> None:
    """numba types most calls that leave arguments out in Python, at every call."""
    compiled, found = 0, []
    for path in sorted(Path(tailbound.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                word in ast.unparse(decorator) for decorator in node.decorator_list for word in ("njit", "compiled")
            ):
                compiled += 1
                if node.args.defaults:
                    found.append(f"{path.name}: {node.name}")
    assert compiled > 20
    assert found == []


@pytest.mark.needs("root")
def test_a_user_with_nothing_to_write_to_can_import() -> None:
    """numba would refuse: the package belongs to root, and there is no home."""
    package = Path(__file__).parents[2] / "host_lib"
    code = "import tailbound.wire.packets as p; print(len(p.packet(p.header(type=1), bytes(16))))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"HOME": "/nonexistent", "PYTHONPATH": str(package), "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "80"), done.stderr
