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
from tailbound.wire.check import final
from tailbound.wire.jit import Scalar, compiled
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import (
    HEADER_BYTES,
    KEY_WORDS,
    ROW_STEP,
    UNKNOWN_SENDER,
    VERDICTS,
    VERSION,
    Flag,
    PacketType,
    Tagging,
    Verdict,
)
from tailbound.wire.tag import EPOCH_BIT, hashed, tag_of

_TYPE, _SENDER, _OWNER, _SEQ, _CHECK = (HEADER_DTYPE.fields[n][1] for n in ("type", "sender", "owner", "seq", "check"))  # type: ignore[index]
_LATE, _HALVES = int(Flag.LATE), int(Flag.HALVES)
_BARE, _BARE_BEFORE, _OF_SWITCH = int(Tagging.BARE), int(Tagging.BARE_BEFORE), int(Flag.SWITCHED | Flag.SUMS)
_FIRST_TYPE, _LAST_TYPE = int(min(PacketType)), int(max(PacketType))
assert {int(t) for t in PacketType} == set(range(_FIRST_TYPE, _LAST_TYPE + 1))  # one comparison decides BAD_TYPE


def _order() -> NDArray[np.uint8]:
    """Where each byte of a header in host byte order stands in the packet: every field turned round."""
    order = np.arange(HEADER_BYTES, dtype=np.uint8)
    for dtype, offset in (field[:2] for field in HEADER_DTYPE.fields.values()):  # type: ignore[union-attr]
        order[offset : offset + dtype.itemsize] = order[offset : offset + dtype.itemsize][::-1].copy()
    return order


_ORDER = _order()


@compiled
def _read_header(t: Any, packet: NDArray[np.uint8]) -> None:
    """Header of ``packet`` (u8[>= 64]) to ``t.head``, in host byte order."""
    out = u8_row(t.head, 0, HEADER_BYTES)
    for i in range(HEADER_BYTES):
        out[i] = packet[_ORDER[i]]


