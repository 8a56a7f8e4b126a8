"""Requests to ethtool by ioctl: driver, queues, offloads, private flags and hashes.

Every kernel has the ioctl; pyroute2 knows neither hashes nor private flags. The calling thread's network namespace
decides which interface is meant.
"""

from __future__ import annotations

import array
import fcntl
import re
import socket
import struct
from typing import NamedTuple

_SIOCETHTOOL = 0x8946
_GSET, _GDRVINFO, _GSTRINGS, _GPFLAGS, _GRXFH = 0x01, 0x03, 0x1B, 0x27, 0x29
_GSSET_INFO, _GFEATURES, _SFEATURES, _GCHANNELS = 0x37, 0x3A, 0x3B, 0x3C
_SS_PRIV_FLAGS, _SS_FEATURES = 2, 4
_NAME_BYTES, _COMMAND_BYTES, _DRVINFO_BYTES, _PRIVATE_AT, _RXNFC_BYTES = 32, 44, 196, 176, 192
_UDP_V4_FLOW, _UDP_V6_FLOW = 0x02, 0x06
#: cmd, max rx, max tx, max other, max combined, rx, tx, other, combined
_CHANNELS = struct.Struct("=9I")
#: Names of ``features``: the device, or the kernel, joins received packets; it takes their VLAN tags off; checksums are
#: left to the device (of a veth).
LRO, GRO_HW, GRO, RXVLAN, TX_CHECKSUM = "rx-lro", "rx-gro-hw", "rx-gro", "rx-vlan-hw-parse", "tx-checksum-ip-generic"
#: ... and patterns of names: checksums, and super-frames each way.
CHECKSUMS, _SUPER_FRAMES = "tx-checksum-.*", f"tx-tcp.*-segmentation|tx-generic-segmentation|{GRO}"
#: Bits of ``udp_hash``: source and destination port.
HASHES_PORTS = 1 << 6 | 1 << 7


class Channels(NamedTuple):
    """Queues in use and at most; ``combined`` ones serve both ways."""

    rx: int
    tx: int
    combined: int
    rx_most: int
    tx_most: int
    combined_most: int


def _ask(interface: str, request: bytes) -> bytes:
    """One ethtool command; the request comes back as the kernel left it.

    Raises:
        OSError: no such interface, or its driver does not know the command.
    """
    memory = array.array("B", request)
    address, _ = memory.buffer_info()
    ifreq = struct.pack("16sP16x", interface.encode()[:15], address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCETHTOOL, ifreq)
    return memory.tobytes()


def _names(interface: str, kind: int, count: int) -> list[str]:
    raw = _ask(interface, struct.pack("=3I", _GSTRINGS, kind, count) + bytes(count * _NAME_BYTES))[12:]
    fields = (raw[i * _NAME_BYTES : (i + 1) * _NAME_BYTES] for i in range(count))
    return [field.split(b"\0", 1)[0].decode("ascii", "replace") for field in fields]


def _driver_info(interface: str) -> bytes:
    return _ask(interface, struct.pack("=I", _GDRVINFO).ljust(_DRVINFO_BYTES, b"\0"))


def speed(interface: str) -> int:
    """Mbit/s of the link, as its driver says; 0 where it does not (``struct ethtool_cmd``)."""
    try:
        command = _ask(interface, struct.pack("=I", _GSET).ljust(_COMMAND_BYTES, b"\0"))
    except OSError:
        return 0
    low, high = struct.unpack_from("=H14xH", command, 12)
    mbit: int = low | high << 16
    return 0 if mbit in (0xFFFF, 0xFFFFFFFF) else mbit


def driver(interface: str) -> str:
    """Name of the driver.

    Raises:
        OSError: no such interface, or there is none.
    """
    return _driver_info(interface)[4:36].split(b"\0")[0].decode()


