"""The three things the lab asks of ethtool, by ioctl: queue counts, GRO, and a driver's own counters.

The ioctl is there on every kernel; ethtool over netlink knows no driver counters. The calling thread's
network namespace decides which interface is meant.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct

from tailbound.errors import CapabilityError

__all__ = ["queues", "set_gro", "set_queues", "set_tx_checksum", "statistics", "tx_checksum", "whole_frames"]

_SIOCETHTOOL = 0x8946
_GTXCSUM, _STXCSUM, _GSTRINGS, _GSTATS, _SGRO, _GSSET_INFO, _GCHANNELS, _SCHANNELS = (
    0x16,
    0x17,
    0x1B,
    0x1D,
    0x2C,
    0x37,
    0x3C,
    0x3D,
)
_STSO, _SGSO = 0x1F, 0x24
_SS_STATS = 1
_NAME_BYTES = 32
#: cmd, max rx, max tx, max other, max combined, rx, tx, other, combined
_CHANNELS = struct.Struct("=9I")


def _ioctl(interface: str, request: bytes) -> bytes:
    """One ethtool command; the request comes back as the kernel left it."""
    memory = array.array("B", request)
    address, _ = memory.buffer_info()
    ifreq = struct.pack("16sP16x", interface.encode(), address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCETHTOOL, ifreq)
    return memory.tobytes()


def queues(interface: str) -> tuple[int, int]:
    """(receive, send) queues in use.

    Raises:
        OSError: no such interface, or its driver cannot say.
    """
    values = _CHANNELS.unpack(_ioctl(interface, _CHANNELS.pack(_GCHANNELS, *([0] * 8))))
    return values[5], values[6]


def set_queues(interface: str, count: int) -> None:
    """Use ``count`` receive and ``count`` send queues (``ethtool -L INTERFACE rx COUNT tx COUNT``).

    Raises:
        CapabilityError: the driver has fewer.
    """
    values = list(_CHANNELS.unpack(_ioctl(interface, _CHANNELS.pack(_GCHANNELS, *([0] * 8)))))
    if (values[5], values[6]) == (count, count):
        return
    if values[1] < count or values[2] < count:
        raise CapabilityError(
            f"{interface} has {values[1]} receive and {values[2]} send queues, not {count} of each: ask for fewer"
        )
    values[0], values[5], values[6] = _SCHANNELS, count, count
    _ioctl(interface, _CHANNELS.pack(*values))


def set_gro(interface: str, on: bool) -> None:
    """Join received segments to super-frames, or not (``ethtool -K INTERFACE gro on|off``).

    Raises:
        OSError: no such interface, or its driver refuses.
    """
    _ioctl(interface, struct.pack("=2I", _SGRO, int(on)))


def tx_checksum(interface: str) -> bool:
    """Whether checksums are left to the device, as UDP GSO needs.

    Raises:
        OSError: no such interface.
    """
    return bool(struct.unpack("=2I", _ioctl(interface, struct.pack("=2I", _GTXCSUM, 0)))[1])


def set_tx_checksum(interface: str, on: bool) -> None:
    """Leave checksums to the device, or let the stack compute them (``ethtool -K INTERFACE tx on|off``).

    Raises:
        OSError: no such interface, or its driver refuses.
    """
    _ioctl(interface, struct.pack("=2I", _STXCSUM, int(on)))


def whole_frames(interface: str) -> None:
    """Nothing is left to the device, and no super-frames pass: ``ethtool -K INTERFACE tx off tso off gso off gro off``.

    What reads an interface by packet sockets needs it: it sees frames as the stack left them, and libpcap's ring holds
    many times fewer where there may be super-frames (a burst of 128 rows lost a tenth of them).

    Raises:
        OSError: no such interface, or its driver refuses.
    """
    set_tx_checksum(interface, on=False)
    for command in (_STSO, _SGSO, _SGRO):
        _ioctl(interface, struct.pack("=2I", command, 0))


def statistics(interface: str) -> dict[str, int]:
    """The driver's counters (``ethtool -S``); empty if it has none.

    Raises:
        OSError: no such interface.
    """
    try:
        info = _ioctl(interface, struct.pack("=2IQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return {}
        raise
    mask, count = struct.unpack_from("=QI", info, 8)
    if not mask or not count:
        return {}
    head = struct.pack("=3I", _GSTRINGS, _SS_STATS, count)
    strings = _ioctl(interface, head + bytes(count * _NAME_BYTES))
    values = _ioctl(interface, struct.pack("=2I", _GSTATS, count) + bytes(count * 8))
    keys = [
        strings[12 + i * _NAME_BYTES : 12 + (i + 1) * _NAME_BYTES].split(b"\0", 1)[0].decode("ascii", "replace")
        for i in range(count)
    ]
    return dict(zip(keys, struct.unpack_from(f"={count}Q", values, 8), strict=True))
