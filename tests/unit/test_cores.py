"""How long a thread has waited for a core, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailbound.transport import cores
from tailbound.transport.cores import RunQueue


@pytest.mark.parametrize(
    ("text", "waited"), [("1000 250 3\n", 250), ("0 0 0\n", None), ("", None), ("1 2\n", None), ("a b c\n", None)]
)
def test_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, waited: int | None) -> None:
    """Zeros: it does not count."""
    path = tmp_path / "schedstat"
    path.write_text(text)
    monkeypatch.setattr(cores, "_FILE", str(path))
    queue = RunQueue()
    assert queue.waited() == waited
    path.write_text("1000 300 4\n")
    assert queue.waited() == 300
    queue.close()


def test_a_kernel_without_the_file_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "_FILE", str(tmp_path / "none"))
    queue = RunQueue()
    assert queue.waited() is None
    queue.close()
