"""What a receiver does with a packet, kernel-2 to kernel-14: trust it or drop it, always with a verdict in the ledger.

One nogil call per received buffer, which holds one packet or, after GRO, up to 64 of equal length. Pure but for the
tables it is given: no system calls, so tests feed it bytes. A reflected probe is turned round in place and left to the
caller to send.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.native import lock, unlock
from tailbound.datapath.ops import GO_ON, hear, serial, stamp_late, window
from tailbound.datapath.parse import checksum, read_header, read_u64, write_u64
from tailbound.datapath.rows import contribute, publish
from tailbound.datapath.tables import (
    CONTROL_HEAD,
    CONTROL_QUEUE,
    CONTROL_TAIL,
    CONTROLS_LOST,
    STATE_WORDS,
    control_at,
    head_at,
    i64_row,
    peer_at,
    peer_state_at,
    u8_row,
    u64_row,
)
from tailbound.wire.jit import Scalar, compiled
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import (
    HEADER_BYTES,
    ROW_STEP,
    UNKNOWN_SENDER,
    VERDICTS,
    VERSION,
    Flag,
    PacketType,
    Verdict,
)

_TYPE, _SENDER, _OWNER, _CHECK = (HEADER_DTYPE.fields[n][1] for n in ("type", "sender", "owner", "check"))  # type: ignore[index]
_CONTRIBUTION, _RESULT, _READY = int(PacketType.CONTRIBUTION), int(PacketType.RESULT), int(PacketType.READY)
_PROBE, _ECHO, _GROUP = int(PacketType.PROBE), int(PacketType.ECHO), int(PacketType.GROUP)
_LATE = int(Flag.LATE)
_FIRST_TYPE, _LAST_TYPE = int(min(PacketType)), int(max(PacketType))
_BAD_LENGTH, _BAD_VERSION, _BAD_TYPE = int(Verdict.BAD_LENGTH), int(Verdict.BAD_VERSION), int(Verdict.BAD_TYPE)
_INACTIVE, _WRONG_COOKIE, _CORRUPT = int(Verdict.INACTIVE), int(Verdict.WRONG_COOKIE), int(Verdict.CORRUPT)
_UNKNOWN_RANK, _WRONG_ADDRESS = int(Verdict.UNKNOWN_RANK), int(Verdict.WRONG_ADDRESS)
_NOT_FOR_THIS_RANK, _WRONG_MAP = int(Verdict.NOT_FOR_THIS_RANK), int(Verdict.WRONG_MAP)
_STALE_OP, _STALE_RESULT = int(Verdict.STALE_OP), int(Verdict.STALE_RESULT)
_SLOT_OUT_OF_RANGE, _BAD_SHIFT = int(Verdict.SLOT_OUT_OF_RANGE), int(Verdict.BAD_SHIFT)
_CONTROL_PASSED, _REFLECTED, _ECHO_TAKEN = int(Verdict.CONTROL_PASSED), int(Verdict.REFLECTED), int(Verdict.ECHO_TAKEN)

assert {int(t) for t in PacketType} == set(range(_FIRST_TYPE, _LAST_TYPE + 1))  # one comparison decides BAD_TYPE


@compiled
def _trust(t: Any, words: NDArray[np.uint64], source: Scalar) -> Scalar:
    """kernel-2 to kernel-9: ``GO_ON`` if the packet is whole and its sender is who it says, else why not."""
    h = head_at(t.head, 0)
    if words.shape[0] == HEADER_BYTES // 8 and h.type in (_CONTRIBUTION, _RESULT):
        return _BAD_LENGTH
    if h.version != VERSION:
        return _BAD_VERSION
    if h.type < _FIRST_TYPE or h.type > _LAST_TYPE:
        return _BAD_TYPE
    c = control_at(t.control, 0)
    if c.active == 0:
        return _INACTIVE
    if h.cookie != c.cookie:
        return _WRONG_COOKIE
    sender = np.int64(h.sender)
    if sender == c.rank or sender >= c.ranks or peer_at(t.peers, sender).address == 0:
        return _UNKNOWN_RANK
    if np.uint64(source) != np.uint64(peer_at(t.peers, sender).address):
        return _WRONG_ADDRESS
    return GO_ON if checksum(words) == h.check else _CORRUPT


@compiled
def _mark(t: Any, h: Any, now: Scalar) -> None:
    """kernel-12: the sender's latest marks; written only when one changes, so that quiet fields stay in cache."""
    p = peer_state_at(t.peer_states, np.int64(h.sender))
    fresh = p.cookie != h.cookie
    if not (
        fresh
        or serial(h.op, p.newest) > 0
        or serial(h.contributed, p.contributed) > 0
        or serial(h.published, p.published) > 0
        or serial(h.map_known, p.map_known) > 0
        or h.deadline != p.deadline
        or h.lateness != p.lateness
        or (h.incast != 0 and h.incast != p.incast)
    ):
        return
    if fresh or serial(h.op, p.newest) > 0:
        p.newest = h.op
    if fresh or serial(h.contributed, p.contributed) > 0:
        p.contributed = h.contributed
    if fresh or serial(h.published, p.published) > 0:
        p.published = h.published
    if fresh or serial(h.map_known, p.map_known) > 0:
        p.map_known = h.map_known
    p.deadline = h.deadline
    p.lateness = h.lateness
    if fresh or h.incast != 0:
        p.incast = h.incast
    p.last_ns = now
    p.cookie = h.cookie


