"""What a receiver must do with a packet, case by case: one table for the kernel program and the udp datapath.

The world of a case: rank 0 of four, rings of 64 and 128 rows of up to 256 codes, the state below. A case changes some
of that state, has packets taken in before, and names the verdict and the ledger row of the packet it is about. Whoever
runs the table writes ``control`` and ``peers`` (``address_of``), feeds ``before`` and ``packet`` as UDP payloads from
``source`` and looks at the ledger.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import packed
from packed import proof_of
from reference_proof import check_packet
from tailbound.codec.scale import weights_of
from tailbound.wire import packets, schema
from tailbound.wire.schema import HEADER_BYTES, KEY_WORDS, UNKNOWN_SENDER, Flag, PacketType, Verdict, op_label
from tailbound.wire.tag import key_of

PORT = 45900
WIDTH, SUM_ROWS, RESULT_ROWS = 256, 64, 128
RANK, RANKS = 0, 4
COOKIE = 0x7A11B0DE
MAP_BEFORE, MAP_ID = 6, 7
FIRST_OP = op_label(1, 0)
OP = op_label(3, 1)  # the op that most cases are about
RELEASED = op_label(3, 0)  # the op before
MAP_SINCE = op_label(2, 0)
SUM_BASE, RESULT_BASE = 1000, 5000
SEQ = SUM_BASE + 5
RESULT_SEQ = RESULT_BASE + 9
ROWS = 20
CODES = 128
LAYOUT = 0xBEEF
EXPONENT, NEED = -36, -39
#: Units to a code of weight 1 in a sum that was not moved, in a job of so many ranks.
FINER = 4 << weights_of(RANKS).spare


def ip_of(rank: int, *, ipv6: bool = False) -> str:
    """The address of a rank; those of IPv6 differ in their first half."""
    if ipv6:
        return f"fd7b:0:0:{rank:x}::1:0:0"
    return f"198.18.0.{1 + rank}" if rank < 250 else f"198.19.0.{rank - 249}"


def address_of(rank: int) -> int:
    """The same as the maps hold it: network byte order, read as a host integer."""
    return int.from_bytes(socket.inet_aton(ip_of(rank)), "little")


def control_values(ranks: int = RANKS) -> dict[str, Any]:
    """Fields of ``tb_control`` in the world of the cases; ``live`` is a list of four words."""
    live = sum(1 << r for r in range(ranks) if r != RANK)
    weights = weights_of(ranks)
    return {
        "active": 1, "cookie": COOKIE, "rank": RANK, "ranks": ranks, "address": address_of(RANK), "group": 0,
        "map_id": MAP_ID, "map_since": MAP_SINCE, "map_before": MAP_BEFORE, "sum_rows": SUM_ROWS, "sum_base": SUM_BASE,
        "result_base": RESULT_BASE, "live_peers": ranks - 1, "need": ranks // 2 + 1, "weight_cap": weights.cap,
        "spare": weights.spare, "first_op": FIRST_OP, "released": RELEASED,
        "live": [live >> 64 * i & (1 << 64) - 1 for i in range(4)],
    }  # fmt: skip


def codes(seed: int, count: int = CODES) -> bytes:
    """``count`` codes 1..255 that follow from ``seed``."""
    return bytes(1 + (seed * 7919 + i * 104729 + i * i * 31) % 255 for i in range(count))


def build(kind: PacketType, body: bytes, **fields: Any) -> bytes:
    """A packet of ``kind`` from rank 1 with its check right; ``fields`` override."""
    values = {"type": kind, "cookie": COOKIE, "op": OP, "layout": LAYOUT, "sender": 1, "map_id": MAP_ID} | fields
    return packed.packet(packed.header(**values), body)


def contribution(sender: int = 1, length: int = CODES, **fields: Any) -> bytes:
    """A contribution to row 5 of rank 0."""
    values = {"owner": RANK, "seq": SEQ, "row": 5, "rows": ROWS, "exponent": EXPONENT, "weight": 1} | fields
    return build(PacketType.CONTRIBUTION, codes(sender + 16 * values["row"], length), sender=sender, **values)


def result(sender: int = 1, length: int = CODES, **fields: Any) -> bytes:
    """A result made by ``sender``: row 9 of the op, place 3 in its list."""
    values = {"owner": sender, "seq": RESULT_SEQ, "row": 3, "rows": ROWS, "exponent": EXPONENT}
    values |= {"scale": 0.25, "count": 3} | fields
    return build(PacketType.RESULT, codes(sender + 100, length), sender=sender, **values)


def ready(sender: int = 1, **fields: Any) -> bytes:
    """READY with a small body."""
    return build(PacketType.READY, codes(3, 32), sender=sender, **({"owner": RANK, "seq": RESULT_BASE} | fields))


def control_packet(kind: PacketType, body: bytes = bytes(16), **fields: Any) -> bytes:
    """A control packet to rank 0."""
    return build(kind, body, **({"owner": RANK} | fields))


#: Of even and odd epochs, in worlds with a key.
KEYS = tuple(key_of(np.random.default_rng(epoch).bytes(8 * (KEY_WORDS - 1) + WIDTH), epoch) for epoch in range(2))


def tagged(data: bytes, epoch: int = 0) -> bytes:
    """``data`` as it is in a job with a key: a tag in the place of the check, and wrong where that is wrong."""
    if len(data) < HEADER_BYTES or len(data) % 16 or len(data) > HEADER_BYTES + WIDTH:
        return data
    out = np.frombuffer(bytearray(data), np.uint8)
    head = out[:HEADER_BYTES].view(packets.HEADER_DTYPE)
    wrong = int(head["check"][0]) ^ int(check_packet(out))
    head["check"] = int(proof_of(out, KEYS[epoch])) ^ wrong
    return out.tobytes()


def checked(data: bytes) -> bytes:
    """``data`` with its check right."""
    parsed = np.frombuffer(data[:HEADER_BYTES], packets.HEADER_DTYPE)
    return packed.packet(parsed.copy(), data[HEADER_BYTES:])


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit turned."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


@dataclass(frozen=True)
class Case:
    """One packet and what must become of it.

    Attributes:
        name: says it in words; the test's id.
        packet: UDP payload.
        verdict: its ledger column.
        sender: its ledger row; -1: that of the rank it names.
        before: UDP payloads taken in first, each from the address of the sender it names.
        control: fields of ``tb_control`` other than ``control_values()``, for the packet (not for ``before``).
        expect_results: (op, rows) that the host expects, or None.
        sealed: (op, seq, rows) sealed between ``before`` and ``packet``, or None.
        registered: ranks whose address is registered.
        source: rank from whose address the packet comes; None: the sender's.
        events: kinds of the events that ``packet`` must cause, in order (``schema.Event``); None: not looked at.
    """

    name: str
    packet: bytes
    verdict: Verdict
    sender: int = -1
    before: tuple[bytes, ...] = ()
    control: Mapping[str, Any] = field(default_factory=dict)
    expect_results: tuple[int, int] | None = None
    sealed: tuple[int, int, int] | None = None
    registered: tuple[int, ...] = (1, 2, 3)
    source: int | None = None
    events: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.sender < 0:
            object.__setattr__(self, "sender", self.packet[packets.offset_of("sender")])


def with_tags(case: Case) -> Case:
    """The same case in a job with a key, packets of odd ranks in an odd epoch; what was damaged is forged then."""

    def of_rank(data: bytes) -> bytes:
        return tagged(data, data[14] & 1 if len(data) >= HEADER_BYTES else 0)

    verdict = Verdict.FORGED if case.verdict == Verdict.CORRUPT else case.verdict
    return replace(case, packet=of_rank(case.packet), before=tuple(map(of_rank, case.before)), verdict=verdict)


_E = schema.Event
_OLDER, _NEWER = op_label(3, 0), op_label(3, 2)
#: A later op whose record stands at the same place in the op ring: of this step, or as far ahead as records reach.
_SAME_RECORD = op_label(3, 1 + schema.OP_PER_STEP)
_OP_RING_LATER = op_label(3 + schema.OP_STEPS, 1)
#: The newest op that may have a record, and the one after it.
_FARTHEST = op_label(3 + schema.OP_STEPS, 0)
_TOO_FAR = _OP_RING_LATER
#: Of the record of OP, and so much later that OP seems to be still to come.
_HALF_ROUND = OP + (1 << 31) + (schema.OP_STEPS << schema.OP_INDEX_BITS)
assert _FARTHEST - RELEASED == schema.OP_STEPS << schema.OP_INDEX_BITS
_MOVED = {"sum_base": SUM_BASE + 10, "result_base": RESULT_BASE + 10}
_PASSED = {"result_base": RESULT_BASE + 100}


def _bad(name: str, packet: bytes, verdict: Verdict, **more: Any) -> Case:
    """A case that is over before the sender can be trusted."""
    return Case(name, packet, verdict, sender=UNKNOWN_SENDER, **more)


# fmt: off
#: kernel-2.
_LENGTH = [
    _bad("nothing at all", b"", Verdict.BAD_LENGTH),
    _bad("one byte short of a header", contribution()[:63], Verdict.BAD_LENGTH),
    _bad("a contribution without codes", contribution(length=0), Verdict.BAD_LENGTH),
    _bad("a result without codes", result(length=0), Verdict.BAD_LENGTH),
    _bad("codes in no whole steps", contribution()[:-1], Verdict.BAD_LENGTH),
    _bad("eight bytes too many", contribution() + bytes(8), Verdict.BAD_LENGTH),
    _bad("one step wider than the width", contribution(length=WIDTH + 16), Verdict.BAD_LENGTH),
    _bad("a control packet too wide", control_packet(PacketType.MAP, bytes(WIDTH + 16)), Verdict.BAD_LENGTH),
    Case("one step of codes", contribution(length=16), Verdict.STORED),
    Case("as wide as the width", contribution(length=WIDTH), Verdict.STORED),
    Case("a control packet without a body", control_packet(PacketType.BYE, b""), Verdict.CONTROL_PASSED),
]

#: kernel-3 to kernel-9, in this order.
_TRUST = [
    _bad("another version", contribution(version=2), Verdict.BAD_VERSION),
    _bad("type 0", contribution(type=0), Verdict.BAD_TYPE),
    _bad("a type that does not exist", contribution(type=max(PacketType) + 1), Verdict.BAD_TYPE),
    _bad("a context that is not active", contribution(), Verdict.INACTIVE, control={"active": 0}),
    _bad("inactive comes before the cookie", contribution(cookie=1), Verdict.INACTIVE, control={"active": 0}),
    _bad("another job", contribution(cookie=COOKIE + 1), Verdict.WRONG_COOKIE),
    _bad("own rank as sender", contribution(sender=RANK), Verdict.UNKNOWN_RANK, source=1),
    _bad("a rank beyond the world", contribution(sender=RANKS), Verdict.UNKNOWN_RANK),
    _bad("a rank nobody registered", contribution(sender=3), Verdict.UNKNOWN_RANK, registered=(1, 2)),
    _bad("another rank's address", contribution(), Verdict.WRONG_ADDRESS, source=2),
    _bad("a stop from there", control_packet(PacketType.HELLO, flags=Flag.STOP), Verdict.WRONG_ADDRESS, source=2),
    _bad("one bit of the codes", flipped(contribution(), 8 * (HEADER_BYTES + 40) + 3), Verdict.CORRUPT),
    _bad("one bit of the mark", flipped(contribution(), 8 * 27 + 1), Verdict.CORRUPT),
    _bad("one bit of the check", flipped(contribution(), 8 * 63), Verdict.CORRUPT),
    _bad("codes cut off", contribution()[:-16], Verdict.CORRUPT),
    _bad("codes added", contribution() + bytes(16), Verdict.CORRUPT),
    _bad("no check at all", contribution()[:56] + bytes(8) + contribution()[64:], Verdict.CORRUPT),
]

#: kernel-10 and kernel-11.
_ADDRESSEE = [
    Case("a contribution for another owner", contribution(owner=2), Verdict.NOT_FOR_THIS_RANK),
    Case("a result under another owner's name", result(owner=2), Verdict.NOT_FOR_THIS_RANK),
    Case("a control packet for another rank", control_packet(PacketType.MAP, owner=2), Verdict.NOT_FOR_THIS_RANK),
    Case("a probe for another rank", control_packet(PacketType.PROBE, owner=2), Verdict.NOT_FOR_THIS_RANK),
    Case("an echo for another rank", control_packet(PacketType.ECHO, owner=2), Verdict.NOT_FOR_THIS_RANK),
    Case("a control packet to all", control_packet(PacketType.MAP, owner=1), Verdict.NOT_FOR_THIS_RANK),
    Case("the row after the last", contribution(row=ROWS), Verdict.SLOT_OUT_OF_RANGE),
    Case("a result row after the last", result(row=ROWS), Verdict.SLOT_OUT_OF_RANGE),
    Case("an op without rows", contribution(row=0, rows=0), Verdict.SLOT_OUT_OF_RANGE),
    Case("another owner map", contribution(map_id=MAP_ID + 1), Verdict.WRONG_MAP),
    Case("a result under another map", result(map_id=MAP_BEFORE), Verdict.WRONG_MAP),
    Case("the map before, for an op of its time", contribution(op=MAP_SINCE - 1, map_id=MAP_BEFORE), Verdict.STORED),
    Case("the new map for an op before it", contribution(op=MAP_SINCE - 1, map_id=MAP_ID), Verdict.WRONG_MAP),
    Case("a control packet under another map", control_packet(PacketType.HOLD, map_id=99), Verdict.CONTROL_PASSED),
    Case("the largest weight", contribution(weight=7), Verdict.STORED),
    Case("a weight beyond the lanes", contribution(weight=8), Verdict.BAD_WEIGHT),
    Case("the largest number there is as a weight", contribution(weight=255), Verdict.BAD_WEIGHT),
    Case("no weight", contribution(weight=0), Verdict.BAD_WEIGHT),
    Case("a weight on a result means nothing", result(weight=8), Verdict.RESULT_TAKEN),
]

#: kernel-13, READY also by kernel-14 and kernel-15, and kernel-18.
_CONTROL = [
    Case(f"{kind.name} passes", control_packet(kind), Verdict.CONTROL_PASSED, events=())
    for kind in PacketType
    if kind > PacketType.READY and kind not in (PacketType.PROBE, PacketType.ECHO)
] + [
    Case("READY passes and opens its op", ready(), Verdict.CONTROL_PASSED, events=(_E.OPENED,)),
    Case("READY of the ring's last row", ready(seq=RESULT_BASE + RESULT_ROWS - 1), Verdict.CONTROL_PASSED),
    Case("READY beyond the ring", ready(seq=RESULT_BASE + RESULT_ROWS), Verdict.FUTURE_RESULT),
    Case("READY behind the ring", ready(seq=RESULT_BASE - 1), Verdict.STALE_RESULT),
    Case("READY in place of late rows", ready(flags=Flag.LATE), Verdict.CONTROL_PASSED, events=(_E.OPENED,)),
    Case("such a READY after rows",
         ready(flags=Flag.LATE), Verdict.CONTROL_PASSED, before=(contribution(),), events=()),
    Case("READY in place of late rows, for an op that others have opened here",
         ready(flags=Flag.LATE), Verdict.STALE_RESULT, before=(ready(sender=2),), control=_PASSED, events=()),
    Case("such a READY for an op that is over here, of which nothing came before",
         ready(flags=Flag.LATE), Verdict.STALE_RESULT, control=_PASSED | {"released": OP}, events=()),
    Case("READY of a rank with no rows to send leaves nothing for such an op",
         ready(), Verdict.STALE_RESULT, control=_PASSED | {"released": OP}, events=()),
    Case("READY before the first op", ready(op=FIRST_OP - 1), Verdict.STALE_RESULT),
    Case("READY with another layout", ready(sender=2, layout=1), Verdict.LAYOUT_MISMATCH, before=(ready(),)),
    Case("READY of an op whose record is taken by a newer one",
         ready(), Verdict.STALE_RESULT, before=(ready(sender=2, op=_SAME_RECORD),)),
    Case("READY of the farthest op that has a record", ready(op=_FARTHEST), Verdict.CONTROL_PASSED),
    Case("READY of an op too far ahead", ready(op=_TOO_FAR), Verdict.FUTURE_RESULT, events=()),
    Case("READY of an op a thousand steps ahead", ready(op=op_label(4008, 1)), Verdict.FUTURE_RESULT, events=()),
    Case("READY of that op once the one that had the record is over",
         ready(op=_TOO_FAR), Verdict.CONTROL_PASSED, before=(ready(sender=2),), control={"released": OP},
         events=(_E.OPENED,)),
    Case("READY too far ahead is late where rows are behind the window",
         ready(op=_TOO_FAR, seq=RESULT_BASE - 1), Verdict.STALE_RESULT),
    Case("the majority is heard", ready(sender=2), Verdict.CONTROL_PASSED, before=(ready(),), events=(_E.MAJORITY,)),
    Case("heard twice is heard once", ready(), Verdict.CONTROL_PASSED, before=(ready(),), events=()),
    Case("a probe comes back", control_packet(PacketType.PROBE), Verdict.REFLECTED, events=()),
    Case("an echo is taken", control_packet(PacketType.ECHO, struct.pack(">QQ", 1, 0)), Verdict.ECHO_TAKEN, events=()),
    Case("an echo without a time", control_packet(PacketType.ECHO, b""), Verdict.BAD_LENGTH),
]

#: kernel-14.
_WINDOW = [
    Case("the first op", contribution(op=FIRST_OP, map_id=MAP_BEFORE), Verdict.STORED),
    Case("before the first op", contribution(op=FIRST_OP - 1, map_id=MAP_BEFORE), Verdict.STALE_OP),
    Case("a result before the first op", result(op=FIRST_OP - 1, map_id=MAP_BEFORE), Verdict.STALE_RESULT),
    Case("the window's first row", contribution(seq=SUM_BASE), Verdict.STORED),
    Case("the window's last row", contribution(seq=SUM_BASE + SUM_ROWS - 1), Verdict.STORED),
    Case("behind the window", contribution(seq=SUM_BASE - 1), Verdict.STALE_OP),
    Case("a repeat behind it",
         contribution(flags=Flag.REPEAT), Verdict.DUPLICATE_REPAIR, before=(contribution(),), control=_MOVED),
    Case("beyond the window", contribution(seq=SUM_BASE + SUM_ROWS), Verdict.FUTURE_OP),
    Case("late for its op, stamped",
         contribution(), Verdict.STALE_OP, before=(ready(sender=2),), control=_MOVED, events=()),
    Case("late again, stamped once",
         contribution(), Verdict.STALE_OP, before=(contribution(seq=SEQ + 1),), control=_MOVED, events=()),
    Case("late for its op, of another layout",
         contribution(), Verdict.STALE_OP, before=(ready(sender=2, layout=1),), control=_MOVED, events=()),
    Case("late for an op that is over here, of which nothing came before",
         contribution(), Verdict.STALE_OP, control=_MOVED | {"released": OP}, events=()),
    Case("a late result of such an op", result(), Verdict.STALE_RESULT, control=_PASSED | {"released": OP}, events=()),
    Case("a late result, stamped",
         result(), Verdict.STALE_RESULT, before=(ready(sender=2),), control=_PASSED, events=()),
    Case("a result behind the window", result(seq=RESULT_BASE - 1), Verdict.STALE_RESULT),
    Case("a result again behind it", result(), Verdict.DUPLICATE_RESULT, before=(result(),), control=_PASSED),
    Case("a result beyond the window", result(seq=RESULT_BASE + RESULT_ROWS), Verdict.FUTURE_RESULT),
    Case("the result window's last row", result(seq=RESULT_BASE + RESULT_ROWS - 1), Verdict.RESULT_TAKEN),
    Case("half the number circle away", contribution(seq=(SUM_BASE + (1 << 31)) & 0xFFFFFFFF), Verdict.STALE_OP),
    Case("a window over the end of the number circle",
         contribution(seq=3), Verdict.STORED, control={"sum_base": 0xFFFFFFF0}),
    Case("beyond a window over the end of the number circle",
         contribution(seq=48), Verdict.FUTURE_OP, control={"sum_base": 0xFFFFFFF0}),
]

#: kernel-15.
_OPS = [
    Case("the first packet opens the op", contribution(), Verdict.STORED, events=(_E.OPENED,)),
    Case("another layout", contribution(2, layout=1), Verdict.LAYOUT_MISMATCH, before=(contribution(),)),
    Case("rows of another length", contribution(2, length=112), Verdict.LAYOUT_MISMATCH, before=(contribution(),)),
    Case("results of another length", result(2, length=112), Verdict.LAYOUT_MISMATCH, before=(contribution(),)),
    Case("READY says nothing of the length", contribution(2, length=112), Verdict.STORED, before=(ready(),)),
    Case("an op whose record is taken by a newer one",
         contribution(2), Verdict.STALE_OP, before=(ready(op=_SAME_RECORD),)),
    Case("a newer op takes the record over",
         contribution(op=_SAME_RECORD), Verdict.STORED, before=(ready(sender=2),), events=(_E.OPENED,)),
    Case("a contribution to the farthest op that has a record", contribution(op=_FARTHEST), Verdict.STORED),
    Case("a record that nobody has used for half the circle of labels is an old one",
         contribution(op=_HALF_ROUND, seq=SEQ + 1), Verdict.STORED, before=(contribution(2),),
         sealed=(_HALF_ROUND - 1, SUM_BASE, SUM_ROWS),
         control={"first_op": _HALF_ROUND - 9, "released": _HALF_ROUND - 1, "map_since": _HALF_ROUND - 9}),
    Case("a contribution to an op too far ahead", contribution(op=_TOO_FAR), Verdict.FUTURE_OP, events=()),
    Case("a row after a label from far ahead", contribution(2), Verdict.STORED, before=(ready(op=op_label(4007, 1)),)),
    Case("a result of an op too far ahead for a record", result(op=_TOO_FAR), Verdict.RESULT_TAKEN, events=()),
    Case("such a result again",
         result(op=_TOO_FAR), Verdict.DUPLICATE_RESULT, before=(ready(2), result(op=_TOO_FAR)), events=()),
    Case("a result whose op's record is taken by a newer one",
         result(), Verdict.RESULT_TAKEN, before=(ready(sender=2, op=_SAME_RECORD),), events=()),
    Case("a result of another layout whose op has no record",
         result(layout=1), Verdict.RESULT_TAKEN, before=(ready(sender=2, op=_SAME_RECORD),), events=()),
    Case("the tail of all live ranks",
         contribution(3, row=ROWS - 1), Verdict.ADDED,
         before=(contribution(1, row=ROWS - 1), contribution(2, contributed=OP)), events=(_E.MAJORITY, _E.TAIL)),
    Case("the tail of all results",
         result(3, published=OP), Verdict.DUPLICATE_RESULT,
         before=(result(1, row=ROWS - 1), result(2, published=_NEWER)), events=(_E.MAJORITY, _E.RESULTS_TAIL)),
    Case("ABSTAIN is heard", ready(flags=Flag.ABSTAIN), Verdict.CONTROL_PASSED, events=(_E.OPENED,)),
]

#: kernel-16, and seals by kernel-19.
_SUMS = [
    Case("the second contributor", contribution(2), Verdict.ADDED, before=(contribution(),)),
    Case("the same again", contribution(), Verdict.DUPLICATE, before=(contribution(),)),
    Case("again on request", contribution(flags=Flag.REPEAT), Verdict.DUPLICATE_REPAIR, before=(contribution(),)),
    Case("on request, and the first to come", contribution(flags=Flag.REPEAT), Verdict.STORED),
    Case("a repeat of what was added", contribution(2), Verdict.DUPLICATE, before=(contribution(), contribution(2))),
    Case("an older op in the slot goes", contribution(), Verdict.STORED, before=(contribution(2, op=_OLDER),)),
    Case("an older op in the slot that is in progress stays",
         contribution(op=_NEWER), Verdict.FUTURE_OP, before=(contribution(2),)),
    Case("sealed is not over: the host reads the sum",
         contribution(op=_NEWER), Verdict.FUTURE_OP, before=(contribution(2),), sealed=(OP, SEQ, 1)),
    Case("an older op in the slot goes once it is over",
         contribution(op=_NEWER), Verdict.STORED, before=(contribution(2),), control={"released": OP}),
    Case("a newer op in the slot stays", contribution(), Verdict.STALE_OP, before=(contribution(2, op=_NEWER),)),
    Case("a larger scale", contribution(2, exponent=EXPONENT + 4), Verdict.ADDED, before=(contribution(),)),
    Case("a smaller scale", contribution(2, exponent=EXPONENT - 20), Verdict.ADDED, before=(contribution(),)),
    Case("the largest scale that a header can name", contribution(exponent=32767), Verdict.STORED),
    Case("the smallest scale that a header can name", contribution(exponent=-32768), Verdict.STORED),
    Case("the same again, in another scale", contribution(exponent=0), Verdict.DUPLICATE, before=(contribution(),)),
    Case("sealed", contribution(), Verdict.LATE, sealed=(OP, SEQ, 1)),
    Case("sealed for a newer op", contribution(), Verdict.LATE, sealed=(_NEWER, SEQ - 3, 8)),
    Case("sealed for an older op only", contribution(), Verdict.STORED, sealed=(_OLDER, SEQ, 1)),
    Case("the slot after the sealed ones", contribution(), Verdict.STORED, sealed=(OP, SEQ - 4, 4)),
    Case("a row that came is not late", contribution(), Verdict.DUPLICATE, before=(contribution(),),
         sealed=(OP, SEQ, 1)),
    Case("the row is complete, and the op with it",
         contribution(3, rows=1, row=0), Verdict.ADDED,
         before=(contribution(1, rows=1, row=0), contribution(2, rows=1, row=0)),
         events=(_E.MAJORITY, _E.TAIL, _E.COMPLETE)),
    Case("with one live peer, one contribution completes",
         contribution(rows=1, row=0), Verdict.STORED,
         control={"ranks": 2, "live": [2, 0, 0, 0], "live_peers": 1, "need": 2},
         events=(_E.OPENED, _E.MAJORITY, _E.TAIL, _E.COMPLETE)),
    Case("who is not live completes nothing",
         contribution(rows=1, row=0), Verdict.STORED, control={"live": [0b1100, 0, 0, 0], "live_peers": 2, "need": 2},
         events=(_E.OPENED,)),
]

#: kernel-17.
_RESULTS = [
    Case("a result", result(), Verdict.RESULT_TAKEN, events=(_E.OPENED,)),
    Case("flags of a result are kept", result(flags=Flag.SKIP | Flag.STOP), Verdict.RESULT_TAKEN, events=(_E.OPENED,)),
    Case("the same result again", result(), Verdict.DUPLICATE_RESULT, before=(result(),)),
    Case("a result again on request", result(flags=Flag.REPEAT), Verdict.DUPLICATE_REPAIR_RESULT, before=(result(),)),
    Case("a result on request, the first to come", result(flags=Flag.REPEAT), Verdict.RESULT_TAKEN),
    Case("a newer result in the row stays", result(), Verdict.STALE_RESULT, before=(result(2, op=_NEWER),)),
    Case("an older result in the row whose op is in progress stays",
         result(op=_NEWER), Verdict.FUTURE_RESULT, before=(result(2),)),
    Case("an older result in the row goes", result(), Verdict.RESULT_TAKEN, before=(result(2, op=_OLDER),)),
    Case("the last expected result",
         result(2, seq=RESULT_SEQ + 1), Verdict.RESULT_TAKEN, before=(result(),), expect_results=(OP, 2),
         events=(_E.MAJORITY, _E.RESULTS_COMPLETE)),
    Case("results expected of another op",
         result(2, seq=RESULT_SEQ + 1), Verdict.RESULT_TAKEN, before=(result(),), expect_results=(_OLDER, 2),
         events=(_E.MAJORITY,)),
]

#: Rows of two codes a byte have as many codes as rows of one that are twice as long.
_HALVES = [
    Case("half bytes", contribution(length=64, flags=Flag.HALVES), Verdict.STORED),
    Case("a result of as many codes",
         result(2), Verdict.RESULT_TAKEN, before=(contribution(length=64, flags=Flag.HALVES),)),
    Case("a result of as many bytes",
         result(2, 64), Verdict.LAYOUT_MISMATCH, before=(contribution(length=64, flags=Flag.HALVES),)),
    Case("a result of half bytes, too",
         result(2, 64, flags=Flag.HALVES), Verdict.RESULT_TAKEN, before=(contribution(length=64, flags=Flag.HALVES),)),
    Case("half bytes as wide as may be", contribution(length=WIDTH // 2, flags=Flag.HALVES), Verdict.STORED),
    Case("half bytes whose sums would not fit",
         contribution(length=WIDTH // 2 + 16, flags=Flag.HALVES), Verdict.BAD_LENGTH),
    Case("a result of half bytes that no contribution could have",
         result(length=WIDTH // 2 + 16, flags=Flag.HALVES), Verdict.BAD_LENGTH),
]
# fmt: on

CASES: tuple[Case, ...] = (*_LENGTH, *_TRUST, *_ADDRESSEE, *_CONTROL, *_WINDOW, *_OPS, *_SUMS, *_RESULTS, *_HALVES)

assert len({c.name for c in CASES}) == len(CASES)


def judged(gained: NDArray[np.uint64]) -> tuple[Verdict, int]:
    """What the ledger gained (u64[ranks and the unknown, verdicts]) by one packet, which must be counted exactly once.

    Returns:
        Its verdict and its row.
    """
    at = int(gained.argmax())  # a fraction of what looking for all that is not zero takes
    assert gained.sum() == gained.flat[at] == 1, f"not counted exactly once: {np.argwhere(gained)}"
    sender, verdict = divmod(at, gained.shape[1])
    return Verdict(verdict), sender
