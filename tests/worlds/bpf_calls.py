"""Calls of bpf(2) that the product does not need."""

from __future__ import annotations

import ctypes
import struct

from tailbound.kernel import syscalls
from tailbound_lab.bench.program_run import RunResult, run

_MAP_LOOKUP = 1


def map_lookup(fd: int, key: bytes, value_size: int) -> bytes:
    """Reads one element."""
    k, v = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value_size)
    syscalls._bpf(_MAP_LOOKUP, struct.pack("=I4xQQQ", fd, ctypes.addressof(k), ctypes.addressof(v), 0))
    return v.raw


def run_tc(program: int, data: bytes, *, gso_size: int = 0, gso_segs: int = 0) -> RunResult:
    """Runs a tc program on ``data`` (an Ethernet frame) as if it left by this network namespace's loopback."""
    # struct __sk_buff: gso_segs at 164, gso_size at 176
    return run(program, data, 1, struct.pack("=164xI8xI12x", gso_segs, gso_size))
