"""The ratchet of prose: a count that rises fails, and one that falls can be kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prose

_LONG = " ".join(["word"] * (prose.WORDS + 1))


def page(root: Path, text: str) -> None:
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "page.md").write_text(text)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with one finding, and its table."""
    (tmp_path / "tests").mkdir()
    page(tmp_path, "A rank that waits for good.\n")
    assert prose.main(tmp_path, write=True) == 0
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "times"),
    [
        ("docs/a.md", "He knows who is late.", 1),
        ("docs/a.md", "| a | What is in |\n", 1),
        ("docs/a.md", "It `who is` code.\n\n    who is code", 0),
        ("host_lib/a.py", '"""Does it.\n\nThat is no op, and it is no longer."""\n', 1),
        ("host_lib/a.py", "x = 1  # as ever\n", 1),
        ("host_lib/a.py", "# as\n# ever\n", 1),
        ("host_lib/a.py", "x = 'as ever'\n", 0),
        ("host_lib/a.py", "raise OSError(f'{1} heeds')\n", 1),
        ("host_lib/a.py", "f(help='Nobody ' 'does.')\n", 1),
        ("ebpf/a.h", "/* It\n * is through. */", 1),
        ("docs/a.md", f"{_LONG}.\n", 1),
    ],
)
def test_findings(tmp_path: Path, name: str, text: str, times: int) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(text)
    assert len(list(prose.findings(tmp_path))) == times


def test_a_count_that_rises_fails(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main(small) == 0
    page(small, "A rank that waits for good, and one more, for good.\n")
    assert prose.main(small) == 1
    assert "docs: 2 times 'of late, as ever, for good', at most 1 allowed" in capsys.readouterr().out


def test_a_new_folder_starts_at_zero(small: Path) -> None:
    (small / "examples").mkdir()
    (small / "examples" / "README.md").write_text("As ever is fine, as ever is not.\n")
    assert prose.main(small) == 1


def test_the_table_only_falls(small: Path) -> None:
    before = (small / "tests" / "prose.json").read_text()
    page(small, "For ever and for good, for good, for good.\n")
    prose.main(small, write=True)
    assert (small / "tests" / "prose.json").read_text() == before
    page(small, "A rank waits.\n")
    assert prose.main(small, write=True) == 0
    assert json.loads((small / "tests" / "prose.json").read_text()) == {}
