"""What once went wrong: lives made as short as they can be, kept as files that are lived again in every run."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Kept with the tests: everything that was ever found and mended.
KEPT = Path(__file__).with_name("corpus")
#: Seconds that making a life shorter may take.
PATIENCE = 60.0


def shortest(steps: Sequence[Any], wrong: Callable[[Sequence[Any]], bool], seconds: float = PATIENCE) -> list[Any]:
    """The steps without those that it takes not to be ``wrong``: halves first, then less, then one by one."""
    left, size = list(steps), max(1, len(steps) // 2)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before, at = len(left), 0
        while at < len(left) and time.monotonic() < until:
            fewer = left[:at] + left[at + size :]
            if fewer and wrong(fewer):
                left = fewer
            else:
                at += size
        if size == 1 and len(left) == before:
            break
        size = max(1, size // 2)
    return left


def keep(folder: Path, program: str, words: str, steps: Sequence[Any]) -> Path:
    """Writes a life into ``folder``, under a name of its own."""
    text = json.dumps({"program": program, "words": words, "steps": steps}, indent=None)
    text = text.replace("[[", "[\n[").replace("], [", "],\n[") + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program}-{zlib.crc32(text.encode()):08x}.json"
    path.write_text(text)
    return path


def kept(program: str, *folders: Path) -> list[tuple[Path, list[Any]]]:
    """The lives of ``program`` in folders, in the order of their names."""
    paths = sorted(path for folder in {KEPT, *folders} for path in folder.glob(f"{program}-*.json"))
    return [(path, [tuple(step) for step in json.loads(path.read_text())["steps"]]) for path in paths]
