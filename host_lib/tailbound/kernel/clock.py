"""Stamps of the kernel are compared with this process's clock, so both have to be the same one."""

from __future__ import annotations

from pathlib import Path

from tailbound.errors import CapabilityError

_OFFSETS = Path("/proc/self/timens_offsets")


def refuse_other(offsets: Path = _OFFSETS) -> None:
    """Looks whether a time namespace moves CLOCK_MONOTONIC of this process, as after a restore by CRIU.

    Raises:
        CapabilityError: it does.
    """
    try:
        lines = [line.split() for line in offsets.read_text().splitlines()]
    except OSError:
        return  # a kernel without time namespaces
    for name, seconds, nanoseconds in lines:
        if name == "monotonic" and (int(seconds) or int(nanoseconds)):
            raise CapabilityError(
                f"this process is in a time namespace, {int(seconds) + int(nanoseconds) / 1e9:g} s from the kernel's "
                "clock, which stamps packets of the xdp datapath: start it outside of that, or use the udp datapath"
            )
