"""Puts a program at the way out of an interface (tc egress): by TCX link, or as a filter of clsact on older kernels.

Neither replaces anybody: TCX programs and filters of others stay where they are and see the same packets. The link goes
with its owner. A filter outlives a killed one. The next ``attach`` takes it away if it has the same name, or a name of
which the caller knows that its owner is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import net, syscalls

WAYS = ("auto", "tcx", "clsact")
#: What a kernel before 6.6 answers to a TCX link.
_NO_TCX = (errno.EINVAL, errno.EOPNOTSUPP)

#: Where filters of clsact hang (<linux/pkt_sched.h>).
_INGRESS, _EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
_DIRECT_ACTION = 1
#: Packets of all protocols: jobs are over IPv4 or IPv6, and the program looks for itself.
_ETH_P_ALL = 0x0003


class Attached(Protocol):
    """A program in its place; ``close`` takes it off and may be called twice."""

    def close(self) -> None:
        """Takes the program off."""


class TcxLink:
    """A BPF link; ``fd`` is its descriptor."""

    def __init__(self, program: int, index: int) -> None:
        self.fd = syscalls.link_create(program, index, 0, syscalls.ATTACH_TCX_EGRESS)

    def close(self) -> None:
        """Takes the program off."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ClsactFilter:
    """A filter of clsact, told from others by its name; clsact goes with it if it came with it and is empty."""

    def __init__(self, program: int, index: int, name: str, left_over: Callable[[str], bool]) -> None:
        self._name = name
        self._index = index
        # any thread may close the filter, also one of another namespace
        self._socket: socket.socket | None = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, socket.NETLINK_ROUTE)
        self._made = False
        try:
            self._made = self._remove(left_over)
            with contextlib.suppress(FileExistsError):
                self._tc("add", "clsact")
                self._made = True
            self._tc(
                "add-filter", "bpf", parent=_EGRESS, protocol=_ETH_P_ALL, fd=program, name=name, flags=_DIRECT_ACTION
            )
        except BaseException:
            self.close()
            raise

    def _tc(self, command: str, kind: str, handle: int = 0, **more: object) -> None:
        with net.netlink(self._socket) as route:
            route.tc(command, kind, self._index, handle, **more)

    def _filters(self, parent: int) -> list[Any]:
        with net.netlink(self._socket) as route:
            found = route.get_filters(index=self._index, parent=parent)
        return [each for each in found if each["handle"]]  # the kernel tells of priorities without filters, too

    def _remove(self, left_over: Callable[[str], bool] = lambda _: False) -> bool:
        """Takes off what has this name, and what is left over of others; returns whether anything was there."""
        gone = []
        for found in self._filters(_EGRESS):
            name = found.get_nested("TCA_OPTIONS", "TCA_BPF_NAME") or ""
            if name == self._name or left_over(name):
                gone.append(found)
        for found in gone:
            with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                self._tc("del-filter", "bpf", found["handle"], parent=_EGRESS, info=found["info"])
        return bool(gone)

    def close(self) -> None:
        """Takes the filter off, and clsact if it came with it and is empty."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):  # the interface may be gone
            self._remove()
            if self._made and not self._filters(_INGRESS) and not self._filters(_EGRESS):
                self._tc("del", "clsact")
        self._socket.close()
        self._socket = None


def attach(
    program: int, interface: str, name: str, way: str = "auto", left_over: Callable[[str], bool] = lambda _: False
) -> Attached:
    """Lets ``program`` (a descriptor, of type tc) see what leaves ``interface``.

    Args:
        name: what a filter is called; it must be the caller's alone on this interface.
        way: ``tcx``, ``clsact``, or ``auto``: the first that there is.
        left_over: whether the filter of a name has lost its owner; one that has is taken away where clsact is used.

    Raises:
        ConfigError: no such interface, or way.
        CapabilityError: no privilege, or the kernel has neither.
    """
    index = net.index_of(interface)
    if way not in WAYS:
        raise ConfigError(f"way {way!r} to attach to tc: choose {', '.join(WAYS)}")
    try:
        if way != "clsact":
            try:
                return TcxLink(program, index)
            except OSError as error:
                if way == "tcx" or error.errno not in _NO_TCX:
                    raise
        return ClsactFilter(program, index, name, left_over)
    except OSError as error:
        hint = {
            errno.EPERM: "it needs CAP_NET_ADMIN and CAP_BPF",
            errno.EINVAL: "this kernel has no TCX (Linux 6.6)",
            errno.ENOENT: "this kernel lacks clsact or its bpf filter (CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_BPF)",
        }.get(error.errno or 0, error.strerror)
        raise CapabilityError(
            f"cannot attach to tc egress of {interface} (errno {error.errno}: {hint}); training works without: results "
            "go to each peer separately, which takes more processor time"
        ) from error
