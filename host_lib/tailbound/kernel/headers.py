"""Kernel headers for BCC: those of the running kernel, or any others that are installed.

XDP programs use the user-space API only, so headers of another version do. Debian splits them into a common and an
architecture tree; a shallow tree of symbolic links in the cache joins them, and nothing below /lib/modules is touched.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

from tailbound.errors import CapabilityError


def running() -> Path | None:
    """Headers of the running kernel, where BCC finds them by itself."""
    path = Path("/lib/modules") / platform.release() / "build"
    return path if (path / "include").is_dir() else None


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", path.name))


def installed() -> Path | None:
    """The newest other headers: a folder that has ``include/generated``."""
    found = [p for p in Path("/usr/src").glob("linux-headers-*") if (p / "include" / "generated").is_dir()]
    return max(found, key=_version, default=None)


def source_tree() -> str | None:
    """Headers that BCC can use: those that the user names, those of the running kernel, or the newest others."""
    tree = os.environ.get("BCC_KERNEL_SOURCE") or running() or installed()
    return None if tree is None else str(tree)


def _common(tree: Path) -> Path | None:
    """Debian's tree of what all architectures share, beside ``tree``."""
    if (tree / "include" / "uapi").is_dir():
        return None
    stem = re.match(r"linux-headers-[\d.]+(?:-\d+)?", tree.name)
    candidates = [p for p in tree.parent.glob("linux-headers-*-common") if stem and p.name.startswith(stem.group())]
    return candidates[0] if candidates else None


def _join(first: Path, second: Path, out: Path) -> None:
    """Links the children of both folders into ``out``; where both have a folder, joins those."""
    out.mkdir()
    for name in sorted({p.name for p in first.iterdir()} | {p.name for p in second.iterdir()}):
        a, b = first / name, second / name
        if a.is_dir() and b.is_dir():
            _join(a, b, out / name)
        else:
            (out / name).symlink_to(b if b.exists() else a)


def environment(cache: Path) -> dict[str, str]:
    """Variables that BCC needs to find headers; makes the joined tree if need be.

    Raises:
        CapabilityError: no headers at all.
    """
    if os.environ.get("BCC_KERNEL_SOURCE") or running():
        return {}
    tree = installed()
    if tree is None:
        raise CapabilityError("no kernel headers for BCC: apt-get install linux-headers-amd64 (any version does)")
    common = _common(tree)
    if common is None:
        return {"BCC_KERNEL_SOURCE": str(tree)}
    joined = cache / f"headers-{tree.name}"
    found = {"BCC_KERNEL_SOURCE": str(joined)}
    if joined.is_dir():
        return found
    temporary = Path(tempfile.mkdtemp(prefix="headers-", dir=cache))
    try:
        _join(common, tree, temporary / "tree")
        os.rename(temporary / "tree", joined)
    except OSError:
        if not joined.is_dir():  # another worker may have been faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return found
