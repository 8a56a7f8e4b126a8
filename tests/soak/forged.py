"""Part four: packets of somebody who sees all of a job's, but lacks its key, to both datapaths.

Cookie, addresses, ranks, ops and places are right. Codes are made up (with a check, no tag, or one at random), rows are
recorded and sent again, headers and codes of two packets are joined, bits are turned. Not one may be summed, shown, or
change anything that is remembered; each is counted once, by its reason, and alike by both.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from kernel_world import HEADERS, KernelWorld
from soak.fed import Runner, compiled, gained, run
from soak.forge import MOST, ROOM, _draw, _mend, framed, heads_of, pool_of
from soak.packets import lacking as lacking
from soak.packets import loaders
from soak.part import Tell
from tailbound.datapath.ingest import ingest
from tailbound.wire.jit import Scalar
from tailbound.wire.schema import FIRST_DROP, HEADER_BYTES, UNKNOWN_SENDER, VERDICTS, Verdict
from udp_world import World

#: What an attacker does, in the order of ``_attack``.
KINDS = ("forged", "replayed", "spliced", "flipped")
#: Seconds before the end in which what was still to come is taken, and counts are told.
CLOSING = 3.0
#: Packets between two looks at all memory.
BATCH = 4096
_FIRST_DROP, _CHECK = int(FIRST_DROP), HEADER_BYTES - 8
#: Rows that ranks have sent before, and rows that they are still to send.
_BEFORE, _TO_COME = range(8), range(8, 16)
#: What both datapaths remember, besides the codes of rows.
_MEMORY = ("slots", "result_records", "presence", "ops", "peer_states")


def genuine(rows: range) -> list[bytes]:
    """Contributions and results of all other ranks to these rows, with tags of both epochs."""
    made = []
    for row in rows:
        for sender in range(1, cases.RANKS):
            made.append(cases.contribution(sender, cases.WIDTH, seq=cases.SUM_BASE + row, row=row))
            place = cases.RESULT_BASE + cases.RANKS * row + sender
            made.append(cases.result(sender, cases.WIDTH, seq=place, row=row))
    return [cases.tagged(data, data[14] & 1) for data in made]


@compiled
def _attack(
    state: NDArray[np.uint64],
    pools: Any,
    lengths: Any,
    payloads: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    sources: NDArray[np.int64],
    kinds: NDArray[np.int64],
    words: NDArray[np.uint64],
) -> None:
    """Fills ``payloads`` u8[n, MOST], ``sizes``, ``sources`` and ``kinds`` i64[n].

    ``pools`` are packets that have been taken, and those that are still to come; ``lengths`` theirs; ``words``: room,
    u64[ROOM].
    """
    for n in range(payloads.shape[0]):
        kind = _draw(state, 4)
        which = np.int64(0) if kind == 1 else _draw(state, 2)
        pool, size = (pools[0], lengths[0]) if which == 0 else (pools[1], lengths[1])
        base = _draw(state, pool.shape[0])
        data, length = payloads[n], size[base]
        for i in range(MOST):
            data[i] = pool[base, i]
        if kind == 0:
            for i in range(HEADER_BYTES, length):
                data[i] = np.uint8(1 + _draw(state, 255))
            how = _draw(state, 3)
            if how == 0:
                _mend(data, length, words)  # the check needs no key
            elif how == 1:
                for i in range(_CHECK, HEADER_BYTES):
                    data[i] = np.uint8(_draw(state, 256))
        elif kind == 2:
            other = pools[1][_draw(state, pools[1].shape[0])]
            first = np.int64(0)
            last = HEADER_BYTES  # header and tag of one, codes of the other
            how = _draw(state, 3)
            if how == 1:  # the tag alone
                first = _CHECK
            elif how == 2:  # all but the tag
                last = _CHECK
            same = True
            for i in range(first, last):
                data[i] = other[i]
            for i in range(length):
                same = same and data[i] == other[i]
            if same:
                data[_CHECK] ^= np.uint8(1)
        elif kind == 3:
            for _ in range(1 + _draw(state, 3)):
                data[_draw(state, length)] ^= np.uint8(1 << _draw(state, 8))
            same = True
            for i in range(length):
                same = same and data[i] == pool[base, i]
            if same:
                data[HEADER_BYTES] ^= np.uint8(1)
        sizes[n], kinds[n] = length, kind
        sources[n] = np.int64(pool[base, 14]) if kind != 2 else np.int64(data[14])


@compiled
def _feed(program: Any, kernel: Any, udp: Any, packets: Any, words: Any, clock: Scalar, counts: Any) -> Any:
    """Feeds packets to both; (number of the one that is not refused alike by both, or how many there are; verdicts)."""
    attr, back = program
    ledger, known = kernel
    context, udp_ledger, udp_known, buffer, echoes = udp
    frames, sizes, sources, kinds = packets
    for n in range(frames.shape[0]):
        length = sizes[n]
        named = np.int64(frames[n, HEADERS + 14])
        if run(attr, back, frames[n], HEADERS + length) < 0:
            return n, -1, -1
        for i in range(length):
            buffer[i] = frames[n, HEADERS + i]
        ingest(context, buffer, length, 0, words[sources[n]], clock + 1000 * n, False, echoes)
        ours = gained(ledger, known, cases.RANKS, named)
        theirs = gained(udp_ledger, udp_known, cases.RANKS, named)
        verdict = ours[1] % VERDICTS
        if ours != theirs or ours[0] != 1 or verdict < _FIRST_DROP:
            return n, ours[1], theirs[1]
        counts[kinds[n], verdict] += 1
    return frames.shape[0], -1, -1


class Attack:
    """Both datapaths in the middle of an op, half of whose rows have come, and somebody who sends to them."""

    def __init__(self, loader: str, seed: int) -> None:
        self.kernel, self.udp = KernelWorld(loader), World()
        self.kernel.arm()
        self.udp.arm()
        self.taken, self.to_come = genuine(_BEFORE), genuine(_TO_COME)
        self._take(self.taken)
        self.counts = np.zeros((len(KINDS), VERDICTS), np.int64)
        self._state, self._room = np.array([seed], np.uint64), np.zeros(ROOM, np.uint64)
        self._pools = [pool_of(packets) for packets in (self.taken, self.to_come)]
        self._heads = heads_of([cases.ip_of(r) for r in range(cases.RANKS + 1)], cases.ip_of(cases.RANK), cases.PORT)
        self._cpus = os.sched_getaffinity(0)
        self._runner = Runner(self.kernel.program)
        self._words = np.array([(0, 0, 0, cases.address_of(rank)) for rank in range(cases.RANKS + 1)], np.uint32)
        self._mine = self.kernel.store.ledger["verdict"].reshape(-1, UNKNOWN_SENDER + 1, VERDICTS)[self._runner.cpu]

    def _take(self, packets: list[bytes]) -> None:
        for data in packets:
            for world in (self.kernel, self.udp):
                verdict, sender = world.take(data)
                assert verdict < FIRST_DROP, (Verdict(verdict), sender)

    def _memory(self) -> dict[str, bytes]:
        """All that anybody may read: codes in rows that nobody has begun are nobody's (kernel-9)."""
        out = {}
        for world in (self.kernel, self.udp):
            store, side = world.store, type(world).__name__
            out |= {f"{name} of {side}": getattr(store, name).tobytes() for name in _MEMORY}
            for rows, records in (("sums", store.slots), ("results", store.result_records)):
                used = np.flatnonzero((records["cookie"] == cases.COOKIE) & (records["op"] == cases.OP))
                out[f"{rows} of {side}"] = getattr(store, rows)[used].tobytes()
        return out

    def batch(self, size: int = BATCH) -> str:
        """Sends so many packets; what is wrong, in words, or nothing."""
        payloads = np.zeros((size, MOST), np.uint8)
        sizes, sources, kinds = np.zeros((3, size), np.int64)
        frames = np.zeros((size, HEADERS + MOST), np.uint8)
        (one, its), (other, others) = self._pools
        _attack(self._state, (one, other), (its, others), payloads, sizes, sources, kinds, self._room)
        sources[sources > cases.RANKS] = cases.RANKS
        framed(self._heads, payloads, sizes, sources, frames)
        before, known = self._memory(), (self._mine.copy(), self.udp.ledger())
        udp = (
            self.udp.tables.context,
            self.udp.store.ledger["verdict"],
            known[1],
            np.zeros(MOST, np.uint8),
            self.udp.echoes,
        )
        done, ours, theirs = _feed(
            self._runner.context, (self._mine, known[0]), udp, (frames, sizes, sources, kinds), self._words,
            self.udp.clock, self.counts,
        )  # fmt: skip
        self.udp.clock += 1000 * size
        if done < size:
            kind, data = KINDS[kinds[done]], payloads[done, : sizes[done]].tobytes().hex()
            return f"a packet that was {kind} is counted as {ours} by the kernel and {theirs} by udp: {data}"
        now = self._memory()
        changed = [name for name, was in before.items() if was != now[name]]
        return f"what is remembered has changed: {', '.join(changed)}" if changed else ""

    def close(self) -> Counter[str]:
        """What was counted, by kind and reason. All that was still to come is taken afterwards, and once."""
        try:
            self._take(self.to_come)
        finally:
            self.kernel.close()
            os.sched_setaffinity(0, self._cpus)
        found: Counter[str] = Counter()
        for kind, row in zip(KINDS, self.counts, strict=True):
            found.update({f"{kind} {Verdict(verdict).name}": int(n) for verdict, n in enumerate(row) if n})
        return found


def work(number: int, seed: int, until: float, tell: Tell) -> None:
    """Attacks until it is told to end."""
    names = loaders()
    attack = Attack(names[number % len(names)], seed)
    while time.monotonic() < until - CLOSING:
        wrong = attack.batch()
        tell("packets", BATCH)
        if wrong:
            tell("found", wrong)
            return
    tell("by reason", 0)
    for reason, count in attack.close().items():
        tell(reason, count)


def said(counts: Counter[str]) -> str:
    """How far it is."""
    return f"{counts['packets']:,} packets without the key, none taken"


def closing(counts: Counter[str]) -> list[str]:
    """By what they were and why they were refused."""
    return [f"{name}: {count:,}" for name, count in sorted(counts.items()) if name.partition(" ")[0] in KINDS]
