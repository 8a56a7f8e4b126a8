"""What a switch must do (kernel-24), case by case: packets in, packets out and verdicts; one list for XDP and P4.

The world of a case: a switch at ``ADDRESS`` with the jobs that the case names (``JOB`` has three workers and 16
slots), a port per worker. A case is a list of steps; each feeds one UDP payload and says what becomes of it: its
verdict (None: it is not the switch's and is forwarded untouched), the ledger row it is charged to, and to whom which
result goes.

``expected(step, form)`` is that result as a UDP payload: ``mean`` codes as an XDP switch makes them, or ``sums`` as a
P4 switch does. ``cases(codes)`` builds the list for rows of that many codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

import cases as worker
import packed
from tailbound.wire import packets
from tailbound.wire.schema import EXPONENT_NONE, HEADER_BYTES, UNKNOWN_SENDER, Flag, PacketType, Verdict

Form = Literal["mean", "sums"]

ADDRESS = "198.18.252.1"
MAC = "02:7b:00:02:00:00"
PORT = worker.PORT
#: Widest row of the world's programs, in codes; sums take twice the room.
WIDTH = 256
CODES = 128
MAP_ID = 7
#: A row in the middle of its op, and of the ring.
SEQ, ROW, ROWS = 1029, 5, 20
OP = worker.OP


@dataclass(frozen=True)
class Job:
    """A job entry: ``rows`` slots from ``base`` on, ranks 0..``ranks`` - 1 at ``ip_of(rank)``."""

    cookie: int = worker.COOKIE
    ranks: int = 3
    base: int = 0
    rows: int = 16
    headroom: int = 2
    port: int = PORT
    address: str = ADDRESS
    registered: tuple[int, ...] | None = None  #: ranks that have an entry; None: all


JOB = Job()
PAIR = Job(ranks=2)
OTHER = Job(cookie=0x0DDBA115, ranks=2, base=16)
ELSEWHERE = Job(cookie=0x0DDBA116, ranks=2, base=32, port=PORT + 1)


def ip_of(rank: int) -> str:
    """The IPv4 address of a rank."""
    return worker.ip_of(rank)


def in_ipv6(address: str) -> str:
    """Where a case over IPv6 has an address of the list; it ends in four bytes of 0, as ``cases.ip_of``'s do."""
    third, fourth = address.split(".")[2:]
    return f"fd7b::{int(third) << 8 | int(fourth):x}:0:1:0:0"


def mac_of(rank: int) -> str:
    """The Ethernet address of a rank."""
    return f"02:7b:00:00:00:{rank:02x}"


def scale_of(exponent: int) -> np.float32:
    """What a worker puts into ``scale``: 2 ** (e / 4)."""
    return np.float32(2.0 ** (exponent / 4))


@dataclass(frozen=True)
class Step:
    """One packet and what must become of it.

    Attributes:
        packet: UDP payload.
        verdict: its ledger column; None: not for the switch, forwarded untouched.
        sender: its ledger row.
        summed: the contributions (UDP payloads) in the result that it causes; empty: none is sent.
        to: ranks that the result goes to.
        abandoned: rows that it counts as abandoned besides.
        job: the job it is charged to, and the result is of.
        source, destination, port: where it comes from and goes to; ``source`` None: the address of the rank it names.
    """

    packet: bytes
    verdict: Verdict | None
    sender: int = UNKNOWN_SENDER
    summed: tuple[bytes, ...] = ()
    to: tuple[int, ...] = ()
    abandoned: int = 0
    job: Job = JOB
    source: str | None = None
    destination: str = ADDRESS
    port: int = PORT

    @property
    def source_address(self) -> str:
        """IPv4 source address."""
        if self.source is not None:
            return self.source
        named = self.packet[14] if len(self.packet) >= HEADER_BYTES else 0
        return ip_of(named if named < 250 else 0)


@dataclass(frozen=True)
class Case:
    """A name that says it in words, steps in order, and the jobs of the switch."""

    name: str
    steps: tuple[Step, ...]
    jobs: tuple[Job, ...] = (JOB,)


