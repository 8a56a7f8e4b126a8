"""How long a thread has waited for a core, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailbound.transport import cores
from tailbound.transport.cores import RunQueue


@pytest.mark.parametrize(
    ("text", "waited"),
    [("1000 250 3\n", 250), ("0 0 0\n", None), ("", None), ("1 2\n", None), ("a b c\n", None), (None, None)],
)
def test_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, waited: int | None
) -> None:
    """Zeros: it does not count."""
    path = tmp_path / "schedstat"
    monkeypatch.setattr(cores, "_FILE", str(path))
    if text is not None:
        path.write_text(text)
    queue = RunQueue()
    assert queue.waited() == waited
    if text is not None:
        path.write_text("1000 300 4\n")
        assert queue.waited() == 300
    queue.close()
