"""The tools of the P4 switch on PATH: p4c's bmv2 back end, bmv2's ``simple_switch`` and its command line."""

from __future__ import annotations

import functools
import shutil
import subprocess

from tailbound.errors import CapabilityError

COMPILER, SWITCH, RUNTIME = "p4c-bm2-ss", "simple_switch", "simple_switch_CLI"
_SOURCES = {
    COMPILER: "p4c, https://github.com/p4lang/p4c",
    SWITCH: "bmv2, https://github.com/p4lang/behavioral-model",
    RUNTIME: "bmv2, https://github.com/p4lang/behavioral-model",
}
#: Debian's Python: the one that finds what `apt-get install python3-thrift` installs.
_SYSTEM_PYTHON = "/usr/bin/python3"
#: Seconds for the command line to print its help.
_PATIENCE = 30.0


def tool(name: str) -> str:
    """Path of a tool.

    Raises:
        CapabilityError: it is not on PATH.
    """
    path = shutil.which(name)
    if path is None:
        raise CapabilityError(
            f"{name} is not on PATH: it is part of {_SOURCES[name]}, is in no package registry: build it"
        )
    return path


def runtime_command() -> tuple[str, ...]:
    """The words that start ``simple_switch_CLI``.

    It is a Python script that takes whatever ``python3`` is on PATH. Within a virtual environment that is one without
    the module thrift, so Debian's Python is tried next.

    Raises:
        CapabilityError: it is not on PATH, or no Python runs it.
    """
    return _runtime_command(tool(RUNTIME))


@functools.cache
def _runtime_command(path: str) -> tuple[str, ...]:
    reasons = []
    for words in ((path,), (_SYSTEM_PYTHON, path)):
        try:
            done = subprocess.run(
                [*words, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{words[0]}: {error}")
            continue
        if done.returncode == 0:
            return words
        said = done.stderr.strip().splitlines()
        reasons.append(f"{words[0]}: {said[-1] if said else f'status {done.returncode}'}")
    raise CapabilityError(
        f"{RUNTIME} does not start ({'; '.join(reasons)}): it needs Python's thrift, apt-get install python3-thrift"
    )