def contribution(sender: int, codes: int = CODES, *, job: Job = JOB, **fields: Any) -> bytes:
    """A contribution to the switch of ``job``; ``fields`` override."""
    values: dict[str, Any] = {
        "type": PacketType.CONTRIBUTION, "cookie": job.cookie, "op": OP, "layout": worker.LAYOUT, "sender": sender,
        "owner": job.ranks, "seq": SEQ, "row": ROW, "rows": ROWS, "exponent": worker.EXPONENT,
        "need": worker.NEED - sender, "weight": 1, "map_id": MAP_ID, "map_known": MAP_ID + 1, "contributed": OP - 1,
        "deadline": 11, "pad": 3, "lateness": 2,
    } | fields  # fmt: skip
    values.setdefault("scale", scale_of(values["exponent"]))
    return packed.packet(packed.header(**values), worker.codes(7 + sender + 16 * values["row"], codes))


def sums(contributions: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Sums of codes, i64[V]."""
    total: np.ndarray[Any, np.dtype[np.int64]] = np.sum(
        [np.frombuffer(c, np.uint8, offset=HEADER_BYTES) for c in contributions], axis=0, dtype=np.int64
    )
    return total


def mean(total: np.ndarray[Any, np.dtype[np.int64]], count: int) -> bytes:
    """Mean codes, to the nearest, halves up."""
    return ((total + count // 2) // count).astype(np.uint8).tobytes()


def result(cause: bytes, contributions: Sequence[bytes], form: Form, job: Job = JOB) -> bytes:
    """The result that ``cause`` releases, or is answered with, from the contributions summed."""
    heads = [packed.parse(c)[0] for c in contributions]  # type: ignore[index]
    caused = np.frombuffer(cause[:HEADER_BYTES], packets.HEADER_DTYPE)
    need = max(int(h["need"][0]) for h in heads)
    exponent = int(heads[0]["exponent"][0]) if need == EXPONENT_NONE else need + job.headroom
    kept = ("cookie", "op", "layout", "seq", "row", "rows", "map_id", "map_known")
    head = packed.header(
        type=PacketType.RESULT,
        flags=Flag.SWITCHED if form == "mean" else Flag.SUMS,
        sender=job.ranks,
        owner=job.ranks,
        contributed=int(caused["op"][0]) - 1,
        published=int(caused["op"][0]) - 1,
        exponent=exponent,
        need=need,
        scale=heads[0]["scale"][0],
        count=len(contributions),
        **{name: caused[name][0] for name in kept},
    )
    total = sums(contributions)
    body = mean(total, len(contributions)) if form == "mean" else total.astype(">u2").tobytes()
    return packed.packet(head, body)


def expected(step: Step, form: Form) -> bytes | None:
    """The result that the step sends, as a UDP payload; None: none."""
    return result(step.packet, step.summed, form, step.job) if step.summed else None


def _taken(verdict: Verdict, packet: bytes, **more: Any) -> Step:
    return Step(packet, verdict, packet[14], **more)


def _released(verdict: Verdict, packet: bytes, *summed: bytes, job: Job = JOB, **more: Any) -> Step:
    return Step(packet, verdict, packet[14], summed, tuple(range(job.ranks)), job=job, **more)


_stored, _added = partial(_taken, Verdict.STORED), partial(_taken, Verdict.ADDED)


def _answered(packet: bytes, *summed: bytes, job: Job = JOB, **more: Any) -> Step:
    return Step(packet, Verdict.ANSWERED, packet[14], summed, (packet[14],), job=job, **more)


def _row(*sent: bytes, job: Job = JOB) -> tuple[Step, ...]:
    """A row that all send once, in this order."""
    steps = [_stored(sent[0], job=job), *(_added(p, job=job) for p in sent[1:-1])]
    return (*steps, _released(Verdict.ADDED, sent[-1], *sent, job=job))


def _again(packet: bytes, flags: int) -> bytes:
    """The same contribution with other flags."""
    head = np.frombuffer(packet[:HEADER_BYTES], packets.HEADER_DTYPE).copy()
    head["flags"] = flags
    return packed.packet(head, packet[HEADER_BYTES:])


def cases(codes: int = CODES) -> tuple[Case, ...]:
    """The list, for rows of ``codes`` codes."""
    send = partial(contribution, codes=codes)
    a, b, c = (send(rank) for rank in range(3))
    return (
        *_sums(send, a, b, c),
        *_repeats(a, b, c),
        *_flushes(send, a, b, c),
        *_slots(send),
        *_refused(send),
        *_jobs(send),
    )


def _sums(send: Any, a: bytes, b: bytes, c: bytes) -> list[Case]:
    pair = [send(rank, job=PAIR) for rank in range(2)]
    none = [send(rank, need=EXPONENT_NONE) for rank in range(3)]
    mixed = [send(rank, need=need) for rank, need in enumerate((EXPONENT_NONE, -45, EXPONENT_NONE))]
    live = [send(rank, count=2) for rank in range(3)]
    short = [send(rank, codes=16) for rank in range(3)]
    alone = Job(ranks=1)
    return [
        Case("basic sum of three workers", _row(a, b, c)),
        Case("in another order", _row(c, a, b)),
        Case("two workers", _row(*pair, job=PAIR), (PAIR,)),
        Case("one worker", (_released(Verdict.STORED, one := send(0, job=alone), one, job=alone),), (alone,)),
        Case("nobody needs a scale", _row(*none)),
        Case("one of three needs a scale", _row(*mixed)),
        Case("rows of sixteen codes", _row(*short)),
        Case(
            "a sender that waits for two alone",
            (_stored(a), _released(Verdict.ADDED, live[1], a, live[1]), _answered(c, a, live[1])),
        ),
        Case(
            "the first of two that wait for two",
            (_stored(live[0]), _added(b), _released(Verdict.ADDED, c, live[0], b, c)),
        ),
        Case("a sender that waits for more than there are", _row(a, b, send(2, count=9))),
    ]


def _repeats(a: bytes, b: bytes, c: bytes) -> list[Case]:
    again = _again(a, Flag.REPEAT)
    return [
        Case("duplicate ignored", (_stored(a), _taken(Verdict.DUPLICATE, a), *_row(a, b, c)[1:])),
        Case("sent again on a gap, ignored", (_stored(a), _taken(Verdict.DUPLICATE, again), *_row(a, b, c)[1:])),
        Case(
            "duplicate after completion answered",
            (*_row(a, b, c), _answered(a, a, b, c), _answered(again, a, b, c), _answered(c, a, b, c)),
        ),
    ]


def _flushes(send: Any, a: bytes, b: bytes, c: bytes) -> list[Case]:
    fa, fb, fc = (_again(p, Flag.FLUSH | Flag.REPEAT) for p in (a, b, c))
    return [
        Case("flush with partial count", (_stored(a), _released(Verdict.ADDED, fb, a, fb), _answered(c, a, b))),
        Case("flush of a duplicate", (_stored(a), _added(b), _released(Verdict.FLUSHED, fa, a, b))),
        Case("flush twice", (_stored(a), _released(Verdict.FLUSHED, fa, a), _answered(fa, a), _answered(fb, a))),
        Case("flush of a row nobody began", (_released(Verdict.STORED, fc, fc), _answered(a, fc), _answered(b, fc))),
        Case("flush that completes the row", (_stored(a), _added(b), _released(Verdict.ADDED, fc, a, b, c))),
        Case("flush after completion", (*_row(a, b, c), _answered(fb, a, b, c))),
        Case(
            "flush with another scale releases nothing",
            (
                _stored(a),
                _taken(Verdict.SCALE_MISMATCH, send(1, exponent=worker.EXPONENT + 1, flags=Flag.FLUSH)),
                _added(b),
                _released(Verdict.ADDED, c, a, b, c),
            ),
        ),
    ]


def _slots(send: Any) -> list[Case]:
    first = [send(rank) for rank in range(3)]
    later = [send(rank, seq=SEQ + JOB.rows, row=ROW + 1) for rank in range(3)]
    next_op = [send(rank, seq=SEQ + 2 * JOB.rows, row=2, op=OP + 1) for rank in range(3)]
    neighbour = [send(rank, seq=SEQ + 1, row=ROW + 1) for rank in range(3)]
    end = [send(rank, seq=0xFFFFFFFE) for rank in range(3)]
    start = [send(rank, seq=0xFFFFFFFE + JOB.rows & 0xFFFFFFFF, row=ROW + 1) for rank in range(3)]
    stale = partial(_taken, Verdict.STALE_OP)
    return [
        Case("slot reuse", (*_row(*first), *_row(*later), *_row(*next_op))),
        Case("other generation, older", (*_row(*later), stale(first[0]), stale(_again(first[1], Flag.FLUSH)))),
        Case("older than an open row", (_stored(later[0]), stale(first[0]), *_row(*later)[1:])),
        Case(
            "other generation, newer: an open row is abandoned",
            (_stored(first[0]), _added(first[1]), _stored(later[1], abandoned=1), stale(first[2]), _added(later[0])),
        ),
        Case("neighbouring slots", (_stored(first[0]), _stored(neighbour[1]), *_row(*first)[1:], _added(neighbour[0]))),
        Case("sequences that wrap", (*_row(*end), *_row(*start), stale(end[0]))),
    ]


def _refused(send: Any) -> list[Case]:
    a, b, c = (send(rank) for rank in range(3))

    def bad(packet: bytes, verdict: Verdict, **more: Any) -> Step:
        return Step(packet, verdict, **more)

    def then_whole(name: str, *steps: Step, jobs: tuple[Job, ...] = (JOB,)) -> Case:
        """Between the first contribution and the others; the row is none the worse for it."""
        return Case(name, (_stored(a), *steps, *_row(a, b, c)[1:]), jobs)

    refused = partial(_taken)
    spoilt = worker.flipped(b, 8 * (HEADER_BYTES + 3) + 2)
    probe = send(1, type=PacketType.READY)
    partly = replace(JOB, registered=(0, 2))
    foreign = [
        Step(b, None, destination=ip_of(2)),
        Step(b, None, port=PORT + 7),
        Step(b"not of ours at all", None, destination=ip_of(2), port=53),
    ]
    return [
        then_whole("wrong job", bad(send(1, cookie=JOB.cookie + 1), Verdict.WRONG_COOKIE)),
        then_whole("corrupt", bad(spoilt, Verdict.CORRUPT), bad(worker.flipped(b, 8 * 63), Verdict.CORRUPT)),
        then_whole(
            "cut off", bad(b[:-16], Verdict.CORRUPT), bad(b[:-1], Verdict.BAD_LENGTH), bad(b[:50], Verdict.BAD_LENGTH)
        ),
        then_whole("without codes", bad(send(1, codes=0), Verdict.BAD_LENGTH)),
        then_whole("another version", bad(send(1, version=2), Verdict.BAD_VERSION)),
        then_whole("a type that does not exist", bad(send(1, type=99), Verdict.BAD_TYPE)),
        then_whole("a type that is not for a switch", refused(Verdict.BAD_TYPE, probe)),
        then_whole("a rank beyond the job", bad(send(3), Verdict.UNKNOWN_RANK)),
        Case("a rank nobody registered", (_stored(a), bad(b, Verdict.UNKNOWN_RANK), _added(c)), (partly,)),
        then_whole("another rank's address", bad(b, Verdict.WRONG_ADDRESS, source=ip_of(2))),
        then_whole("for another owner", refused(Verdict.NOT_FOR_THIS_RANK, send(1, owner=1))),
        then_whole("a row beyond the op", refused(Verdict.SLOT_OUT_OF_RANGE, send(1, row=ROWS))),
        then_whole("another weight than 1", *(refused(Verdict.BAD_WEIGHT, send(1, weight=w)) for w in (0, 2, 255))),
        then_whole("such a weight in a flush", refused(Verdict.BAD_WEIGHT, send(1, weight=2, flags=Flag.FLUSH))),
        then_whole("scale mismatch", refused(Verdict.SCALE_MISMATCH, send(1, exponent=worker.EXPONENT - 1))),
        then_whole("another op in the same row", refused(Verdict.LAYOUT_MISMATCH, send(1, op=OP + 1))),
        then_whole("another layout", refused(Verdict.LAYOUT_MISMATCH, send(1, layout=1))),
        then_whole("another place in the op", refused(Verdict.LAYOUT_MISMATCH, send(1, row=ROW + 1))),
        then_whole("another number of rows", refused(Verdict.LAYOUT_MISMATCH, send(1, rows=ROWS + 1))),
        then_whole("foreign traffic forwarded", *foreign),
    ]


def _jobs(send: Any) -> list[Case]:
    mine = [send(rank) for rank in range(3)]
    theirs = [send(rank, job=OTHER) for rank in range(2)]
    far = [send(rank, job=ELSEWHERE) for rank in range(2)]
    both = (_stored(mine[0]), _stored(theirs[0], job=OTHER), *_row(*theirs, job=OTHER)[1:], *_row(*mine)[1:])
    apart = [replace(step, port=ELSEWHERE.port) for step in _row(*far, job=ELSEWHERE)]
    wrong = Step(far[0], Verdict.WRONG_COOKIE)
    return [
        Case("two jobs kept apart", both, (JOB, OTHER)),
        Case("two jobs on two ports", (_stored(mine[0]), *apart, wrong, *_row(*mine)[1:]), (JOB, ELSEWHERE)),
    ]


CASES = cases()
