"""The schema as numpy dtypes: packet headers in network byte order, kernel structs in host byte order."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import numpy as np

from tailbound.wire.schema import HEADER, HEADER_BYTES, RECORDS, STRUCTS, Map, Product, Struct

#: Size in bytes, numpy code and ``struct`` letter of every field kind. ``lock``: the kernel's ``struct bpf_spin_lock``.
KINDS: dict[str, tuple[int, str, str]] = {
    "u8": (1, "u1", "B"),
    "u16": (2, "u2", "H"),
    "u32": (4, "u4", "I"),
    "u64": (8, "u8", "Q"),
    "s16": (2, "i2", "h"),
    "s32": (4, "i4", "i"),
    "s64": (8, "i8", "q"),
    "f32": (4, "f4", "f"),
    "f64": (8, "f8", "d"),
    "lock": (4, "u4", "I"),
}


_CTYPES = {
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "s16": "int16", "s32": "int32", "s64": "int64",
    "f32": "float", "f64": "double",
}  # fmt: skip


def dtype_of(of: Struct, order: str = "=") -> np.dtype[Any]:
    """The numpy dtype of ``of`` in byte order ``order`` (``=`` host, ``>`` network); no padding anywhere.

    Raises:
        ValueError: a field is not naturally aligned, so that C would pad it.
    """
    fields: list[tuple[str, str] | tuple[str, str, int]] = []
    offset = 0
    for field in of.fields:
        size, code, _ = KINDS[field.kind]
        if offset % size:
            raise ValueError(f"{of.name}.{field.name} at {offset} is not aligned to {size}")
        offset += size * field.count
        fields.append((field.name, order + code, field.count) if field.count > 1 else (field.name, order + code))
    if offset % max(KINDS[f.kind][0] for f in of.fields):
        raise ValueError(f"{of.name} has {offset} bytes, which C would pad")
    return np.dtype(fields)


def packer_of(of: Struct) -> struct.Struct:
    """Packs and unpacks ``of``, whose arrays are given entry by entry."""
    return struct.Struct("=" + "".join(KINDS[field.kind][2] * field.count for field in of.fields))


def record_of(of: Struct, base: type[ctypes.Structure] = ctypes.Structure) -> Any:
    """A ctypes structure of ``of``: its fields are read and written ten times as fast as those of a numpy record."""
    kinds = {code: getattr(ctypes, f"c_{name}") for code, name in _CTYPES.items()}
    fields = [(f.name, kinds[f.kind] * f.count if f.count > 1 else kinds[f.kind]) for f in of.fields]
    return type(of.name, (base,), {"_fields_": fields})


def layout(map_: Map, **sizes: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of a map's array: ``[entries]`` of a struct, or u8 ``[entries, bytes]``.

    Raises:
        KeyError: ``sizes`` lacks a number that the map needs.
    """

    def number(product: Product) -> int:
        return math.prod(sizes[factor] if isinstance(factor, str) else factor for factor in product)

    if map_.width:
        return np.dtype(np.uint8), (number(map_.entries), number(map_.width))
    return DTYPES[map_.value], (number(map_.entries),)


#: Header of a packet, big endian, 64 bytes.
HEADER_DTYPE = dtype_of(HEADER, ">")
#: Structs of the kernel and of the library by C name, host byte order.
DTYPES: dict[str, np.dtype[Any]] = {s.name: dtype_of(s) for s in (*STRUCTS, *RECORDS)}

assert HEADER_DTYPE.itemsize == HEADER_BYTES


def offset_of(name: str) -> int:
    """Where a field of the header begins."""
    return int(HEADER_DTYPE.fields[name][1])  # type: ignore[index]
