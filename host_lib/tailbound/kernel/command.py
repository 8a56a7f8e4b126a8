"""How this user has to type a command of Tailbound's that needs root."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def tailbound() -> str:
    """How to call this very installation; sudo's PATH knows no virtual environment."""
    own = Path(sys.prefix, "bin", "tailbound")
    return str(own) if own.exists() else shutil.which("tailbound") or f"{sys.executable} -m tailbound"


def as_root(*words: str) -> str:
    """``tailbound`` with ``words``, as root."""
    return " ".join([*([] if os.geteuid() == 0 else ["sudo"]), tailbound(), *words])