@compiled
def _copy(to: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
    for i in range(data.shape[0]):
        to[i] = data[i]


@compiled
def _pass(t: Any, d: NDArray[np.uint8]) -> None:
    """Queues a control packet for Python; a full queue loses it, counted, as a full socket would."""
    s = i64_row(t.state, 0, STATE_WORDS)
    lock(t.queue_mutex)
    end = s[CONTROL_HEAD]
    if end - s[CONTROL_TAIL] >= CONTROL_QUEUE:
        s[CONTROLS_LOST] += 1
    else:
        _copy(u8_row(t.controls, end & (CONTROL_QUEUE - 1), HEADER_BYTES + t.width), d)
        i64_row(t.control_lengths, 0, CONTROL_QUEUE)[end & (CONTROL_QUEUE - 1)] = d.shape[0]
        s[CONTROL_HEAD] = end + 1
    unlock(t.queue_mutex)


@compiled
def _echo(t: Any, d: NDArray[np.uint8], words: NDArray[np.uint64], now: Scalar) -> Scalar:
    """A probe is turned round in place, an echo gives a round trip; both must name this rank as owner."""
    h = head_at(t.head, 0)
    rank = control_at(t.control, 0).rank
    if h.owner != rank:
        return _NOT_FOR_THIS_RANK
    if h.type == _PROBE:
        d[_TYPE] = _ECHO
        d[_OWNER] = h.sender
        d[_SENDER] = rank
        write_u64(d, _CHECK, checksum(words))
        return _REFLECTED
    if d.shape[0] < HEADER_BYTES + 8:
        return _BAD_LENGTH
    sent = read_u64(d, HEADER_BYTES)
    peer_state_at(t.peer_states, np.int64(h.sender)).rtt_ns = np.uint64(now) - sent
    return _ECHO_TAKEN


@compiled
def _take(t: Any, d: NDArray[np.uint8], words: NDArray[np.uint64], now: Scalar) -> Scalar:
    """kernel-10 to kernel-18 for a packet that may be trusted; returns its verdict."""
    h = head_at(t.head, 0)
    c = control_at(t.control, 0)
    if h.type == _PROBE or h.type == _ECHO:
        return _echo(t, d, words, now)
    to_all = h.type == _RESULT or (h.type == _GROUP and h.owner == h.sender and c.group != 0)
    if h.owner != (h.sender if to_all else c.rank):
        return _NOT_FOR_THIS_RANK
    data = h.type == _CONTRIBUTION or h.type == _RESULT
    if data:
        if h.row >= h.rows:
            return _SLOT_OUT_OF_RANGE
        if h.map_id != (c.map_id if serial(h.op, c.map_since) >= 0 else c.map_before):
            return _WRONG_MAP
        if h.type == _CONTRIBUTION and h.shift > c.shift_cap:
            return _BAD_SHIFT
    _mark(t, h, now)
    if data or h.type == _READY:
        verdict = window(t, h)
        if verdict != GO_ON:
            if (data or h.flags & _LATE) and verdict in (_STALE_OP, _STALE_RESULT):
                stamp_late(t, h, d.shape[0] - HEADER_BYTES if data else 0, now)
            return verdict
        verdict = hear(t, h, d.shape[0] - HEADER_BYTES, now)
        if verdict != GO_ON:
            return verdict
    payload = words[HEADER_BYTES // 8 :]
    if h.type == _CONTRIBUTION:
        return contribute(t, h, payload, now)
    if h.type == _RESULT:
        return publish(t, h, payload, now)
    _pass(t, d)
    return _CONTROL_PASSED


@compiled
def ingest_packet(t: Any, d: NDArray[np.uint8], words: NDArray[np.uint64], source: Scalar, now: Scalar) -> Scalar:
    """Takes in one packet and counts its verdict.

    Args:
        t: ``Tables.context[0]``; the mutex is held by the caller.
        d: u8[length], the UDP payload. A reflected probe leaves its echo here.
        words: the same memory as u64 where the length is a multiple of 8.
        source: IPv4 address of the sender as the maps hold it (network byte order).
        now: CLOCK_MONOTONIC, ns.

    Returns:
        The ``schema.Verdict``.
    """
    sender: Scalar = UNKNOWN_SENDER
    length = d.shape[0]
    if length < HEADER_BYTES or length % ROW_STEP or length - HEADER_BYTES > t.width:
        verdict = _BAD_LENGTH
    else:
        read_header(t, d)
        verdict = _trust(t, words, source)
        if verdict == GO_ON:
            sender = np.int64(head_at(t.head, 0).sender)
            verdict = _take(t, d, words, now)
    u64_row(t.ledger, sender, VERDICTS)[verdict] += np.uint64(1)
    return verdict


@compiled
def ingest(
    context: NDArray[Any],
    data: NDArray[np.uint8],
    length: Scalar,
    segment: Scalar,
    source: Scalar,
    now: Scalar,
    echoes: NDArray[np.int64],
) -> Scalar:
    """Takes in a received buffer: packets of ``segment`` bytes, the last perhaps shorter.

    Args:
        context: ``Tables.context``; the mutex is held by the caller.
        data: u8[size], size a multiple of 8, 8-byte aligned; ``length`` bytes of it were received.
        length: bytes.
        segment: GRO segment size in bytes; 0: the buffer is one packet.
        source: IPv4 address of the sender as the maps hold it (network byte order).
        now: CLOCK_MONOTONIC, ns.
        echoes: i64[n, 2], out: (offset, length) of reflected probes, at most n of them.

    Returns:
        Number of echoes left in ``data`` for the caller to send back.
    """
    t = context[0]
    spare = u64_row(t.scratch, 0, (HEADER_BYTES + t.width) // 8)
    all_words = data.view(np.uint64)
    step = segment if segment > 0 else max(length, 1)
    reflected = 0
    start = 0
    while True:
        size = min(step, length - start)
        packet = data[start : start + size]
        if start & 7 and size <= spare.shape[0] * 8:  # GRO of an odd size: only its last segment can be a packet
            aligned = spare.view(np.uint8)[:size]
            _copy(aligned, packet)
            verdict = ingest_packet(t, aligned, spare[: size >> 3], source, now)
            _copy(packet, aligned)
        else:
            verdict = ingest_packet(t, packet, all_words[start >> 3 : (start + size) >> 3], source, now)
        if verdict == _REFLECTED and reflected < echoes.shape[0]:
            echoes[reflected, 0] = start
            echoes[reflected, 1] = size
            reflected += 1
        start += step
        if start >= length:
            return reflected
