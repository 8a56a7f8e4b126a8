"""bpf(2), one function a command, over ctypes: no library between us and the kernel, nothing printed.

Every function raises ``OSError`` with the kernel's errno; callers turn it into an error that says what to do.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from dataclasses import dataclass
from typing import NamedTuple

from tailbound.errors import CapabilityError

_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280, "s390x": 351, "ppc64le": 361}
_MAP_CREATE, _MAP_UPDATE, _MAP_DELETE, _PROG_LOAD, _OBJ_PIN, _OBJ_GET = 0, 2, 3, 5, 6, 7
_TEST_RUN, _PROG_BY_ID, _INFO_BY_FD, _BTF_LOAD, _MAP_FREEZE = 10, 13, 15, 18, 22
_LINK_CREATE, _LINK_DETACH = 28, 34

MAP_TYPE_ARRAY, MAP_TYPE_PROG_ARRAY, MAP_TYPE_ARRAY_OF_MAPS, MAP_TYPE_DEVMAP, MAP_TYPE_RINGBUF = 2, 3, 12, 14, 27
F_NUMA_NODE, F_MMAPABLE = 4, 1 << 10
#: Of a map: this descriptor, or one opened with it, writes only; programs read only.
F_WRONLY, F_RDONLY_PROG = 1 << 4, 1 << 7
PROG_TYPE_TC, PROG_TYPE_XDP, _F_XDP_HAS_FRAGS = 3, 6, 1 << 5
ATTACH_XDP_DEVMAP, ATTACH_XDP, ATTACH_TCX_EGRESS = 33, 37, 47
#: How long the verifier is asked again when signals interrupt it, in seconds.
_PATIENCE_S = 20.0
XDP_FLAGS_DRV_MODE = 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _number() -> int:
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise CapabilityError(f"no bpf(2) number known for {machine}: use the udp datapath")
    return _NUMBERS[machine]


def _bpf(command: int, attr: bytes | bytearray, size: int = 0) -> tuple[int, bytes]:
    buffer = ctypes.create_string_buffer(bytes(attr), max(len(attr), size))
    result = _libc.syscall(_number(), command, buffer, len(buffer))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result, buffer.raw


def _address(buffer: ctypes.Array[ctypes.c_char] | None) -> int:
    return ctypes.addressof(buffer) if buffer is not None else 0


def _name(name: str) -> bytes:
    return name.encode()[:15].ljust(16, b"\0")


def map_create(
    kind: int,
    key_size: int,
    value_size: int,
    entries: int,
    *,
    name: str = "",
    flags: int = 0,
    btf: tuple[int, int, int] = (0, 0, 0),
    inner: int = 0,
    node: int = -1,
) -> int:
    """Creates a map and returns its descriptor.

    ``btf`` is (BTF descriptor, key type, value type); ``inner`` describes the maps that a map of maps holds; its
    memory is that of NUMA node ``node``, unless that is below 0.
    """
    if node >= 0:
        flags |= F_NUMA_NODE
    sizes = (kind, key_size, value_size, entries, flags, inner, max(node, 0))
    attr = struct.pack("=7I16s4xIII", *sizes, _name(name), *btf)
    return _bpf(_MAP_CREATE, attr)[0]


def map_freeze(fd: int) -> None:
    """User space can no longer write the map; programs still can."""
    _bpf(_MAP_FREEZE, struct.pack("=I", fd))


def map_update(fd: int, key: bytes, value: bytes, flags: int = 0) -> None:
    """Writes one element."""
    k, v = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    _bpf(_MAP_UPDATE, struct.pack("=I4xQQQ", fd, _address(k), _address(v), flags))


def map_delete(fd: int, key: bytes) -> None:
    """Removes one element; from a map of maps, when this returns, no program uses what it held any more."""
    k = ctypes.create_string_buffer(key, len(key))
    _bpf(_MAP_DELETE, struct.pack("=I4xQ", fd, _address(k)))


def btf_load(blob: bytes) -> int:
    """Loads a BTF blob and returns its descriptor."""
    data = ctypes.create_string_buffer(blob, len(blob))
    return _bpf(_BTF_LOAD, struct.pack("=QQIII4x", _address(data), 0, len(blob), 0, 0))[0]


class VerifierError(OSError):
    """The kernel refused a program; ``log`` is what the verifier said."""

    def __init__(self, error: int, log: str) -> None:
        super().__init__(error, os.strerror(error))
        self.log = log


def prog_load(code: bytes, *, name: str, kind: int = PROG_TYPE_XDP, where: int = ATTACH_XDP) -> int:
    """Loads a program, of XDP (for ``where``) or of tc, and returns its descriptor.

    The verifier breaks off with EAGAIN when a signal comes; then it is asked again, for ``_PATIENCE_S``.

    Raises:
        VerifierError: with the log of a second try, since logging is slow and mostly not needed.
    """
    deadline = time.monotonic() + _PATIENCE_S
    insns = ctypes.create_string_buffer(code, len(code))
    text = ctypes.create_string_buffer(b"Dual BSD/GPL")
    flags, where = (_F_XDP_HAS_FRAGS, where) if kind == PROG_TYPE_XDP else (0, 0)

    def attr(level: int, log: ctypes.Array[ctypes.c_char] | None) -> bytes:
        head = struct.pack("=IIQQ", kind, len(code) // 8, _address(insns), _address(text))
        head += struct.pack("=IIQ", level, len(log) if log is not None else 0, _address(log))
        return head + struct.pack("=II16sII", 0, flags, _name(name), 0, where)

    def ask(level: int, log: ctypes.Array[ctypes.c_char] | None) -> int:
        while True:
            try:
                return _bpf(_PROG_LOAD, attr(level, log), 128)[0]
            except BlockingIOError:  # EAGAIN
                if time.monotonic() > deadline:
                    raise

    try:
        return ask(0, None)
    except OSError as error:
        log = ctypes.create_string_buffer(16 << 20)
        try:
            return ask(1, log)
        except OSError:
            raise VerifierError(error.errno or 0, log.value.decode(errors="replace")) from error


def obj_pin(fd: int, path: str) -> None:
    """Pins a map, program or link at ``path`` on a bpffs."""
    p = ctypes.create_string_buffer(os.fsencode(path))
    _bpf(_OBJ_PIN, struct.pack("=QII", _address(p), fd, 0))


def obj_get(path: str, flags: int = 0) -> int:
    """Opens what is pinned at ``path``, for reading and writing, or with ``F_WRONLY`` for writing only."""
    p = ctypes.create_string_buffer(os.fsencode(path))
    return _bpf(_OBJ_GET, struct.pack("=QII", _address(p), 0, flags))[0]


def link_create(program: int, ifindex: int, flags: int, where: int = ATTACH_XDP) -> int:
    """Attaches a program by BPF link; the program goes when the link's last descriptor and pin are gone."""
    return _bpf(_LINK_CREATE, struct.pack("=IIII", program, ifindex, where, flags), 64)[0]


