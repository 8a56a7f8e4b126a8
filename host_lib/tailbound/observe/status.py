"""A small file per rank that says how it is doing, for ``tailbound top``: replaced whole, a few times a second.

The folder is ``TAILBOUND_STATUS`` if set (``off``: no files); else ``/run/tailbound-status`` for root,
``$XDG_RUNTIME_DIR/tailbound`` or ``<tmp>/tailbound-<uid>`` for others. A status that cannot be written is left out:
training never fails for it. A file goes when its job ends; those of processes that were killed go when the next job
of the same user starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger("tailbound")

VARIABLE = "TAILBOUND_STATUS"
#: Runtime folders of users.
USERS = Path("/run/user")
ROOT_FOLDER = Path("/run/tailbound-status")
#: Seconds between two writes.
PERIOD = 0.3
#: A status larger than this is not read.
LARGEST = 1 << 20
_SUFFIX = ".status.json"


def folder() -> Path | None:
    """Where this process writes its status; None: nowhere."""
    said = os.environ.get(VARIABLE, "")
    if said.lower() == "off":
        return None
    if said:
        return Path(said)
    if os.geteuid() == 0:
        return ROOT_FOLDER
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "tailbound" if runtime else Path(tempfile.gettempdir()) / f"tailbound-{os.geteuid()}"


def folders() -> list[Path]:
    """Where ``top`` looks: where this user's ranks write; without ``TAILBOUND_STATUS``, root's folder too.

    Root sees the ranks of all users who have a runtime folder.
    """
    own = [place for place in (folder(),) if place is not None]
    if os.environ.get(VARIABLE):
        return own
    users = sorted(USERS.glob("*/tailbound")) if os.geteuid() == 0 else []
    return list(dict.fromkeys([*own, ROOT_FOLDER, *users]))


def namespace() -> str:
    """Names the PID namespace: process ids mean something only inside one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def make_folder(where: Path) -> None:
    """Makes the folder (0755) if it is missing.

    Raises:
        PermissionError: it is another user's, unless that is root and has opened it for everybody as /tmp is (1777).
    """
    where.mkdir(mode=0o755, parents=True, exist_ok=True)
    about = where.lstat()
    own = about.st_uid == os.geteuid() and not about.st_mode & 0o022
    shared = about.st_uid == 0 and bool(about.st_mode & stat.S_ISVTX)  # nobody else can take a file away there
    if not stat.S_ISDIR(about.st_mode) or not (own or shared):
        raise PermissionError(f"{where} is neither a folder of this user alone nor one that root shares (1777)")


class StatusWriter:
    """Writes what ``make`` returns until ``close``, in a thread of its own: a stuck transport can still be seen.

    Args:
        name: of the file, unique to job and rank.
        make: returns plain types; called in the thread.
        where: the folder; None: ``folder()``.
        period: seconds between writes; the first one comes after one period.
    """

    def __init__(
        self, name: str, make: Callable[[], dict[str, Any]], where: Path | None = None, period: float = PERIOD
    ) -> None:
        self._make, self._period = make, period
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        place = where or folder()
        if place is None:
            return
        self._path = place / f"{name}{_SUFFIX}"
        self._half = place / f".{name}.{os.getpid()}.part"
        self._thread = threading.Thread(target=self._run, name="tailbound-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and takes the file away; may be called twice."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self) -> None:
        try:
            make_folder(self._path.parent)
            sweep(self._path.parent)
        except OSError as error:
            log.info("no status for `tailbound top`: %s", error)
            return
        while not self._over.wait(self._period):
            try:
                self._write()
            except Exception as error:  # never the training's problem; a reading may meet a list that just changes
                log.debug("no status for `tailbound top`: %s", error)
        with contextlib.suppress(OSError):
            self._half.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Replaces the file at one blow: a reader sees the old one or the new one."""
        content = {"pid": os.getpid(), "pidns": namespace(), **self._make()}
        self._half.unlink(missing_ok=True)
        fd = os.open(self._half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, default=str))  # in C, which ``dump`` is not
        self._half.replace(self._path)


def read(where: Iterable[Path]) -> list[dict[str, Any]]:
    """All statuses in the folders, those of dead processes left out; a file of any other content is ignored."""
    found = [one for place in where for path in _files(place) if (one := _load(path)) is not None and not _dead(one)]
    return sorted(found, key=lambda status: (str(status.get("cookie")), status["rank"]))


def sweep(where: Path) -> None:
    """Takes away files of dead processes, where this user may."""
    for path in _files(where):
        if (status := _load(path)) is not None and _dead(status):
            with contextlib.suppress(OSError):
                path.unlink()


def _files(where: Path) -> list[Path]:
    try:
        return sorted(where.glob(f"*{_SUFFIX}"))
    except OSError:
        return []


def _load(path: Path) -> dict[str, Any] | None:
    """The status in a file that any user may have written; None: it has none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = json.loads(file.read(LARGEST) or b"")
        rank, pid, written = (status[name] for name in ("rank", "pid", "time"))
        if not (isinstance(rank, int) and isinstance(pid, int)):
            return None
        return {**status, "age": max(0.0, time.time() - float(written))}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, OverflowError):
        return None


def _dead(status: dict[str, Any]) -> bool:
    if status.get("pidns") != namespace() or not 0 < status["pid"] < 1 << 22:
        return False
    try:
        os.kill(status["pid"], 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
