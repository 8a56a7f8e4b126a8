"""The BTF a map needs when its values hold a ``struct bpf_spin_lock``: three types, written by hand.

Format: Documentation/bpf/btf.rst of the kernel.
"""

from __future__ import annotations

import struct

_INT, _STRUCT = 1, 4
#: Type ids in the blob: u32 (also the key), struct bpf_spin_lock, the value.
KEY_TYPE, VALUE_TYPE = 1, 3


def lock_btf(struct_name: str, lock: str, other: str) -> bytes:
    """A blob for a value of 8 bytes: ``struct bpf_spin_lock lock; __u32 other;``."""
    strings = bytearray(b"\0")

    def text(name: str) -> int:
        offset = len(strings)
        strings.extend(name.encode() + b"\0")
        return offset

    def type_(name: str, kind: int, members: int, size: int) -> bytes:
        return struct.pack("=III", text(name), kind << 24 | members, size)

    types = type_("unsigned int", _INT, 0, 4) + struct.pack("=I", 32)
    types += type_("bpf_spin_lock", _STRUCT, 1, 4) + struct.pack("=III", text("val"), 1, 0)
    types += type_(struct_name, _STRUCT, 2, 8)
    types += struct.pack("=III", text(lock), 2, 0) + struct.pack("=III", text(other), 1, 32)
    head = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return head + types + bytes(strings)
