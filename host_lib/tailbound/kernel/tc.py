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
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import interfaces, syscalls
from tailbound.kernel.rtnetlink import CREATE, EXCLUSIVE, Rtnetlink, attribute, attributes

WAYS = ("auto", "tcx", "clsact")
#: What a kernel before 6.6 answers to a TCX link.
_NO_TCX = (errno.EINVAL, errno.EOPNOTSUPP)

# <linux/rtnetlink.h>, <linux/pkt_sched.h>, <linux/pkt_cls.h>
_NEW_QDISC, _DEL_QDISC, _NEW_FILTER, _DEL_FILTER, _GET_FILTER = 36, 37, 44, 45, 46
_CLSACT, _CLSACT_HANDLE, _INGRESS, _EGRESS = 0xFFFFFFF1, 0xFFFF0000, 0xFFFFFFF2, 0xFFFFFFF3
_KIND, _OPTIONS, _BPF_FD, _BPF_NAME, _BPF_FLAGS, _DIRECT_ACTION = 1, 2, 6, 7, 8, 1
#: Packets of all protocols: jobs are over IPv4 or IPv6, and the program looks for itself.
_ETH_P_ALL = 0x0003
#: struct tcmsg: family, interface, handle, parent, info (priority and protocol of a filter)
_TCMSG = struct.Struct("=B3xiIII")


class Attached(Protocol):
    """A program in its place; ``close`` takes it off and may be called twice."""

    way: str

    def close(self) -> None:
        """Takes the program off."""


class TcxLink:
    """A BPF link; ``fd`` is its descriptor."""

    way = "tcx"

    def __init__(self, program: int, index: int) -> None:
        self.fd = syscalls.link_create(program, index, 0, syscalls.ATTACH_TCX_EGRESS)

    def close(self) -> None:
        """Takes the program off."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Filter(NamedTuple):
    """A filter that the kernel told of."""

    handle: int
    info: int
    name: str


def _none(_: str) -> bool:
    """For who knows of no filters that are left over."""
    return False


class ClsactFilter:
    """A filter of clsact, told from others by its name; clsact goes with it if it came with it and is empty."""

    way = "clsact"

    def __init__(self, program: int, index: int, name: str, left_over: Callable[[str], bool] = _none) -> None:
        self._name = name
        self._index = index
        self._netlink: Rtnetlink | None = Rtnetlink()
        self._made = False
        try:
            self._made = self._remove(left_over)
            try:
                self._qdisc(_NEW_QDISC, CREATE | EXCLUSIVE)
                self._made = True
            except OSError as error:
                if error.errno != errno.EEXIST:
                    raise
            options = attribute(_BPF_FD, struct.pack("=I", program)) + attribute(_BPF_NAME, name.encode() + b"\0")
            options += attribute(_BPF_FLAGS, struct.pack("=I", _DIRECT_ACTION))
            body = _TCMSG.pack(0, index, 0, _EGRESS, socket.htons(_ETH_P_ALL))  # priority 0: one that is free
            body += attribute(_KIND, b"bpf\0") + attribute(_OPTIONS, options)
            self._netlink.request(_NEW_FILTER, CREATE | EXCLUSIVE, body)
        except BaseException:
            self.close()
            raise

    def _qdisc(self, kind: int, flags: int) -> None:
        assert self._netlink is not None
        body = _TCMSG.pack(0, self._index, _CLSACT_HANDLE, _CLSACT, 0) + attribute(_KIND, b"clsact\0")
        self._netlink.request(kind, flags, body)

    def _filters(self, parent: int) -> list[_Filter]:
        assert self._netlink is not None
        found = []
        for reply in self._netlink.dump(_GET_FILTER, _TCMSG.pack(0, self._index, 0, parent, 0)):
            _, _, handle, _, info = _TCMSG.unpack_from(reply)
            options = attributes(attributes(reply[_TCMSG.size :]).get(_OPTIONS, b""))
            if handle:  # the kernel tells of priorities without filters, too
                name = options.get(_BPF_NAME, b"").rstrip(b"\0").decode(errors="replace")
                found.append(_Filter(handle, info, name))
        return found

    def _remove(self, left_over: Callable[[str], bool] = _none) -> bool:
        """Takes off what has this name, and what is left over of others; returns whether anything was there."""
        assert self._netlink is not None
        gone = [found for found in self._filters(_EGRESS) if found.name == self._name or left_over(found.name)]
        for found in gone:
            body = _TCMSG.pack(0, self._index, found.handle, _EGRESS, found.info) + attribute(_KIND, b"bpf\0")
            with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                self._netlink.request(_DEL_FILTER, 0, body)
        return bool(gone)

    def close(self) -> None:
        """Takes the filter off, and clsact if it came with it and is empty."""
        if self._netlink is None:
            return
        with contextlib.suppress(OSError):  # the interface may be gone
            self._remove()
            if self._made and not self._filters(_INGRESS) and not self._filters(_EGRESS):
                self._qdisc(_DEL_QDISC, 0)
        self._netlink.close()
        self._netlink = None


def attach(
    program: int, interface: str, name: str, way: str = "auto", left_over: Callable[[str], bool] = _none
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
    index = interfaces.index_of(interface)
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
