"""Compiling nogil code, with a cache that notices when another file has changed.

numba keeps machine code by a hash of the file that a function stands in. What it calls in other files, and constants of
the schema, are baked in all the same, so after an upgrade old code for another wire format could run. Here the hash
covers the function's package and ``wire`` too.

Whoever compiles takes ``njit`` or what is below from this module: it finds a place for the cache where neither the
package nor the home is writable, since numba refuses to import what it cannot cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import int64
from numba import njit as njit
from numba.core import config as _untyped

log = logging.getLogger("tailbound")

#: Its settings carry no types.
_config: Any = _untyped


def _find_room() -> None:
    """With no other place for the cache: /tmp."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent") / ".cache")
    home = next(p for p in (base, *base.parents) if p.exists())
    if _config.CACHE_DIR or any(os.access(p, os.W_OK) for p in (Path(__file__).parent, home)):
        return
    folder = Path(tempfile.gettempdir()) / f"tailbound-numba-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # machine code is loaded from there: a folder of somebody else is not taken
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or folder.is_symlink():
        folder = Path(tempfile.mkdtemp(prefix="tailbound-numba-"))
    _config.CACHE_DIR = str(folder)


with contextlib.suppress(OSError):  # numba says itself what it lacks
    _find_room()


@functools.cache
def _digest(*folders: Path) -> bytes:
    """Hash over the Python files of folders."""
    out = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            out.update(path.read_bytes())
    return out.digest()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles nogil code that only touches memory it is given: it cannot allocate, so nothing is reference-counted.

    Counting references of every array would cost more than summing a packet. No argument has a default: most calls that
    leave some out are typed in Python, every time, which takes up to 0.7 ms.
    """
    dispatcher = njit(nogil=True, cache=True, boundscheck=False, _nrt=False)(function)  # type: ignore[call-overload]
    return cached(dispatcher)  # type: ignore[no-any-return]


def cached(dispatcher: Any) -> Any:
    """Makes a function compiled with ``cache=True`` anew when any file of its package or of ``wire`` has changed."""
    here = Path(dispatcher.py_func.__code__.co_filename).parent
    index = dispatcher._cache._cache_file
    index._source_stamp = (index._source_stamp, _digest(here, Path(__file__).parent))
    index.save = functools.partial(_save, index.save)
    if "NUMBA_CACHE_DIR" not in os.environ:
        with contextlib.suppress(OSError):  # it is compiled, then
            _copy_kept(here / "__pycache__" / index._index_name, Path(index._index_path))
    return dispatcher


def _save(save: Callable[..., None], *code: Any) -> None:
    """Keeps machine code where there is room; else every process compiles it."""
    try:
        save(*code)
    except OSError as error:
        _say_no_room(str(error))


@functools.cache
def _say_no_room(why: str) -> None:
    where = _config.CACHE_DIR or "the folder of tailbound's package, or ~/.cache/numba"
    log.warning("compiled code cannot be kept (%s), so starts take a minute longer: make room in %s", why, where)


def _copy_kept(installed: Path, own: Path) -> None:
    """Copies machine code out of an installation that this user may not write, once, instead of compiling it again."""
    if own.exists() or not installed.exists():
        return
    for data in (*installed.parent.glob(f"{installed.stem}.*.nbc"), installed):  # the index last: it names the others
        half = own.with_name(f"{data.name}.{os.getpid()}.part")
        shutil.copyfile(data, half)
        half.replace(own.with_name(data.name))


def kept(dispatcher: Any) -> bool:
    """Whether machine code of ``dispatcher`` is at hand: made here, or kept on disk from the present sources."""
    return bool(dispatcher.signatures) or bool(dispatcher._cache._cache_file._load_index())


@functools.cache
def entry(dispatcher: Any) -> int:
    """Where the machine code of a compiled function of four ``int64`` begins, for C; it is compiled if it has to be.

    numba passes two addresses in front of the arguments: where the result goes, and where an error goes; it returns 0,
    or another number after an error. ``cfunc`` would do that once more around it, and be compiled for itself.
    """
    dispatcher.compile((int64,) * 4)  # nothing, if it is
    (found,) = dispatcher.overloads.values()
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))