def link_detach(fd: int) -> None:
    """Takes the program off its interface now; unpinning alone leaves that to a worker of the kernel's."""
    _bpf(_LINK_DETACH, struct.pack("=I", fd))


def prog_by_id(id_: int) -> int:
    """Opens a loaded program by its id."""
    return _bpf(_PROG_BY_ID, struct.pack("=III", id_, 0, 0))[0]


def _info(fd: int, size: int) -> bytes:
    info = ctypes.create_string_buffer(size)
    _bpf(_INFO_BY_FD, struct.pack("=IIQ", fd, size, _address(info)))
    return info.raw


class MapInfo(NamedTuple):
    """Part of what the kernel says of a map; the size in bytes."""

    value_size: int
    entries: int
    flags: int


def map_info(fd: int) -> MapInfo:
    """Describes a map (struct bpf_map_info: type, id and size of keys come first)."""
    return MapInfo(*struct.unpack_from("=III", _info(fd, 88), 12))


@dataclass(frozen=True)
class ProgInfo:
    """What the kernel says of a program."""

    id: int
    name: str
    verified_insns: int  #: instructions the verifier looked at; a million is the most


def prog_info(fd: int) -> ProgInfo:
    """Describes a program.

    Layout of struct bpf_prog_info: type, id, tag[8], jited, xlated, ..., name at 64.
    """
    raw = _info(fd, 224)
    return ProgInfo(
        id=struct.unpack_from("=I", raw, 4)[0],
        name=raw[64:80].split(b"\0")[0].decode(),
        verified_insns=struct.unpack_from("=I", raw, 216)[0],
    )


def test_run(attributes: bytes) -> bytes:
    """Runs a program without any interface (BPF_PROG_TEST_RUN); what the kernel makes of ``attributes``."""
    return _bpf(_TEST_RUN, attributes, 80)[1]


def link_info(fd: int) -> bytes:
    """struct bpf_link_info, as bytes: type, id, program id, padding, then for XDP the interface index."""
    return _info(fd, 32)
