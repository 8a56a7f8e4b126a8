"""The receiving loop of the udp datapath: one nogil call for the life of the socket.

Python would have to take the GIL back after every system call, and while a training loop holds it for its 5 ms a
receive buffer of 208 KiB overflows. So waiting, receiving, ingest and waking Python all happen here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailbound.datapath.ingest import ingest
from tailbound.datapath.native import clock_gettime, lock, poll, recvmmsg, sendto, unlock, write
from tailbound.datapath.tables import (
    CALLS,
    CONTROL_HEAD,
    EVENT_HEAD,
    KERNEL_DROPS,
    RECEIVED,
    STATE_WORDS,
    STOP,
    i64_row,
)
from tailbound.wire.jit import Scalar, cached, compiled

#: Buffers of one ``recvmmsg``; each holds the largest GRO super-packet.
BATCH = 8
BUFFER_BYTES = 65536
#: ``<linux/udp.h>``, ``<asm-generic/socket.h>``
UDP_GRO, SO_RXQ_OVFL = 104, 40
_GRO = np.uint64(17 | UDP_GRO << 32)  # cmsg level (SOL_UDP) and type as one word
_OVERFLOW = np.uint64(1 | SO_RXQ_OVFL << 32)  # SOL_SOCKET
_MSG_DONTWAIT = 0x40
_POLLIN = 1
_CLOCK_MONOTONIC = 1
_ADDRESS_BYTES, _CONTROL_BYTES = 16, 128
_LOW = np.uint64(0xFFFFFFFF)


@compiled
def _wake(fd: int, one: NDArray[np.uint64]) -> None:
    write(fd, one.ctypes.data, np.uint64(8))


@compiled
def _options(s: NDArray[np.int64], control: NDArray[np.uint64], length: Scalar) -> Scalar:
    """Reads the control messages of one receive: notes kernel drops, returns the GRO segment size or 0."""
    segment: Scalar = 0
    at: Scalar = 0
    while at + 2 < length >> 3:
        size = np.int64(control[at])
        if size < 16:
            break
        if control[at + 1] == _GRO:
            segment = np.int64(control[at + 2] & _LOW)
        elif control[at + 1] == _OVERFLOW:
            s[KERNEL_DROPS] = np.int64(control[at + 2] & _LOW)
        at += (size + 7) >> 3
    return segment


@cached
@njit(nogil=True, cache=True, boundscheck=False)
def receive(
    context: NDArray[Any],
    fd: int,
    wake_fd: int,
    event_fd: int,
    control_fd: int,
    messages: NDArray[np.uint64],
    names: NDArray[np.uint64],
    controls: NDArray[np.uint64],
    buffers: NDArray[np.uint8],
) -> None:
    """Receives and takes in packets until ``state[STOP]`` is set and ``wake_fd`` becomes readable.

    Args:
        context: ``Tables.context``.
        fd: bound UDP socket.
        wake_fd: eventfd that ends the wait.
        event_fd: eventfd to write when events were queued.
        control_fd: eventfd to write when control packets were queued.
        messages: memory for ``recvmmsg``, with the three below from ``native.messages``.
        names: source addresses.
        controls: control messages.
        buffers: u8[batch, bytes].
    """
    t = context[0]
    s = i64_row(t.state, 0, STATE_WORDS)
    batch = messages.shape[0]
    waits = np.zeros((2, 2), np.int32)  # struct pollfd: fd, events | revents << 16
    clock = np.zeros(2, np.int64)
    echoes = np.zeros((64, 2), np.int64)
    one = np.ones(1, np.uint64)
    while s[STOP] == 0:
        for i in range(batch):
            messages[i, 1] = np.uint64(_ADDRESS_BYTES)
            messages[i, 5] = np.uint64(_CONTROL_BYTES)
        n = recvmmsg(fd, messages.ctypes.data, np.uint32(batch), _MSG_DONTWAIT, np.uintp(0))
        s[CALLS] += 1
        if n <= 0:
            waits[0, 0], waits[0, 1] = fd, _POLLIN
            waits[1, 0], waits[1, 1] = wake_fd, _POLLIN
            poll(waits.ctypes.data, np.uint64(2), -1)
            continue
        events, passed = s[EVENT_HEAD], s[CONTROL_HEAD]
        for i in range(n):
            clock_gettime(_CLOCK_MONOTONIC, clock.ctypes.data)
            now = clock[0] * 1_000_000_000 + clock[1]
            length = np.int64(messages[i, 7] & _LOW)
            source = np.int64(names[i, 0] >> np.uint64(32))  # the address alone: peers use several ports
            lock(t.mutex)
            segment = _options(s, controls[i], np.int64(messages[i, 5]))
            s[RECEIVED] += 1
            reflected = ingest(context, buffers[i], length, segment, source, now, echoes)
            unlock(t.mutex)
            for k in range(reflected):
                at = buffers[i].ctypes.data + echoes[k, 0]
                sendto(fd, at, np.uint64(echoes[k, 1]), _MSG_DONTWAIT, names[i].ctypes.data, np.uint32(_ADDRESS_BYTES))
        if s[EVENT_HEAD] != events:
            _wake(event_fd, one)
        if s[CONTROL_HEAD] != passed:
            _wake(control_fd, one)
