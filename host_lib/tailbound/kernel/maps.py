"""Maps made by this control plane, seen as numpy arrays.

Programs refer to maps by number (``kernel.objects``), so that the maps outlive, and are made before, any program.
Maps that only the program writes are frozen at creation and mapped read-only: the trainer cannot spoil its own sums.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import CapabilityError
from tailbound.kernel import syscalls
from tailbound.wire import schema
from tailbound.wire.schema import KEY_EPOCHS, Map

#: Name of the event ring.
EVENTS = "events"
#: And that of what a worker's program hands packets of a job with a key over to.
PROGRAMS = "programs"
_INT, _STRUCT = 1, 4
#: Type ids in the BTF of a lock: u32 (also the key), struct bpf_spin_lock, the value.
_KEY_TYPE, _VALUE_TYPE = 1, 3
#: Dtype and shape of a map's array: ``[entries]`` of a struct, or u8 ``[entries, bytes]``.
Shape = tuple[np.dtype[Any], tuple[int, ...]]

_STRUCTS = {s.name: s for s in schema.STRUCTS}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def possible_cpus() -> int:
    """Highest possible CPU plus one, the kernel's nr_cpu_ids: rows of counters per CPU."""
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return int(re.split(r"[-,]", text.strip())[-1]) + 1


def _has_lock(map_: Map) -> bool:
    struct_ = _STRUCTS.get(map_.value)
    return struct_ is not None and any(f.kind == "lock" for f in struct_.fields)


def _value_bytes(shape: Shape) -> int:
    dtype, dims = shape
    return dtype.itemsize * (dims[1] if len(dims) > 1 else 1)


@dataclass
class Maps:
    """Descriptors by map name, and arrays of those that are mmapped. Closes both."""

    fds: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def map_array(self, map_: Map, shape: Shape) -> None:
        """Maps an array into memory: read-only where the program is the only writer."""
        dtype, dims = shape
        memory = _mapped(self.fds[map_.name], dims[0] * _value_bytes(shape), writable=map_.writer != "program")
        self.arrays[map_.name] = np.frombuffer(memory, dtype, int(np.prod(dims))).reshape(dims)

    def close(self, *others: int) -> None:
        """Closes the descriptors, and before them ``others``, but -1.

        The memory is unmapped when the last array that refers to it is gone.
        """
        self.arrays.clear()
        for fd in (*others, *self.fds.values()):
            if fd >= 0:
                os.close(fd)
        self.fds.clear()


def _mapped(fd: int, size: int, *, writable: bool) -> memoryview:
    """Memory of a map, unmapped when nobody refers to it any more.

    ``mmap.mmap`` keeps a descriptor of its own as long as the memory is there: a job whose arrays wait for the garbage
    collector would hold one for each of its maps, and many jobs in one process run out of them.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False  # threads may still run then
    view = memoryview(memory)
    return view if writable else view.toreadonly()


def _lock_btf() -> bytes:
    """The BTF of a value of 8 bytes, ``struct bpf_spin_lock lock; __u32 other;`` (Documentation/bpf/btf.rst)."""
    strings = b"\0u32\0bpf_spin_lock\0val\0locked\0lock\0other\0"

    def named(name: bytes, *numbers: int) -> bytes:
        at = strings.index(b"\0" + name + b"\0") + 1
        return struct.pack(f"={1 + len(numbers)}I", at, *numbers)

    types = named(b"u32", _INT << 24, 4, 32)
    types += named(b"bpf_spin_lock", _STRUCT << 24 | 1, 4) + named(b"val", 1, 0)
    types += named(b"locked", _STRUCT << 24 | 2, 8) + named(b"lock", 2, 0) + named(b"other", 1, 32)
    head = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return head + types + strings


def _create(map_: Map, shape: Shape, node: int) -> int:
    size, entries = _value_bytes(shape), shape[1][0]
    if _has_lock(map_):
        blob = syscalls.btf_load(_lock_btf())
        try:
            types = blob, _KEY_TYPE, _VALUE_TYPE  # of 8 bytes
            return syscalls.map_create(
                syscalls.MAP_TYPE_ARRAY, 4, size, entries, name=f"tb_{map_.name}", btf=types, node=node
            )
        finally:
            os.close(blob)
    flags = syscalls.F_MMAPABLE if map_.mmap else 0
    if map_.secret:
        flags |= syscalls.F_WRONLY | syscalls.F_RDONLY_PROG
    fd = syscalls.map_create(syscalls.MAP_TYPE_ARRAY, 4, size, entries, name=f"tb_{map_.name}", flags=flags, node=node)
    if map_.mmap and map_.writer == "program":
        syscalls.map_freeze(fd)
    return fd


def create(maps: Iterable[Map], shapes: Mapping[str, Shape], *, events: bool, node: int = -1) -> Maps:
    """Creates maps, zeroed, of the given shapes, on NUMA node ``node`` (-1: any), and where asked for the event ring,
    with the array of programs that belongs to it.

    Raises:
        CapabilityError: the kernel refuses; the message says which map and why.
    """
    made, name = Maps(), ""
    try:
        for map_ in maps:
            name = map_.name
            made.fds[name] = _create(map_, shapes[name], node)
            if map_.mmap:
                made.map_array(map_, shapes[name])
        if events:
            for name, kind, size, entries in (
                (EVENTS, syscalls.MAP_TYPE_RINGBUF, 0, schema.EVENT_RING_BYTES),
                (PROGRAMS, syscalls.MAP_TYPE_PROG_ARRAY, 4, 1),
            ):
                made.fds[name] = syscalls.map_create(kind, size, size, entries, name=f"tb_{name}")
    except OSError as error:
        made.close()
        raise CapabilityError(_refused(f"map {name}", error)) from error
    except BaseException:
        made.close()
        raise
    return made


def _refused(what: str, error: OSError) -> str:
    hint = {
        1: "run as root or with CAP_BPF and CAP_NET_ADMIN, or use the udp datapath",
        7: "make the rings smaller (ring_mib)",
        12: "make the rings smaller (ring_mib), or raise the memory limit of the control group",
    }.get(error.errno or 0, "see `tailbound doctor`, or use the udp datapath")
    return f"the kernel refused {what}: {error.strerror} (errno {error.errno}); {hint}"


def put_key(fd: int, epoch: int, key: NDArray[np.uint64]) -> None:
    """Puts ``key`` (``wire.tag``, for rows of the program's width) in the place of the one before (auth-2).

    Raises:
        OSError: the map takes no such key, or may not be written.
    """
    syscalls.map_update(fd, struct.pack("=I", epoch % KEY_EPOCHS), key.tobytes())