@compiled
def _checksum(words: NDArray[np.uint64]) -> Scalar:
    """The check that a packet ought to carry, without the allocation of ``wire.check.check_packet``.

    Unsigned indices: with signed ones numba asks for every word whether its index is negative, and takes twice as long.
    """
    a0, b0, a1, b1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    i = np.uint64(HEADER_BYTES // 8)
    end = np.uint64(words.shape[0])
    while i < end:
        a0 += words[i]
        b0 += a0
        a1 += words[i + np.uint64(1)]
        b1 += a1
        i += np.uint64(2)
    return final(words[: HEADER_BYTES // 8], (a0, b0, a1, b1))  # type: ignore[arg-type]


@compiled
def _tag(t: Any, words: NDArray[np.uint64]) -> Scalar:
    """The tag that a packet ought to carry, by the key of its epoch."""
    key = u64_row(t.keys, (np.int64(words[0]) & EPOCH_BIT) != 0, t.key_words)
    total = hashed(words[HEADER_BYTES // 8 :], key, np.uint64(KEY_WORDS))
    return tag_of(words[: HEADER_BYTES // 8], total, np.uint64(8 * words.shape[0] - HEADER_BYTES), key)


@compiled
def _turned(word: Scalar) -> Scalar:
    """A u64 from network byte order to the host's, or back."""
    out = np.uint64(0)
    for i in range(8):
        out |= ((np.uint64(word) >> np.uint64(8 * i)) & np.uint64(255)) << np.uint64(56 - 8 * i)
    return out


@compiled
def _bare(h: Any, c: Any) -> bool:
    """auth-7: whether a packet is a switch's, and carries a check although the job has a key."""
    if c.tagged & (_BARE | _BARE_BEFORE) == 0 or np.int64(h.sender) + 1 != c.ranks:
        return False
    if h.type == PacketType.ECHO:
        return True
    if h.type != PacketType.RESULT or h.flags & _OF_SWITCH == 0:
        return False
    bit = _BARE if serial(h.op, c.map_since) >= 0 else _BARE_BEFORE
    return bool(c.tagged & bit)


@compiled
def _trust(t: Any, words: NDArray[np.uint64], source: NDArray[np.uint32]) -> Scalar:
    """kernel-2 to kernel-9: ``GO_ON`` if the packet is whole and its sender is who it says, else why not."""
    h = head_at(t.head, 0)
    if words.shape[0] == HEADER_BYTES // 8 and (h.type == PacketType.CONTRIBUTION or h.type == PacketType.RESULT):
        return Verdict.BAD_LENGTH
    if h.version != VERSION:
        return Verdict.BAD_VERSION
    if h.type < _FIRST_TYPE or h.type > _LAST_TYPE:
        return Verdict.BAD_TYPE
    c = control_at(t.control, 0)
    if c.active == 0:
        return Verdict.INACTIVE
    if h.cookie != c.cookie:
        return Verdict.WRONG_COOKIE
    sender = np.int64(h.sender)
    peer = peer_at(t.peers, sender)
    if sender == c.rank or sender >= c.ranks or (peer.address == 0 and peer.prefix[0] == 0):
        return Verdict.UNKNOWN_RANK
    if source[3] != peer.address:
        return Verdict.WRONG_ADDRESS
    for i in range(3):
        if source[i] != peer.prefix[i]:
            return Verdict.WRONG_ADDRESS
    if c.tagged != 0 and not _bare(h, c):
        return GO_ON if _tag(t, words) == h.check else Verdict.FORGED
    return GO_ON if _checksum(words) == h.check else Verdict.CORRUPT


@compiled
def _mark(t: Any, h: Any, now: Scalar) -> None:
    """kernel-12: the sender's latest marks; written only when one changes, so that quiet fields stay in cache."""
    p = peer_state_at(t.peer_states, np.int64(h.sender))
    fresh = p.cookie != h.cookie
    newest = fresh or serial(h.op, p.newest) > 0
    contributed = fresh or serial(h.contributed, p.contributed) > 0
    published = fresh or serial(h.published, p.published) > 0
    map_known = fresh or serial(h.map_known, p.map_known) > 0
    incast = h.incast != p.incast and (fresh or h.incast != 0)
    rises = newest or contributed or published or map_known
    # nothing rises in a recorded packet; without a key nothing is said against one that was overtaken
    aged = control_at(t.control, 0).tagged != 0 and not fresh and (not rises or serial(h.op, p.newest) < 0)
    incast = incast and not aged
    same = aged or (h.deadline == p.deadline and h.lateness == p.lateness)
    if same and not (rises or incast):
        return
    if newest:
        p.newest = h.op
    if contributed:
        p.contributed = h.contributed
    if published:
        p.published = h.published
    if map_known:
        p.map_known = h.map_known
    if incast:
        p.incast = h.incast
    if not aged:
        p.deadline = h.deadline
        p.lateness = h.lateness
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
        return Verdict.NOT_FOR_THIS_RANK
    if h.type == PacketType.PROBE:
        d[_TYPE] = PacketType.ECHO
        d[_OWNER] = h.sender
        d[_SENDER] = rank
        marked = peer_state_at(t.peer_states, np.int64(h.sender)).marked
        for i in range(4):
            d[_SEQ + i] = (marked >> (24 - 8 * i)) & 0xFF
        words[_CHECK // 8] = _turned(_tag(t, words) if control_at(t.control, 0).tagged != 0 else _checksum(words))
        return Verdict.REFLECTED
    if d.shape[0] < HEADER_BYTES + 8:
        return Verdict.BAD_LENGTH
    sent = _turned(words[HEADER_BYTES // 8])
    p = peer_state_at(t.peer_states, np.int64(h.sender))
    if p.echoed < sent <= np.uint64(now):  # else it is of a probe given up, or recorded
        p.echoed = sent
        p.told = h.seq  # before the round trip, which says that there is something new
        p.rtt_ns = np.uint64(now) - sent
    return Verdict.ECHO_TAKEN


@compiled
def _take(t: Any, d: NDArray[np.uint8], words: NDArray[np.uint64], now: Scalar) -> Scalar:
    """kernel-10 to kernel-18 for a packet that may be trusted; returns its verdict."""
    h = head_at(t.head, 0)
    c = control_at(t.control, 0)
    if h.type == PacketType.PROBE or h.type == PacketType.ECHO:
        return _echo(t, d, words, now)
    to_all = h.type == PacketType.RESULT or (h.type == PacketType.GROUP and h.owner == h.sender and c.group != 0)
    if h.owner != (h.sender if to_all else c.rank):
        return Verdict.NOT_FOR_THIS_RANK
    data = h.type == PacketType.CONTRIBUTION or h.type == PacketType.RESULT
    codes = d.shape[0] - HEADER_BYTES
    if h.flags & _HALVES:
        codes *= 2  # so that both kinds of rows of an op have as many
    if data:
        if codes > t.width:
            return Verdict.BAD_LENGTH
        if h.row >= h.rows:
            return Verdict.SLOT_OUT_OF_RANGE
        if h.map_id != (c.map_id if serial(h.op, c.map_since) >= 0 else c.map_before):
            return Verdict.WRONG_MAP
        if h.type == PacketType.CONTRIBUTION and h.shift > c.shift_cap:
            return Verdict.BAD_SHIFT
    _mark(t, h, now)
    if data or h.type == PacketType.READY:
        verdict = window(t, h)
        if verdict != GO_ON:
            if (data or h.flags & _LATE) and verdict in (Verdict.STALE_OP, Verdict.STALE_RESULT):
                stamp_late(t, h, codes if data else 0, now)
            return verdict
        verdict = hear(t, h, codes, now)
        if verdict != GO_ON:
            return verdict
    payload = words[HEADER_BYTES // 8 :]
    if h.type == PacketType.CONTRIBUTION:
        return contribute(t, h, payload, now)
    if h.type == PacketType.RESULT:
        return publish(t, h, payload, now)
    _pass(t, d)
    return Verdict.CONTROL_PASSED


@compiled
def _ingest_packet(
    t: Any, d: NDArray[np.uint8], words: NDArray[np.uint64], source: NDArray[np.uint32], now: Scalar, marked: Scalar
) -> Scalar:
    """Takes in one packet, ``d`` and ``words`` being the same memory, and counts its verdict, which it returns.

    Marks (kernel-26) are counted whatever becomes of the packet; echoes apart, which no rate of their rank slows.
    """
    sender: Scalar = UNKNOWN_SENDER
    length = d.shape[0]
    if length < HEADER_BYTES or length % ROW_STEP or length - HEADER_BYTES > t.width:
        verdict = Verdict.BAD_LENGTH
    else:
        _read_header(t, d)
        verdict = _trust(t, words, source)
        if verdict == GO_ON:
            sender = np.int64(head_at(t.head, 0).sender)
            verdict = _take(t, d, words, now)
            if marked and verdict != Verdict.ECHO_TAKEN:
                peer_state_at(t.peer_states, sender).marked += np.uint32(1)
    u64_row(t.ledger, sender, VERDICTS)[verdict] += np.uint64(1)
    return verdict


@compiled
def ingest(
    context: NDArray[Any],
    data: NDArray[np.uint8],
    length: Scalar,
    segment: Scalar,
    source: NDArray[np.uint32],
    now: Scalar,
    marked: Scalar,
    echoes: NDArray[np.int64],
) -> Scalar:
    """Takes in a received buffer: packets of ``segment`` bytes, the last perhaps shorter.

    Args:
        context: ``Tables.context``; the mutex is held by the caller.
        data: u8[size], size a multiple of 8, 8-byte aligned; ``length`` bytes of it were received.
        length: bytes.
        segment: GRO segment size in bytes; 0: the buffer is one packet.
        source: u32[4], address of the sender in network byte order; an IPv4 address is the last of them, behind 0.
        now: CLOCK_MONOTONIC, ns.
        marked: whether it came with CE, all packets alike: GRO joins none that differ in that.
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
            verdict = _ingest_packet(t, aligned, spare[: size >> 3], source, now, marked)
            _copy(packet, aligned)
        else:
            verdict = _ingest_packet(t, packet, all_words[start >> 3 : (start + size) >> 3], source, now, marked)
        if verdict == Verdict.REFLECTED and reflected < echoes.shape[0]:
            echoes[reflected, 0] = start
            echoes[reflected, 1] = size
            reflected += 1
        start += step
        if start >= length:
            return reflected
