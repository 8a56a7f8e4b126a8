"""A stranger beside a worker sends it packets: live frames of BPF_PROG_TEST_RUN, redirected to its port.

No socket, no bridge and no buffer of the stack is in their way, so that a share of a core makes a flood. They come to
the worker's XDP program as frames of any other worker do, on the processor that sent them, within the sender's call.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.communicator import Communicator
from tailbound.kernel import ethtool, syscalls
from tailbound.kernel.net import index_of
from tailbound.wire.schema import PacketType
from tailbound_lab.bench.frames import frame
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

#: Seconds between two bursts of a flood.
TICK = 0.02
#: Threads that take turns: a call ends with a wait of the kernel's for 10 ms and more, in which others send.
_LANES = 8
#: The helper bpf_redirect.
_REDIRECT = 23
#: Flag of a test run whose frames go where the program sends them.
_LIVE_FRAMES = 1 << 1


def _instruction(code: int, register: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, register, 0, value)


_EXIT = _instruction(0x95)
_GSTATS, _SS_STATS = 0x1D, 1


def _statistics(interface: str) -> dict[str, int]:
    """The driver's counters (``ethtool -S``)."""
    count = ethtool._strings(interface, _SS_STATS)
    values = ethtool._ask(interface, struct.pack("=2I", _GSTATS, count) + bytes(count * 8))
    names = ethtool._names(interface, _SS_STATS, count)
    return dict(zip(names, struct.unpack_from(f"={count}Q", values, 8), strict=True))


def show_rows(ours: Communicator, file: Path) -> None:
    """Leave the first row of every op for rank 0 in ``file``, u8[stride], as a stranger has it who sees all."""
    queue, shown = ours.job.flow.queue, np.memmap(file, np.uint8, "r+")
    submit = queue.submit

    def seen(label: int, kind: PacketType, runs: Any, *rest: Any, **named: Any) -> Any:
        if kind is PacketType.CONTRIBUTION:
            for rank, packets in runs:
                if rank == 0 and len(packets):
                    shown[: packets.shape[1]] = packets[0]
        return submit(label, kind, runs, *rest, **named)

    queue.submit = seen  # type: ignore[method-assign]


def forged(seen: NDArray[np.uint8], lab: Cluster, at: int = -1, bit: int = 0) -> bytes:
    """The row ``seen``, u8[header and codes], as a frame from worker 1 to 0, with one ``bit`` of byte ``at`` turned."""
    data = bytearray(seen.tobytes())
    data[at] ^= 1 << bit
    return frame(bytes(data), lab.workers[1].address, lab.workers[0].address, lab.spec.port, lab.spec.port)


def _run_live(program: int, data: bytes, repeat: int, batch: int = 64) -> int:
    """Runs an XDP program on ``repeat`` frames that begin as ``data`` and go where the program sends them.

    Redirects happen from the present network namespace. A frame comes again as the program has left it, without the
    changes made to copies.

    Returns:
        Mean duration in ns, with what the kernel did to frames until they were dropped or delivered.
    """
    packet = ctypes.create_string_buffer(data, len(data))
    attr = struct.pack("=IIIIQQII", program, 0, len(data), 0, syscalls._address(packet), 0, repeat, 0)
    attr += struct.pack("=IIQQIII", 0, 0, 0, 0, _LIVE_FRAMES, 0, batch)
    _, back = syscalls._bpf(syscalls._TEST_RUN, attr, 80)
    return int(struct.unpack_from("=I", back, 36)[0])


class Stranger:
    """Sends to one worker of a lab, over its data link; a context manager.

    Args:
        lab: built, without cables.
        rank: the worker; a native XDP program has to be on its data interface.

    Raises:
        OSError: the kernel refuses the program.
    """

    def __init__(self, lab: Cluster, rank: int) -> None:
        self._switch, self._port = lab.topology.switch, Link.DATA.port(rank)
        index = namespaces.call(self._switch, index_of, self._port)
        go = _instruction(0xB7, 1, index) + _instruction(0xB7, 2, 0) + _instruction(0x85, 0, _REDIRECT) + _EXIT
        self._program = syscalls.prog_load(go, name="tb_stranger")

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._program)

    def send(self, frame: bytes, count: int) -> None:
        """Sends ``frame`` (Ethernet and all that follows) so many times, at once."""
        namespaces.call(self._switch, _run_live, self._program, frame, count)

    def counts(self) -> tuple[int, int]:
        """Frames that came into the worker's ring so far, and those for which it had no room."""
        found = namespaces.call(self._switch, _statistics, self._port)
        return tuple(  # type: ignore[return-value]
            sum(n for name, n in found.items() if name.startswith("tx_queue_") and name.endswith(end))
            for end in ("_xdp_xmit", "_xdp_xmit_errors")
        )

    def flood(self, rate: float, frame: Callable[[], bytes], stop: threading.Event) -> tuple[int, float, float]:
        """Sends ``rate`` packets a second, or as many as it can, until it is told to stop.

        Args:
            rate: packets a second; they leave in bursts, one a ``TICK``.
            frame: what the next burst is made of.
            stop: ends it.

        Returns:
            Packets that were sent, seconds that took, and processor time of the threads that sent, in seconds, with
            what the receiving side did within their calls.
        """
        return namespaces.call(self._switch, self._flood, rate, frame, stop)

    def _flood(self, rate: float, frame: Callable[[], bytes], stop: threading.Event) -> tuple[int, float, float]:
        begin, lock = time.monotonic(), threading.Lock()
        due = begin

        def take_turns() -> tuple[int, float]:
            nonlocal due
            cpu, sent, count = time.thread_time(), 0, max(1, round(rate * TICK))
            while True:
                with lock:
                    mine = due
                    # packets that no thread was free to send in time are not made up for
                    due = max(due + TICK, time.monotonic() - TICK)
                if stop.wait(max(0.0, mine - time.monotonic())):
                    return sent, time.thread_time() - cpu
                _run_live(self._program, frame(), count)
                sent += count

        if not rate:
            stop.wait()
            return 0, time.monotonic() - begin, 0.0
        with ThreadPoolExecutor(_LANES) as threads:  # in this thread's namespace
            lanes = [threads.submit(take_turns) for _ in range(_LANES)]
            found = [lane.result() for lane in lanes]
        return sum(sent for sent, _ in found), time.monotonic() - begin, sum(cpu for _, cpu in found)
