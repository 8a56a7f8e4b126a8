"""Runs of a BPF program on single packets, without any interface (BPF_PROG_TEST_RUN)."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from tailbound.kernel import syscalls


@dataclass(frozen=True)
class RunResult:
    """Outcome of a test run: the program's return value, the packet after it, mean duration in ns."""

    action: int
    data: bytes
    duration_ns: int


def run_xdp(program: int, data: bytes, repeat: int = 1, linear: int | None = None) -> RunResult:
    """Runs an XDP program on ``data`` (an Ethernet frame); the kernel pins it to this CPU.

    Args:
        linear: bytes of the linear part (Linux 6.18 and later); None: as much of the frame as a page takes.
    """
    return run(program, data, repeat, b"" if linear is None else struct.pack("=6I", 0, linear, 0, 0, 0, 0))


def run(program: int, data: bytes, repeat: int, context: bytes) -> RunResult:
    """Runs a program of any kind; ``context`` is its own struct, or nothing."""
    packet = ctypes.create_string_buffer(data, len(data))
    out = ctypes.create_string_buffer(len(data) + 256)
    block = ctypes.create_string_buffer(context, len(context))
    addresses = ctypes.addressof(packet), ctypes.addressof(out)
    asked = struct.pack("=IIIIQQII", program, 0, len(data), len(out), *addresses, repeat, 0)
    if context:
        asked += struct.pack("=IIQQ", len(context), 0, ctypes.addressof(block), 0)
    _, action, _, size, _, _, _, duration = struct.unpack_from("=IIIIQQII", syscalls.test_run(asked))
    return RunResult(action, out.raw[:size], duration)
