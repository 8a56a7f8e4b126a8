"""Sources, and what was compiled of them, kept between processes by a hash of everything that went into it.

Four workers that start together compile once: the first holds a file lock, the others find its result.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tailbound.errors import CapabilityError

_TIMEOUT_S = 120


def assets(part: str) -> Path:
    """Folder of sources, ``core``, ``ebpf``, ``xdp_programs`` or ``p4``: linked in a checkout, copied in a wheel.

    Raises:
        CapabilityError: the installation lacks it.
    """
    path = Path(__file__).resolve().parent.parent / "_assets" / part
    if not path.is_dir():
        raise CapabilityError(f"the sources in {path} are missing: reinstall tailbound from a whole wheel or checkout")
    return path.resolve()


def folder() -> Path:
    """The user's cache folder, or a temporary one where that is not ours or not writable.

    An object from here is loaded into the kernel, so a folder that somebody else owns is not trusted. A process that
    gives up root's rights finds the folder of the user that it becomes.
    """
    return _folder_of(os.geteuid())


@functools.cache
def _folder_of(user: int) -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME")
        path = (Path(base) if base else Path.home() / ".cache") / "tailbound"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid == user and not path.stat().st_mode & 0o022 and os.access(path, os.W_OK):
            return path
    except (OSError, RuntimeError):  # no home at all is a RuntimeError
        pass
    temporary = Path(tempfile.mkdtemp(prefix="tailbound-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def key(parts: Iterable[str | bytes]) -> str:
    """A name for what ``parts`` determine."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:32]


def path(name: str, make: Callable[[], bytes], suffix: str = ".bpf") -> Path:
    """The file of ``name``, made and kept if it is not there; a ``CapabilityError`` where there is no room for it."""
    kept = folder() / f"{name}{suffix}"
    if kept.exists():
        return kept
    with (folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            return kept
        data = make()
        half = kept.with_suffix(".part")
        try:
            half.touch(mode=0o600)
            half.write_bytes(data)
            half.replace(kept)
        except OSError as error:
            raise CapabilityError(
                f"{kept} cannot be written ({error}): make room there, or let XDG_CACHE_HOME name another folder"
            ) from error
        return kept


def get(name: str, make: Callable[[], bytes]) -> bytes:
    """The cached bytes of ``name``, made and kept if they are not there."""
    return path(name, make).read_bytes()


def run(command: Sequence[str], advice: str, text: bytes = b"", environment: Mapping[str, str] | None = None) -> bytes:
    """What a compiler writes to its output when it is given ``text``.

    Raises:
        CapabilityError: it fails; the message has ``advice`` and the compiler's words.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, env=environment, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapabilityError(f"{command[0]} could not be run ({error}): {advice}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-4000:]
        raise CapabilityError(f"{command[0]} failed with {done.returncode}: {advice}; it said:\n{said}")
    return done.stdout


def compiled(command: Callable[[str], Sequence[str]], advice: str) -> bytes:
    """The file that a compiler makes; ``command`` is told its path.

    Raises:
        CapabilityError: as ``run``.
    """
    with tempfile.TemporaryDirectory(prefix="tailbound-") as where:
        out = Path(where) / "out.json"  # p4c looks at the ending, others do not
        run(command(str(out)), advice)
        return out.read_bytes()
