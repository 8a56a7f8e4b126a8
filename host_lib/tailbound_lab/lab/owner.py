"""Whose lab is it: the owner's process is part of every namespace's name, so no state file can go stale.

``tb-PID-START-N-...``: process id and start time (clock ticks since boot, base 36) of the owner, and a count within it.
The pair names a process once and for all, whatever is done with its number later. Versions that share a machine must
agree on it: who reads another start time takes a lab for left over, and ends whatever runs there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tailbound_lab.lab import namespaces

PREFIX = "tb-"
_NAME = re.compile(r"tb-(\d+)-([0-9a-z]+)-(\d+)-(?:[sb]|[cw]\d+)")
_count = itertools.count()
_KILL_SECONDS = 5.0


def _start_time(pid: int) -> str | None:
    """Start time of a process, None if there is none (a zombie does not count)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else np.base_repr(int(fields[19]), 36).lower()


def is_alive(pid: int) -> bool:
    """Whether a process runs, or could: zombies do not."""
    return _start_time(pid) is not None


def new_prefix() -> str:
    """A prefix for a lab of this process."""
    pid = os.getpid()
    return f"{PREFIX}{pid}-{_start_time(pid)}-{next(_count)}"


@dataclass
class Owned:
    """One lab found on this machine: the prefix of its namespaces, its owner, whether that runs, its namespaces."""

    prefix: str
    pid: int
    alive: bool
    namespaces: list[str] = field(default_factory=list)


def owned() -> list[Owned]:
    """Every lab on this machine, by the names of bound namespaces."""
    labs: dict[str, Owned] = {}
    for name in namespaces.names(PREFIX):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        pid, start, number = int(match[1]), match[2], match[3]
        prefix = f"{PREFIX}{pid}-{start}-{number}"
        lab = labs.setdefault(prefix, Owned(prefix, pid, _start_time(pid) == start))
        lab.namespaces.append(name)
    return list(labs.values())


def remove_all(names: list[str]) -> list[int]:
    """Kill whoever lives in these namespaces and unbind them; the ids of the killed.

    Only processes inside the namespaces are touched, and nobody gets there but through a lab. They are looked for until
    there are none: one that is not killed yet may start others, whom nobody would find without the names.
    """
    killed: set[int] = set()
    end = time.monotonic() + _KILL_SECONDS
    while inside := _kill(names) | {pid for pid in killed if is_alive(pid)}:
        killed |= inside
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    for name in reversed(names):
        namespaces.remove(name)
    return sorted(killed)


def _kill(names: list[str]) -> set[int]:
    """Kills who lives in these namespaces now; their ids."""
    inside = {pid for pid in namespaces.processes(names) if pid != os.getpid()}
    for pid in inside:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return inside


def reap() -> list[str]:
    """Remove labs whose owner is dead; their prefixes. Labs of living owners are not touched."""
    gone = []
    for lab in owned():
        if not lab.alive:
            remove_all(lab.namespaces)
            gone.append(lab.prefix)
    return gone
