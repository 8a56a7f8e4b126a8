"""The JSON files that benchmarks leave behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Writes ``rows`` to ``path`` (None: nowhere), whose folder is made if it is missing.

    Raises:
        OSError: it cannot be written.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
