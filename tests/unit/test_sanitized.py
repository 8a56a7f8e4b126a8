"""The C library under sanitizers (``make soak PARTS=sanitized``): nothing is found, and what is wrong is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from soak import sanitized
from tailbound.kernel import core

if why := sanitized.lacking():
    pytest.skip(f"missing capability 'sanitizers': {why}", allow_module_level=True)


def test_no_wrong_access(tmp_path: Path) -> None:
    assert sanitized.tried(sanitized.build(tmp_path), seed=1, count=150) == ""


@pytest.mark.thorough
def test_a_wrong_access_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for half of a packet in the place to which one is copied that is not aligned."""
    folders = core.folders()
    changed = Path(shutil.copytree(folders[0], tmp_path / "core"))
    text = (changed / "tables.c").read_text()
    right = "t->spare = calloc(1, bytes);"
    assert right in text
    (changed / "tables.c").write_text(text.replace(right, "t->spare = calloc(1, bytes / 2);"))
    monkeypatch.setattr(core, "folders", lambda: [changed, *folders[1:]])
    assert "AddressSanitizer: heap-buffer-overflow" in sanitized.tried(sanitized.build(tmp_path), seed=1, count=150)
