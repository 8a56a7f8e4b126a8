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
ROOT_FOLDER = Path("/run/tailbound-status")
#: Folders of users who have logged in, by user id.
USERS = Path("/run/user")
#: Seconds between two writes.
PERIOD = 0.3
#: A status larger than this is not read, and of a folder no more than this many.
LARGEST, MOST = 1 << 20, 4096
_DIGITS = 20  # of a number of 64 bits
_SUFFIX = ".status.json"
#: Seconds after which a status that nobody replaces may be one of a container that is gone.
_ORPHANED = 60.0
#: Writes in a row that may fail before it is given up.
_PATIENCE = 5


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
    """Where ``top`` looks: the folder that is named; else all of this user's, and root's, and for root everybody's.

    A job may have been started where ``$XDG_RUNTIME_DIR`` or ``$TMPDIR`` was another one than here.
    """
    own = folder()
    found = [own] if own is not None else []
    if os.environ.get(VARIABLE):
        return found
    everybody = os.geteuid() == 0
    users = "*" if everybody else str(os.geteuid())
    for parent, pattern in ((USERS, f"{users}/tailbound"), *((tmp, f"tailbound-{users}") for tmp in _temporary())):
        found += [place for place in sorted(parent.glob(pattern))[:MOST] if _belongs(place)]
    return list(dict.fromkeys([*found, ROOT_FOLDER]))


def _temporary() -> list[Path]:
    return list(dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp")]))


def _belongs(place: Path) -> bool:
    """Whether a folder belongs to the user in its name: in /tmp anybody may make one."""
    user = place.name.removeprefix("tailbound-") if place.parent.parent != USERS else place.parent.name
    try:
        about = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and str(about.st_uid) == user


def namespace() -> str:
    """Names the PID namespace: process ids mean something only inside one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class StatusFile:
    """One rank's file; every method may raise OSError.

    Args:
        where: the folder; made (0755) if it is missing, refused if it is another user's, unless that is root and has
            opened it for everybody as /tmp is (1777).
        name: of the file, without suffix.
    """

    def __init__(self, where: Path, name: str) -> None:
        where.mkdir(mode=0o755, parents=True, exist_ok=True)
        about = where.lstat()
        own = about.st_uid == os.geteuid() and not about.st_mode & 0o022
        shared = about.st_uid == 0 and bool(about.st_mode & stat.S_ISVTX)  # nobody else can take a file away there
        if not stat.S_ISDIR(about.st_mode) or not (own or shared):
            raise PermissionError(f"{where} is neither a folder of this user alone nor one that root shares (1777)")
        self.path = where / f"{name}{_SUFFIX}"
        self._half = where / f".{name}.{os.getpid()}.part"

    def write(self, content: dict[str, Any]) -> None:
        """Replaces the file at one blow: a reader sees the old one or the new one."""
        self._half.unlink(missing_ok=True)
        fd = os.open(self._half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, default=str)
        self._half.replace(self.path)

    def remove(self) -> None:
        """Takes the file away."""
        self._half.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


class StatusWriter:
    """Writes what ``make`` returns until ``close``, in a thread of its own: a stuck transport can still be seen.

    Args:
        name: of the file, unique to job and rank.
        make: returns plain types; called in the thread. If it fails again and again, writing ends, and nothing else.
        where: the folder; None: ``folder()``.
        period: seconds between writes (default ``PERIOD``); the first one comes after one period.
    """

    def __init__(
        self, name: str, make: Callable[[], dict[str, Any]], where: Path | None = None, period: float | None = None
    ) -> None:
        self._make, self._period = make, PERIOD if period is None else period
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        place = where or folder()
        if place is None:
            return
        self._thread = threading.Thread(target=self._run, args=(place, name), name="tailbound-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and takes the file away; may be called twice."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _run(self, place: Path, name: str) -> None:
        file: StatusFile | None = None
        failed = 0
        try:
            while not self._over.wait(self._period):
                try:
                    if file is None:
                        file = StatusFile(place, name)
                        sweep(place)
                    file.write({"pid": os.getpid(), "pidns": namespace(), **self._make()})
                    failed = 0
                except Exception as error:  # never the training's problem; a reading may meet a list that just changes
                    failed += 1
                    if failed == _PATIENCE:
                        log.info("no status for `tailbound top` any more: %s", error)
                        return
        finally:
            if file is not None:
                try:
                    file.remove()
                except OSError as error:
                    log.debug("the status file stays: %s", error)


def read(where: Iterable[Path]) -> list[dict[str, Any]]:
    """All statuses in the folders, those of dead processes left out; what is no status is ignored."""
    found: list[dict[str, Any]] = []
    for place in where:
        for path in _files(place):
            status = _load(path)
            if status is not None and not _dead(status):
                found.append(status)
    found.sort(key=lambda s: (str(s.get("cookie")), s["rank"]))
    return found


def sweep(where: Path, everybody: bool = False) -> list[Path]:
    """Takes away what dead processes of this user have left, or with ``everybody`` those of all; returns the files."""
    gone, here = [], _namespaces() if everybody else set()
    for path in _files(where):
        try:
            own = everybody or path.lstat().st_uid == os.geteuid()
            if own and (status := _load(path)) is not None and (_dead(status) or _orphaned(status, here)):
                path.unlink(missing_ok=True)
                gone.append(path)
        except OSError as error:
            log.debug("a dead process's status stays: %s", error)
    return gone


def _namespaces() -> set[str]:
    """PID namespaces in which something runs, as root sees them; empty for others."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))
    return found


def _orphaned(status: dict[str, Any], here: set[str]) -> bool:
    """Whether it is of a container that is gone: silent for long, and nothing runs in its PID namespace."""
    return bool(here) and status["age"] > _ORPHANED and status.get("pidns") not in here


def sweep_all() -> list[Path]:
    """The same in all folders that ``folders`` names, by root for all users."""
    return [path for place in folders() for path in sweep(place, everybody=os.geteuid() == 0)]


def _files(where: Path) -> list[Path]:
    try:
        return sorted(where.glob(f"*{_SUFFIX}"))[:MOST]
    except OSError:
        return []


def _load(path: Path) -> dict[str, Any] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
                return None
            status = json.loads(file.read(LARGEST + 1), parse_int=_counted)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(status, dict) or not isinstance(status.get("pidns", ""), str):
        return None
    if not all(isinstance(status.get(name), int) for name in ("rank", "pid")):
        return None
    return {**status, "age": max(0.0, time.time() - _number(status.get("time")))}


def _counted(digits: str) -> int:
    """No count has more digits than 64 bits; arithmetic on floats raises for integers that are too large for them."""
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _dead(status: dict[str, Any]) -> bool:
    if status.get("pidns") != namespace() or not 0 < status["pid"] < 1 << 22:
        return False
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