def private_flags(interface: str) -> dict[str, bool]:
    """The driver's private flags by name (``ethtool --show-priv-flags``); empty where it does not say."""
    try:
        count = struct.unpack_from("=I", _driver_info(interface), _PRIVATE_AT)[0]
        names = _names(interface, _SS_PRIV_FLAGS, count)
        bits = struct.unpack("=2I", _ask(interface, struct.pack("=2I", _GPFLAGS, 0)))[1]
    except OSError:
        return {}
    return {name: bool(bits >> i & 1) for i, name in enumerate(names)}


def _strings(interface: str, kind: int) -> int:
    """How many strings of a kind an interface has."""
    info = _ask(interface, struct.pack("=2IQI", _GSSET_INFO, 0, 1 << kind, 0))
    mask, count = struct.unpack_from("=QI", info, 8)
    return int(count) if mask else 0


def features(interface: str, *, fixed: bool = False) -> dict[str, bool]:
    """Offloads that are on, by the names that ``ethtool -k`` takes apart (``rx-gro-hw``).

    ``fixed``: those that are on and cannot be turned off.

    Raises:
        OSError: no such interface.
    """
    count = _strings(interface, _SS_FEATURES)
    blocks = -(-count // 32)  # of each: available, asked for, on, never changed
    answer = _ask(interface, struct.pack("=2I", _GFEATURES, blocks) + bytes(16 * blocks))
    words = [struct.unpack_from("=3I", answer, 8 + 16 * block) for block in range(blocks)]
    on = [active & ~available if fixed else active for available, _, active in words]
    names = _names(interface, _SS_FEATURES, count)
    return {name: bool(on[i // 32] >> i % 32 & 1) for i, name in enumerate(names) if name}


def set_features(interface: str, on: bool, pattern: str) -> None:
    """Turns offloads on or off (``ethtool -K``): all whose whole name matches and that the driver lets be changed.

    Raises:
        OSError: no such interface, or its driver refuses.
    """
    names = _names(interface, _SS_FEATURES, _strings(interface, _SS_FEATURES))
    chosen = [i for i, name in enumerate(names) if re.fullmatch(pattern, name)]
    words = [0] * (2 * -(-len(names) // 32))  # of each block: which are meant, which of them are to be on
    for i in chosen:
        words[i // 32 * 2] |= 1 << i % 32
        words[i // 32 * 2 + 1] |= on << i % 32
    _ask(interface, struct.pack(f"=2I{len(words)}I", _SFEATURES, len(words) // 2, *words))


def udp_hash(interface: str, *, ipv6: bool = False) -> int:
    """What receive-side scaling looks at in UDP over IPv4, or over IPv6; see ``HASHES_PORTS``.

    Raises:
        OSError: no such interface, or its driver cannot say.
    """
    request = struct.pack("=2I", _GRXFH, _UDP_V6_FLOW if ipv6 else _UDP_V4_FLOW).ljust(_RXNFC_BYTES, b"\0")
    return int(struct.unpack_from("=Q", _ask(interface, request), 8)[0])


def channels(interface: str) -> Channels:
    """Queues.

    Raises:
        OSError: no such interface, or its driver cannot say.
    """
    answer = _CHANNELS.unpack(_ask(interface, _CHANNELS.pack(_GCHANNELS, *([0] * 8))))
    _, rx_most, tx_most, _, combined_most, rx, tx, _, combined = answer
    return Channels(rx, tx, combined, rx_most, tx_most, combined_most)


def whole_frames(interface: str) -> None:
    """Nothing is left to the device, and no super-frames pass: ``ethtool -K INTERFACE tx off tso off gso off gro off``.

    What reads an interface by packet sockets needs it: it sees frames as the stack left them, and libpcap's ring holds
    many times fewer where there may be super-frames (a burst of 128 rows lost a tenth of them).

    Raises:
        OSError: no such interface, or its driver refuses.
    """
    set_features(interface, False, f"{CHECKSUMS}|{_SUPER_FRAMES}")
