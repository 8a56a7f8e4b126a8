"""Attaches a program to an interface by BPF link, in native mode (kernel-25): it goes with its owner, replaces nobody.

Generic mode is not used: it runs after the network stack has merged segments on some devices, and a program that takes
single packets would see frames of 64 KB there.
"""

from __future__ import annotations

import errno
import os

from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel import net, pin, syscalls

#: Names of our own programs, as the kernel shows them, and what takes them off.
OURS = {"tb_worker": "tailbound detach {}", "tb_faults": "tailbound lab clean", "tb_switch": "tailbound switch down"}


def program_name(prog_id: int) -> str:
    """Name of a loaded program; empty where it may not be looked at."""
    try:
        fd = syscalls.prog_by_id(prog_id)
    except OSError:
        return ""
    try:
        return syscalls.prog_info(fd).name
    finally:
        os.close(fd)


def refuse_occupied(interface: str) -> None:
    """Says who is there already.

    Raises:
        AttachError: an XDP program is on ``interface``; it is named and never replaced.
    """
    there = net.xdp_on(interface)
    if there is None:
        return
    name = program_name(there.prog_id)
    if name in OURS:
        # pins have the name of a VLAN's interface, or the one that the device had before it was renamed
        pinned = pin.owner(interface, there.prog_id)
        group = pin.group_of(pinned) if pinned else None
        why = "only one program fits on a device: end the job that uses it"
        if group is not None:
            why = f"it is attached already, for {group}: for other settings run `tailbound attach {pinned} --replace`"
        raise AttachError(
            f"{interface} already carries Tailbound's {name} (program {there.prog_id}), and {why}, or run "
            f"`{OURS[name].format(pinned or interface)}`"
        )
    raise AttachError(
        f"{interface} already carries the XDP program {name or '(unnamed)'} (id {there.prog_id}, {there.mode} mode), "
        f"which Tailbound never replaces: remove it (`ip link set dev {interface} xdp off`) or use the udp datapath"
    )


def attach(program: int, interface: str) -> int:
    """Attaches ``program`` (a descriptor) and returns the link's descriptor; closing it detaches.

    Raises:
        ConfigError: no such interface.
        AttachError: somebody is there, or the driver refuses; the message says what to try next.
        CapabilityError: no privilege.
    """
    index = net.index_of(interface)
    driver = net.driver_of(interface)
    refuse_occupied(interface)
    try:
        return syscalls.link_create(program, index, syscalls.XDP_FLAGS_DRV_MODE)
    except OSError as error:
        if error.errno == errno.EBUSY:
            refuse_occupied(interface)
        if error.errno == errno.EPERM:
            raise CapabilityError(
                f"attaching to {interface} needs CAP_NET_ADMIN and CAP_BPF: run `sudo tailbound attach {interface}` "
                "once, or use the udp datapath"
            ) from error
        hints = {
            errno.EOPNOTSUPP: f"driver {driver or '(unknown)'} has no native XDP, or none beside LRO or hardware GRO",
            errno.EINVAL: "the driver refuses it at this MTU or with these offloads (lower the MTU, turn LRO off)",
            errno.ERANGE: "the MTU is too large for this driver's XDP: lower it",
            errno.ENOMEM: "no memory for its queues",
        }
        hint = hints.get(error.errno or 0, error.strerror)
        raise AttachError(
            f"native XDP on {interface} was refused (errno {error.errno}): {hint}; or use the udp datapath"
        ) from error
