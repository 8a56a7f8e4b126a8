"""Compiling nogil code, with a cache that notices when another file has changed.

numba keeps machine code by a hash of the file that a function stands in. What it calls in other files, and constants of
the schema, are baked in all the same, so after an upgrade old code for another wire format could run. Here the hash
covers the function's package and ``wire`` too.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

#: An integer or bool of nogil code; numba infers its width, mypy need not.
Scalar = Any


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

    Counting references of every array would cost more than summing a packet.
    """
    dispatcher = njit(nogil=True, cache=True, boundscheck=False, _nrt=False)(function)  # type: ignore[call-overload]
    return cached(dispatcher)  # type: ignore[no-any-return]


def cached(dispatcher: Any) -> Any:
    """Makes a function compiled with ``cache=True`` anew when any file of its package or of ``wire`` has changed."""
    here = Path(dispatcher.py_func.__code__.co_filename).parent
    index = dispatcher._cache._cache_file
    index._source_stamp = (index._source_stamp, _digest(here, Path(__file__).parent))
    return dispatcher
