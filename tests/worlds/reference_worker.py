"""The worker's rules in plain Python: a second opinion on what the programs and the C library make of a packet.

``ReferenceTables`` has the methods and the memory of ``datapath.udp.Tables``. It follows the rules one by one, in
the order of docs/rules.md.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from reference import Sum, Weights, added
from reference_proof import check_reference, tag_reference
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import (
    HEADER_BYTES,
    MAX_RANKS,
    OP_INDEX_BITS,
    OP_STEPS,
    ROW_STEP,
    UNKNOWN_SENDER,
    VERSION,
    Event,
    Flag,
    PacketType,
    Verdict,
    op_slot,
)
from tailbound.wire.schema import serial_distance as serial

_ROWS = {
    PacketType.CONTRIBUTION: ("slots", Verdict.DUPLICATE, Verdict.DUPLICATE_REPAIR),
    PacketType.RESULT: ("result_records", Verdict.DUPLICATE_RESULT, Verdict.DUPLICATE_REPAIR_RESULT),
}


class _Refused(Exception):
    """A packet's way ends here, with a verdict."""


def has(ranks: NDArray[np.uint64], rank: int) -> bool:
    return bool(int(ranks[rank >> 6]) >> (rank & 63) & 1)


def put(ranks: NDArray[np.uint64], rank: int) -> None:
    ranks[rank >> 6] |= np.uint64(1 << (rank & 63))


def within(some: NDArray[np.uint64], all_: NDArray[np.uint64]) -> bool:
    return not (some & ~all_).any()


def rounding_bits(seq: int, op: int, sender: int) -> int:
    """By what a contribution is rounded into a sum, u32."""
    h = (seq ^ op * 0x9E3779B1) + sender * 0x7FEB352D & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


class _Packet:
    """Fields of the header as integers, of a whole packet."""

    def __init__(self, data: bytes) -> None:
        self.data, self.head, self.payload = data, data[:HEADER_BYTES], data[HEADER_BYTES:]
        record = np.frombuffer(self.head, HEADER_DTYPE)[0]
        self.fields: dict[str, Any] = {name: record[name].item() for name in HEADER_DTYPE.names or ()}
        self.scale = np.frombuffer(self.head, HEADER_DTYPE)["scale"].astype(np.float32)
        self.codes = len(self.payload) * (2 if self.flags & Flag.HALVES else 1)

    def __getattr__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def row_packet(self) -> bool:
        return self.type in _ROWS

    @property
    def stale(self) -> Verdict:
        return Verdict.STALE_OP if self.type == PacketType.CONTRIBUTION else Verdict.STALE_RESULT

    @property
    def future(self) -> Verdict:
        return Verdict.FUTURE_OP if self.type == PacketType.CONTRIBUTION else Verdict.FUTURE_RESULT


