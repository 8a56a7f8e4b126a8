"""The tools of the P4 switch on PATH: p4c's bmv2 back end, bmv2's ``simple_switch`` and its command line."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from tailbound.errors import CapabilityError

COMPILER, SWITCH, RUNTIME = "p4c-bm2-ss", "simple_switch", "simple_switch_CLI"
_SOURCES = {
    COMPILER: "p4c, https://github.com/p4lang/p4c",
    SWITCH: "bmv2, https://github.com/p4lang/behavioral-model",
    RUNTIME: "bmv2, https://github.com/p4lang/behavioral-model (needs Python's thrift)",
}


def missing(names: Iterable[str] = (COMPILER, SWITCH, RUNTIME)) -> list[str]:
    """Those of ``names`` that are not on PATH."""
    return [name for name in names if shutil.which(name) is None]


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
