"""The memory of a udp datapath, filled by the C library (``core``) with the kernel programs' own rules."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import Core, core
from tailbound.wire import schema

#: Words of the state (``struct tb_state``). An event that does not fit its queue is a hint lost; packets are counted.
EVENT_HEAD, EVENT_TAIL, CONTROL_HEAD, CONTROL_TAIL, EVENTS_LOST, CONTROLS_LOST, STOP, KERNEL_DROPS = range(8)
#: A map as the library knows it (``struct tb_map``).
_MAP = np.dtype([("values", "=u8"), ("entries", "=u8"), ("bytes", "=u8")])
_EVENT = np.dtype([("kind", "=u4"), ("op", "=u4"), ("ns", "=u8")])


class Tables:
    """Arrays of ``protocol.allocate``, and queues of events and control packets.

    No method drops the GIL: none of them waits for more than the buffer that the receiver has in hand, and the receiver
    never waits for the GIL. ``library``: another one than ``core.core``.

    Raises:
        CapabilityError: see ``core.core``.
        MemoryError: there is none.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], library: Core | None = None) -> None:
        result_rows, width = arrays["results"].shape
        self.arrays = dict(arrays)
        self.state = np.zeros(8, np.int64)
        self._packet_bytes = schema.HEADER_BYTES + width
        self._core = library or core()
        maps = np.array([_described(arrays[m.name], m) for m in schema.WORKER_MAPS], _MAP)
        #: what functions of the library take; valid as long as this object is
        self.address: int = self._core.fast.tb_open(maps.ctypes.data, width, result_rows, self.state.ctypes.data)
        if not self.address:
            raise MemoryError("no memory for queues of control packets")
        # not at exit, when the receiver may still be at work
        weakref.finalize(self, self._core.fast.tb_close, self.address).atexit = False

    def take_in(
        self, data: int, length: int, segment: int, source: int, now: int, marked: bool, echoes: int, room: int
    ) -> int:
        """Takes in a received buffer: packets of ``segment`` bytes, the last perhaps shorter.

        Args:
            data: address of a buffer, aligned to 8 bytes, which probes are turned round in.
            length: bytes received.
            segment: GRO segment size in bytes; 0: the buffer is one packet.
            source: address of u32[4], the sender's IP address in network byte order; one of IPv4 is the last of them,
                behind 0.
            now: CLOCK_MONOTONIC, ns.
            marked: whether it came with CE, all packets alike: GRO joins none that differ in that.
            echoes: address of u32[room, 2], out: (offset, length) of reflected probes.
            room: rows of ``echoes``.

        Returns:
            Number of echoes, for the caller to send back.
        """
        return self._core.fast.tb_take_in(  # type: ignore[no-any-return]
            self.address, data, length, segment, source, now, marked, echoes, room
        )

    def receive(self, fd: int, wake: int, events: int, controls: int) -> None:
        """Receives from a socket until ``state[STOP]`` is set and ``wake`` is readable; drops the GIL meanwhile.

        Args:
            fd: the bound socket.
            wake: an eventfd that ends the wait.
            events: an eventfd that is written when events were queued.
            controls: the same for control packets.

        Raises:
            MemoryError: there is none for buffers.
        """
        if self._core.waits.tb_udp(self.address, fd, wake, events, controls):
            raise MemoryError("no memory for received datagrams")

    def seal(self, op: int, seq: int, rows: int) -> None:
        """Seals ``rows`` slots from row sequence ``seq`` up to ``op``; when it returns, nobody is adding."""
        self._core.fast.tb_seal(self.address, int(op), int(seq), int(rows))

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        """``key`` (``wire.tag``) is in force from now on, in the place of the one two epochs before."""
        self._core.fast.tb_put_key(self.address, epoch, key.ctypes.data, len(key))

    def fence(self) -> None:
        """Waits for the buffer in hand."""
        self._core.fast.tb_fence(self.address)

    def take_events(self) -> list[tuple[int, int, int]]:
        """Queued events (kind, op, ns), oldest first; the queue is empty afterwards."""
        queued = int(self.state[EVENT_HEAD] - self.state[EVENT_TAIL])
        if not queued:
            return []
        out = np.empty(queued, _EVENT)
        count = self._core.fast.tb_take_events(self.address, out.ctypes.data, queued)
        return out[:count].tolist()  # type: ignore[no-any-return]

    def take_controls(self) -> list[bytes]:
        """Queued control packets, oldest first; the queue is empty afterwards."""
        queued = int(self.state[CONTROL_HEAD] - self.state[CONTROL_TAIL])
        if not queued:
            return []
        out, lengths = np.empty((queued, self._packet_bytes), np.uint8), np.empty(queued, np.uint32)
        count = self._core.fast.tb_take_controls(self.address, out.ctypes.data, lengths.ctypes.data, queued)
        return [packet[:length].tobytes() for packet, length in zip(out[:count], lengths.tolist(), strict=False)]


def _described(array: NDArray[Any], map_: schema.Map) -> tuple[int, int, int]:
    """Address, entries and bytes of an entry; a map's columns are those of its values."""
    entries = array.size // (array.shape[-1] if map_.width else 1)
    return array.ctypes.data, entries, array.nbytes // entries