class ReferenceTables:
    """See ``Tables``."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        self.control = arrays["control"][0]
        self.width = arrays["results"].shape[1]
        self._events: list[tuple[int, int, int]] = []
        self._controls: list[bytes] = []
        self._now = 0

    def seal(self, op: int, seq: int, rows: int) -> None:
        locks = self.arrays["slot_locks"]
        for at in range(seq, seq + min(rows, len(locks))):
            locks[at % len(locks)]["sealed_op"] = op

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        self.arrays["keys"].view(np.uint64)[epoch % 2, : len(key)] = key

    @property
    def source(self) -> Self:
        return self

    def take(self) -> list[tuple[int, int, int]]:
        out, self._events = self._events, []
        return out

    def take_controls(self) -> list[bytes]:
        out, self._controls = self._controls, []
        return out

    def take_in(
        self, data: int, length: int, segment: int, source: int, now: int, marked: bool, echoes: int, room: int
    ) -> int:
        words, step = tuple((ctypes.c_uint32 * 4).from_address(source)), segment or max(length, 1)
        out, count = (ctypes.c_uint32 * (2 * room)).from_address(echoes), 0
        self._now = now
        for start in range(0, max(length, 1), step):
            packet = ctypes.string_at(data + start, min(step, length - start))
            echo = self._packet(packet, words, marked)
            if echo and count < room:
                ctypes.memmove(data + start, echo, len(echo))
                out[2 * count], out[2 * count + 1] = start, len(echo)
                count += 1
        return count

    # -- one packet ---------------------------------------------------------------------------------------------------

    def _packet(self, data: bytes, source: tuple[int, ...], marked: bool) -> bytes:
        """Takes a packet in and counts its verdict; the echo, where it is a probe."""
        sender, echo = UNKNOWN_SENDER, b""
        try:
            p = self._trusted(data, source)
            sender = p.sender
            if p.type == PacketType.PROBE and p.owner == self.control["rank"]:
                echo = self._echo(p)
            verdict = self._taken(p)
        except _Refused as refused:
            verdict = refused.args[0]
        if marked and sender != UNKNOWN_SENDER and verdict != Verdict.ECHO_TAKEN:
            self.arrays["peer_states"][sender]["marked"] += 1
        self._count(sender, verdict)
        return echo

    def _count(self, sender: int, verdict: Verdict) -> None:
        self.arrays["ledger"]["verdict"][sender, verdict] += 1

    def _trusted(self, data: bytes, source: tuple[int, ...]) -> _Packet:
        """kernel-2 to kernel-9."""
        c, length = self.control, len(data) - HEADER_BYTES
        if length < 0 or length % ROW_STEP or length > self.width:
            raise _Refused(Verdict.BAD_LENGTH)
        p = _Packet(data)
        if not length and p.row_packet:
            raise _Refused(Verdict.BAD_LENGTH)
        if p.version != VERSION:
            raise _Refused(Verdict.BAD_VERSION)
        if not PacketType.CONTRIBUTION <= p.type <= max(PacketType):  # the hole between is let through, and ignored
            raise _Refused(Verdict.BAD_TYPE)
        if not c["active"]:
            raise _Refused(Verdict.INACTIVE)
        if p.cookie != c["cookie"]:
            raise _Refused(Verdict.WRONG_COOKIE)
        peer = self.arrays["peers"][p.sender]
        if p.sender == c["rank"] or p.sender >= c["ranks"] or not (peer["address"] or peer["prefix"][0]):
            raise _Refused(Verdict.UNKNOWN_RANK)
        if source != (*peer["prefix"].tolist(), int(peer["address"])):
            raise _Refused(Verdict.WRONG_ADDRESS)
        tagged = bool(c["tagged"])
        if p.check != self._proof(p.head, p.payload, tagged=tagged):
            raise _Refused(Verdict.FORGED if tagged else Verdict.CORRUPT)
        return p

    def _proof(self, head: bytes, payload: bytes, *, tagged: bool) -> int:
        if not tagged:
            return check_reference(head, payload)
        epoch = int(np.frombuffer(head, HEADER_DTYPE)["flags"][0]) & Flag.EPOCH != 0
        return tag_reference(head, payload, self.arrays["keys"].view(np.uint64)[int(epoch)])

    def _echo(self, p: _Packet) -> bytes:
        """kernel-18: a probe turned round."""
        head = np.frombuffer(bytearray(p.head), HEADER_DTYPE)
        head["type"], head["owner"], head["sender"] = PacketType.ECHO, p.sender, self.control["rank"]
        head["seq"] = self.arrays["peer_states"][p.sender]["marked"]
        head["check"] = self._proof(head.tobytes(), p.payload, tagged=bool(self.control["tagged"]))
        return head.tobytes() + p.payload

    def _taken(self, p: _Packet) -> Verdict:
        """kernel-10 to kernel-18."""
        c = self.control
        if p.type in (PacketType.PROBE, PacketType.ECHO):
            return self._probed(p)
        if p.owner != (p.sender if p.type == PacketType.RESULT else c["rank"]):
            raise _Refused(Verdict.NOT_FOR_THIS_RANK)
        if p.row_packet:
            self._fits(p)
        self._mark(p)
        if p.row_packet or p.type == PacketType.READY:
            self._in_window(p)
            self._hear(p)
        if p.type == PacketType.CONTRIBUTION:
            return self._contribute(p)
        if p.type == PacketType.RESULT:
            return self._publish(p)
        self._controls.append(p.data)
        return Verdict.CONTROL_PASSED

    def _probed(self, p: _Packet) -> Verdict:
        """kernel-18."""
        if p.owner != self.control["rank"]:
            return Verdict.NOT_FOR_THIS_RANK
        if p.type == PacketType.PROBE:
            return Verdict.REFLECTED
        if len(p.payload) < ROW_STEP:
            return Verdict.BAD_LENGTH
        sent, state = int.from_bytes(p.payload[:8], "big"), self.arrays["peer_states"][p.sender]
        if int(state["echoed"]) < sent <= self._now:
            state["echoed"], state["told"], state["rtt_ns"] = sent, p.seq, self._now - sent
        return Verdict.ECHO_TAKEN

    def _fits(self, p: _Packet) -> None:
        """kernel-11."""
        c = self.control
        if p.codes > self.width:
            raise _Refused(Verdict.BAD_LENGTH)
        if p.row >= p.rows:
            raise _Refused(Verdict.SLOT_OUT_OF_RANGE)
        if p.map_id != c["map_id" if serial(p.op, int(c["map_since"])) >= 0 else "map_before"]:
            raise _Refused(Verdict.WRONG_MAP)
        if p.type == PacketType.CONTRIBUTION and not 1 <= p.weight <= c["weight_cap"]:
            raise _Refused(Verdict.BAD_WEIGHT)

    def _mark(self, p: _Packet) -> None:
        """kernel-12."""
        state = self.arrays["peer_states"][p.sender]
        fresh, keyed = state["cookie"] != p.cookie, bool(self.control["tagged"])
        said = {"newest": p.op, "contributed": p.contributed, "published": p.published, "map_known": p.map_known}
        risen = {name: value for name, value in said.items() if fresh or serial(value, int(state[name])) > 0}
        # a recorded packet says nothing that its rank has not said since
        aged = keyed and not fresh and (not risen or serial(p.op, int(state["newest"])) < 0)
        other = {} if aged else {"deadline": p.deadline, "lateness": p.lateness}
        changed = {name: value for name, value in (risen | other).items() if fresh or state[name] != value}
        for name, value in changed.items():
            state[name] = value
        if changed:
            state["last_ns"], state["cookie"] = self._now, p.cookie

    def _ahead(self, op: int) -> bool:
        return serial(op, int(self.control["released"])) > OP_STEPS << OP_INDEX_BITS

    def _in_window(self, p: _Packet) -> None:
        """kernel-14."""
        c, sum_row = self.control, p.type == PacketType.CONTRIBUTION
        at = serial(p.seq, int(c["sum_base" if sum_row else "result_base"]))
        if serial(p.op, int(c["first_op"])) < 0 or at < 0:
            self._refuse_repeat(p)
            self._late(p)
            raise _Refused(p.stale)
        rows = len(self.arrays["slots" if sum_row else "result_records"])
        if at >= rows or (p.type != PacketType.RESULT and self._ahead(p.op)):
            raise _Refused(p.future)

    def _late(self, p: _Packet) -> None:
        """kernel-14: what is behind the window leaves its stamps."""
        if not (p.row_packet or (p.type == PacketType.READY and p.flags & Flag.LATE)):
            return
        r = self._record(p)
        if not self._is_of(r, p):
            if self._newer(r, p) or serial(p.op, int(self.control["released"])) > 0:
                return
            self._start(r, p, p.codes if p.row_packet else 0)
        if r["layout"] != p.layout:
            return
        if p.row_packet:
            r["late" if p.type == PacketType.CONTRIBUTION else "late_results"] += 1
        self._note(r, p, live=False)

    def _record(self, p: _Packet) -> Any:
        return self.arrays["ops"][op_slot(p.op)]

    @staticmethod
    def _is_of(r: Any, p: _Packet) -> bool:
        return bool(r["cookie"] == p.cookie and r["op"] == p.op)

    def _newer(self, r: Any, p: _Packet) -> bool:
        return bool(r["cookie"] == p.cookie and serial(int(r["op"]), p.op) > 0 and not self._ahead(int(r["op"])))

    def _start(self, r: Any, p: _Packet, codes: int) -> None:
        for name in r.dtype.names:
            r[name] = 0
        r["opened_ns"], r["layout"], r["codes"], r["first_sender"] = self._now, p.layout, codes, p.sender
        r["results_tag"], r["cookie"], r["op"] = p.cookie ^ p.op, p.cookie, p.op

    def _hear(self, p: _Packet) -> None:
        """kernel-15."""
        r = self._record(p)
        if p.type == PacketType.RESULT and self._ahead(p.op):
            return
        if not self._is_of(r, p):
            if self._newer(r, p):
                if p.type == PacketType.RESULT:
                    return
                raise _Refused(p.stale)
            self._start(r, p, 0)
            self._emit(Event.OPENED, p.op)
        if r["layout"] != p.layout or (p.row_packet and r["codes"] not in (0, p.codes)):
            raise _Refused(Verdict.LAYOUT_MISMATCH)
        if p.row_packet:
            r["codes"] = p.codes
        if p.flags & Flag.ABSTAIN:
            put(r["abstained"], p.sender)
        self._note(r, p, live=has(self.control["live"], p.sender))

    def _note(self, r: Any, p: _Packet, *, live: bool) -> None:
        """kernel-15: who was heard, and when; the tails."""
        c = self.control
        stamps = self.arrays["arrivals"][op_slot(p.op) * MAX_RANKS + p.sender]
        since = (self._now - int(r["opened_ns"])) // 1000 + 1
        if not has(r["heard"], p.sender):
            put(r["heard"], p.sender)
            stamps["first_us"] = since
            stamps["contributed_us"] = stamps["published_us"] = stamps["row_us"] = 0
            if live:
                r["heard_live"] += 1
                here = r["heard_live"] + 1
                reached = [own for own in (0, 1) if not r["majority_ns"][own] and here - own >= c["need"]]
                for own in reached:
                    r["majority_ns"][own] = self._now
                if reached:
                    self._emit(Event.MAJORITY, p.op)
        contribution, result = p.type == PacketType.CONTRIBUTION, p.type == PacketType.RESULT
        late = p.type == PacketType.READY and p.flags & Flag.LATE
        if (contribution or late) and not has(r["begun"], p.sender):
            put(r["begun"], p.sender)
            stamps["row_us"] = since
        last = p.row >= p.rows - max(1, p.rows // 100)
        for here, mark, tail, stamp, event in (
            (contribution, p.contributed, "tail_contributed", "contributed_us", Event.TAIL),
            (result, p.published, "tail_published", "published_us", Event.RESULTS_TAIL),
        ):
            if here and (last or serial(mark, p.op) >= 0) and not has(r[tail], p.sender):
                put(r[tail], p.sender)
                stamps[stamp] = since
                if live and within(c["live"], r[tail]):
                    self._emit(event, p.op)

    def _emit(self, kind: Event, op: int) -> None:
        self._events.append((int(kind), op, self._now))

    def _over(self, record: Any) -> bool:
        """Whether a row may be written over."""
        released = int(self.control["released"])
        return bool(record["cookie"] != self.control["cookie"]) or serial(int(record["op"]), released) <= 0

    def _refuse_repeat(self, p: _Packet) -> None:
        """A row that came before and lies there still: by itself, or on request."""
        if p.row_packet:
            name, once, asked = _ROWS[p.type]
            record = self.arrays[name][p.seq % len(self.arrays[name])]
            if self._is_of(record, p) and (name != "slots" or has(record["ranks"], p.sender)):
                raise _Refused(asked if p.flags & Flag.REPEAT else once)

    def _contribute(self, p: _Packet) -> Verdict:
        """kernel-16."""
        at = p.seq % len(self.arrays["slots"])
        record, r = self.arrays["slots"][at], self._record(p)
        same = self._is_of(record, p)
        self._refuse_repeat(p)
        if serial(p.op, int(self.arrays["slot_locks"][at]["sealed_op"])) <= 0:
            r["late"] += 1
            return Verdict.LATE
        if not same and record["cookie"] == p.cookie and serial(int(record["op"]), p.op) > 0:
            return Verdict.STALE_OP
        if not same and not self._over(record):
            return Verdict.FUTURE_OP
        row, before = self.arrays["sums"][at].view(np.uint16), None
        if same:
            before = Sum(row.astype(np.int64), *(int(record[name]) for name in ("exponent", "units", "count")))
        else:
            for name in record.dtype.names:
                record[name] = 0
            record["cookie"], record["op"], record["row"] = p.cookie, p.op, p.row
        weights = Weights(int(self.control["weight_cap"]), int(self.control["spare"]))
        rounding = rounding_bits(p.seq, p.op, p.sender)
        payload, bits = np.frombuffer(p.payload, np.uint8), 4 if p.flags & Flag.HALVES else 8
        total = added(before, payload, p.exponent, p.weight, weights, bits, rounding)
        row[: len(total.lanes)] = total.lanes
        record["exponent"], record["units"], record["count"] = total.exponent, total.units, total.count
        put(record["ranks"], p.sender)
        r["rows"] = r["rows"] or p.rows
        r["progress"] += 1
        if not record["counted"] and within(self.control["live"], record["ranks"]):
            record["counted"] = 1
            r["rows_complete"] += 1
            if r["rows_complete"] == r["rows"]:
                self._emit(Event.COMPLETE, p.op)
        return Verdict.ADDED if same else Verdict.STORED

    def _publish(self, p: _Packet) -> Verdict:
        """kernel-17."""
        at = p.seq % len(self.arrays["result_records"])
        record, present, r = self.arrays["result_records"][at], self.arrays["presence"][at], self._record(p)
        self._refuse_repeat(p)
        if record["cookie"] == p.cookie and serial(int(record["op"]), p.op) > 0:
            return Verdict.STALE_RESULT
        if not self._over(record):
            return Verdict.FUTURE_RESULT
        self.arrays["results"][at, : len(p.payload)] = np.frombuffer(p.payload, np.uint8)
        for name in ("count", "exponent", "owner", "row", "flags", "cookie", "op"):
            record[name] = p.fields[name]
        self.arrays["result_records"]["scale"][at] = p.scale[0]
        present["op"], present["cookie"] = p.op, p.cookie
        if self._is_of(r, p):
            r["results_in"] += 1
            wanted = self.arrays["expect_results"][op_slot(p.op)]
            if wanted["op"] == p.op and 0 < wanted["rows"] <= r["results_in"]:
                self._emit(Event.RESULTS_COMPLETE, p.op)
        return Verdict.RESULT_TAKEN
