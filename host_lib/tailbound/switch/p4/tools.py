"""The tools of the P4 switch on PATH: p4c's bmv2 back end, bmv2's ``simple_switch`` and its command line."""

from __future__ import annotations

import os
import shutil

from tailbound.errors import CapabilityError

COMPILER, SWITCH, RUNTIME = "p4c-bm2-ss", "simple_switch", "simple_switch_CLI"
_SOURCES = {
    COMPILER: "p4c, https://github.com/p4lang/p4c",
    SWITCH: "bmv2, https://github.com/p4lang/behavioral-model",
    RUNTIME: "bmv2, https://github.com/p4lang/behavioral-model",
}


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


def runtime_environment() -> dict[str, str]:
    """For ``RUNTIME``, a script that takes the first ``python3`` on PATH and needs its module thrift.

    A virtual environment has none, so Debian's Python comes first: ``apt-get install python3-thrift``.
    """
    return os.environ | {"PATH": f"/usr/bin:{os.environ.get('PATH', '')}", "PYTHONUNBUFFERED": "1"}
