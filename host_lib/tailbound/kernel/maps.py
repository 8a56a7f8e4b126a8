"""Maps made by this control plane, seen as numpy arrays.

Programs refer to maps by number (``kernel.objects``), so that the maps outlive, and are made before, any program.
Maps that only the program writes are frozen at creation and mapped read-only: the trainer cannot spoil its own sums.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import CapabilityError
from tailbound.kernel import btf, syscalls
from tailbound.wire import schema
from tailbound.wire.schema import Map

#: Name of the event ring, the one map that is not an array.
EVENTS = "events"
#: Dtype and shape of a map's array: ``[entries]`` of a struct, or u8 ``[entries, bytes]``.
Shape = tuple[np.dtype[Any], tuple[int, ...]]

_STRUCTS = {s.name: s for s in schema.STRUCTS}


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
    _memory: list[mmap.mmap] = field(default_factory=list)

    def map_array(self, map_: Map, shape: Shape) -> None:
        """Maps an array into memory: read-only where the program is the only writer."""
        dtype, dims = shape
        size = -(-dims[0] * _value_bytes(shape) // mmap.PAGESIZE) * mmap.PAGESIZE
        protection = mmap.PROT_READ if map_.writer == "program" else mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(self.fds[map_.name], size, mmap.MAP_SHARED, protection)
        self._memory.append(memory)
        self.arrays[map_.name] = np.frombuffer(memory, dtype, int(np.prod(dims))).reshape(dims)

    def close(self) -> None:
        """Closes the descriptors. The memory is unmapped when the last array that refers to it is gone."""
        self.arrays.clear()
        for memory in self._memory:
            # Where somebody still holds an array, that keeps the memory, and the memory the map.
            with contextlib.suppress(BufferError):
                memory.close()
        self._memory.clear()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


def _create(map_: Map, shape: Shape, node: int) -> int:
    size, entries = _value_bytes(shape), shape[1][0]
    if _has_lock(map_):
        names = [f.name for f in _STRUCTS[map_.value].fields]
        blob = syscalls.btf_load(btf.lock_btf(map_.value, *names))
        try:
            types = (blob, btf.KEY_TYPE, btf.VALUE_TYPE) if size == 8 else None
            if types is None:
                raise ValueError(f"map {map_.name}: a value with a lock has 8 bytes, not {size}")
            return syscalls.map_create(
                syscalls.MAP_TYPE_ARRAY, 4, size, entries, name=f"tb_{map_.name}", btf=types, node=node
            )
        finally:
            os.close(blob)
    flags = syscalls.F_MMAPABLE if map_.mmap else 0
    fd = syscalls.map_create(syscalls.MAP_TYPE_ARRAY, 4, size, entries, name=f"tb_{map_.name}", flags=flags, node=node)
    if map_.mmap and map_.writer == "program":
        syscalls.map_freeze(fd)
    return fd


def create(maps: Iterable[Map], shapes: Mapping[str, Shape], *, events: bool, node: int = -1) -> Maps:
    """Creates maps, zeroed, of the given shapes, on NUMA node ``node`` (-1: any), and the event ring where asked for.

    Raises:
        CapabilityError: the kernel refuses; the message says which map and why.
    """
    made = Maps()
    try:
        for map_ in maps:
            try:
                made.fds[map_.name] = _create(map_, shapes[map_.name], node)
            except OSError as error:
                raise CapabilityError(_refused(f"map {map_.name}", error)) from error
            if map_.mmap:
                made.map_array(map_, shapes[map_.name])
        if events:
            try:
                made.fds[EVENTS] = syscalls.map_create(
                    syscalls.MAP_TYPE_RINGBUF, 0, 0, schema.EVENT_RING_BYTES, name="tb_events"
                )
            except OSError as error:
                raise CapabilityError(_refused("the event ring", error)) from error
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
