"""The privileged half of ``xdp``, in the user's terms: MiB, an MTU, a group's name; see ``XdpDatapath.pin``."""

from __future__ import annotations

import grp

from tailbound.datapath.sizes import memory, ring_rows
from tailbound.datapath.xdp import XdpDatapath
from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import pin
from tailbound.kernel.fanout import Fanout
from tailbound.kernel.interfaces import possible_cpus
from tailbound.kernel.linear import linear_of
from tailbound.kernel.routes import interface as look_up
from tailbound.transport.config import DEFAULT_PORT, Config, row_width

__all__ = ["attach", "detach"]


def attach(
    interface: str,
    *,
    port: int = DEFAULT_PORT,
    mtu: int | None = None,
    ring_mib: float = Config.ring_mib,
    workers: int = 2,
    group: str | None = None,
    loader: str = "auto",
) -> str:
    """Attaches for good, so that processes of ``group`` can train without privileges.

    Args:
        mtu: of the path, in bytes; None takes the interface's.
        ring_mib: result ring in MiB.
        workers: smallest world size to come; a job of more uses only as much of the sums ring as it needs.
        group: name or number; None leaves the maps to root.

    Returns:
        One line that says what there is now.

    Raises:
        ConfigError: interface, port, MTU, ring, world size or group that cannot be.
        CapabilityError: compiler, privilege or kernel feature missing.
        AttachError: the interface refuses, or a program is there.
    """
    found = look_up(interface)
    if mtu is not None and mtu > found.mtu:
        raise ConfigError(f"MTU {mtu} is above that of {interface}, {found.mtu}: give at most that")
    width = row_width(0, found.mtu if mtu is None else mtu, linear=linear_of(interface))
    sum_rows, result_rows = ring_rows(ring_mib, width, workers)
    number = _group(group)
    pin.sweep()
    XdpDatapath.pin(interface, port, width, sum_rows, result_rows, loader, group=number)
    try:
        Fanout.pin(interface, loader, number)
        results = "one send for all peers"
    except CapabilityError as error:  # training does without: older kernels cannot pin it
        results = f"a send for every peer ({str(error).splitlines()[0]})"
    total = sum(memory(sum_rows, result_rows, width, possible_cpus()).values())
    return (
        f"attached to {interface}, UDP port {port}: rows of {width} codes, {sum_rows} sum rows, {result_rows} result "
        f"rows, {total / 2**20:.1f} MiB; results: {results}; for {'root' if group is None else f'group {group}'}"
    )


def detach(interface: str) -> bool:
    """Detaches what ``attach`` attached and removes every remainder, those of vanished interfaces too.

    Returns:
        Whether anything of ``interface`` was there.

    Raises:
        CapabilityError: no privilege to.
    """
    removed = pin.remove(interface)
    pin.sweep()
    return removed


def _group(name: str | None) -> int:
    if name is None:
        return 0
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"no group {name!r} on this machine: make it (groupadd {name}) or give another") from None
