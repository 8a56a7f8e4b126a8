"""What the tables of docs/evidence.md were measured on: ``python -m tailbound_lab.bench.measured JSON > FILE``.

The JSON file is what ``tailbound bench evidence`` writes beside its results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HEAD = """\
# What was measured, and on what

Generated from `docs/measured.json` by `make generate`. `tailbound bench evidence` writes that file into its folder,
a row a measurement; load is that of the machine, before and after. [Evidence](evidence.md) says what came of it.

| measurement | command | commit | machine | begun | took | load | ended |
|---|---|---|---|---|---|---|---|
"""


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    return _HEAD + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    load = f"{row['load_before']:.1f}, {row['load_after']:.1f}"
    return (
        row["name"], f"`{row['command']}`", row["commit"] or "unknown", row["machine"], row["begun"],
        f"{row['seconds']:.0f} s", load, row["ended"],
    )  # fmt: skip


if __name__ == "__main__":
    print(page(json.loads(Path(sys.argv[1]).read_text())), end="")
