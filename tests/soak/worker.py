"""The worker's program and the udp datapath as twins, and a host that moves windows, seals, and begins jobs anew."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cases
from golden import golden_packets
from hostile import bad_head, hostile
from kernel_world import HEADERS, PASS, KernelWorld, address_of, ip_of, same_memory
from soak import fed
from soak.forge import MOST, framed, heads_of
from soak.life import Fault, Step
from tailbound.wire import packets
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import HEADER_BYTES, UNKNOWN_SENDER, VERDICTS, PacketType, Verdict, op_label, op_slot
from udp_world import World

#: Addresses: those of the ranks, and one that is nobody's.
ADDRESSES = [ip_of(rank) for rank in range(cases.RANKS)] + ["198.18.9.9"]
WORDS = np.array([(0, 0, 0, word) for word in (*map(address_of, range(cases.RANKS)), 0x0909_12C6)], np.uint32)
HEADS = heads_of(ADDRESSES, ip_of(cases.RANK), cases.PORT)


def adopted(data: bytes, sender: int) -> bytes:
    """A packet of another job as one of this: what says whose it is, is right."""
    head = np.frombuffer(data[:HEADER_BYTES], HEADER_DTYPE).copy()
    kind = int(head["type"][0])
    head["cookie"], head["sender"], head["map_id"] = cases.COOKIE, sender, cases.MAP_ID
    head["owner"] = sender if kind == PacketType.RESULT else cases.RANK
    head["op"] = cases.OP
    head["seq"] = (cases.SUM_BASE if kind == PacketType.CONTRIBUTION else cases.RESULT_BASE) + sender
    return packets.packet(head, data[HEADER_BYTES:MOST])


@functools.cache
def _known() -> tuple[bytes, ...]:
    """What every pool has in it: golden packets, as they are and as this job's, and those of the table of cases."""
    golden = [g.data for g in golden_packets()]
    mine = [adopted(data, 1 + i % 3) for i, data in enumerate(golden)]
    return (*golden, *mine, *(p for case in cases.CASES for p in (*case.before, case.packet)))


class Twins:
    """``life.Twins``."""

    length = 32
    ranks = (1, cases.RANKS)

    def __init__(self, loader: str) -> None:
        self.kernel = KernelWorld(loader)
        self._runner = fed.Runner(self.kernel.program)
        self.counts = np.zeros(VERDICTS, np.int64)
        self.foreign = 0
        self._buffer = np.zeros(MOST + 8, np.uint8)
        self.begin()

    def begin(self) -> None:
        """A new job."""
        self.kernel.begin()
        self.udp = World()
        store = self.kernel.store
        self._clock = time.monotonic_ns()  # as the program's: echoes of the future are refused
        self._ledger = store.ledger["verdict"].reshape(-1, UNKNOWN_SENDER + 1, VERDICTS)
        self._sums, self._results = store.sums.view(np.uint64), store.results.view(np.uint64)
        mine = self._ledger[self._runner.cpu]
        used = [(records["cookie"], records["op"]) for records in (store.slots, store.result_records)]
        used += [store.control["cookie"], store.control["released"]]
        self._seen = [mine, mine.copy(), self._sums, self._sums.copy(), self._results, self._results.copy(), *used]
        theirs = self.udp.store.ledger["verdict"]
        codes = self.udp.store.sums.view(np.uint64), self.udp.store.results.view(np.uint64)
        self._udp = (self.udp.tables.context, theirs, theirs.copy(), *codes, self._buffer, self.udp.echoes)

    def close(self) -> None:
        self.kernel.close()

    def packets(self, rng: random.Random) -> list[bytes]:
        return [*(hostile(rng) for _ in range(200)), *(_good(rng) for _ in range(300)), *_known()]

    def host(self, rng: random.Random) -> Host:
        return Host(rng)

    def frame_of(self, data: bytes) -> bytes:
        return self.kernel.frame_of(data)

    def feed(self, payloads: NDArray[np.uint8], sizes: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        frames = np.empty((len(payloads), HEADERS + MOST), np.uint8)
        framed(HEADS, payloads, sizes, sources, frames)
        batch = frames, sizes, sources
        self._clock += 1000 * len(payloads)
        at, wrong, ours, theirs = fed.feed(
            self._runner.context, tuple(self._seen), self._udp, batch, WORDS, self._clock, self.counts
        )
        if wrong:
            raise Fault(at, fed.words_of(wrong, ours, theirs))
        mine, udp = self.kernel.ring.drain(), self.udp.tables.take_events()
        self.udp.tables.take_controls()
        if [e[:2] for e in mine] != [e[:2] for e in udp]:
            raise Fault(len(payloads) - 1, f"EVENTS_DIFFER: {mine} and {udp}")

    def spoil(self, rng: random.Random, frames: Sequence[bytes], count: int) -> None:
        """Feeds the kernel frames that are damaged from Ethernet on; they may be anybody's, and nothing comes of them.

        Raises:
            Fault: one was taken, or counted twice, or changed what may be read.
        """
        for _ in range(count):
            data = bad_head(rng, frames)
            passed = self.kernel.run(data) == PASS
            named = data[HEADERS + 14] if len(data) >= HEADERS + HEADER_BYTES else UNKNOWN_SENDER
            counted, last, _ = fed.gained(self._seen[0], self._seen[1], cases.RANKS, named)
            if counted > 1 or passed == (counted == 1) or (counted and last % VERDICTS < Verdict.BAD_LENGTH):
                raise Fault(-1, f"SPOILT_FRAME counted {counted} times, {last}: {data.hex()}")
            if counted and last % VERDICTS == Verdict.CORRUPT:
                payload = np.frombuffer(data[HEADERS:], np.uint8).copy()
                fed.leave(tuple(self._seen), self._udp, payload, len(payload))
            if wrong := fed.strayed(tuple(self._seen)):
                raise Fault(-1, f"{fed.words_of(wrong, last, -1)}: {data.hex()}")
            self.foreign += passed
            if counted:
                self.counts[last % VERDICTS] += 1

    def do(self, step: Step) -> None:
        """What the host does, on both sides."""
        name, *values = step
        for world in (self.kernel, self.udp):
            if name == "seal":
                (world.sealer if world is self.kernel else world.tables).seal(*values)  # type: ignore[union-attr]
            elif name == "control":
                world.control(**values[0])
            else:
                place, *record = values
                getattr(world.store, name)[place] = tuple(record)

    def look(self) -> None:
        """Compares all that the two hold, and counters that no packet named.

        Raises:
            Fault: they differ.
        """
        try:
            same_memory(self.kernel, self.udp)
        except AssertionError as error:
            raise Fault(-1, f"MEMORY_DIFFERS: {str(error).splitlines()[0]}") from None
        elsewhere = np.delete(self._ledger, self._runner.cpu, 0).any()
        if elsewhere or not np.array_equal(self._seen[0], self._seen[1]):
            raise Fault(-1, "CHARGED_TO_ANOTHER: a counter rose that no packet named")
        if not np.array_equal(self._udp[1], self._udp[2]):
            raise Fault(-1, "CHARGED_TO_ANOTHER: in the udp datapath")


class Host:
    """What the host of a job may do between packets, at random; where its windows are."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.moved = np.zeros(5, np.int64)  #: as ``forge`` takes it
        self._active = True

    @property
    def op(self) -> int:
        """The op that most packets are about."""
        return cases.OP + int(self.moved[0])

    def acts(self) -> Iterator[Step]:
        """Some steps."""
        if not self._active:
            self._active = True
            yield "control", {"active": 1}
        if self._rng.randrange(4):
            yield self._move()
        for _ in range(self._rng.randrange(4)):
            yield self._rng.choice((self._seal, self._seal, self._expect, self._results, self._other))()

    def _seal(self) -> Step:
        at = cases.SUM_BASE + int(self.moved[1]) + self._rng.randrange(4)
        return "seal", (self.op + self._rng.choice((-1, -1, 0))) & 0xFFFFFFFF, at, self._rng.choice((1, 2, 2, 64))

    def _expect(self) -> Step:
        slot = (cases.SUM_BASE + int(self.moved[1]) + self._rng.randrange(4)) % cases.SUM_ROWS
        return "expect", slot, self.op + self._rng.choice((0, 0, 1)), self._rng.choice((3, cases.EXPONENT)), 1

    def _results(self) -> Step:
        op = self.op
        return "expect_results", op_slot(op), op, self._rng.choice((1, 2, 4))

    def _move(self) -> Step:
        """Rows have been taken out, and as a rule the op that they were of is over here."""
        self.moved[1] += self._rng.choice((1, 4, 8, 20))
        self.moved[2] += self._rng.choice((0, 4, 8, 20))
        self.moved[0] += self._rng.choice((0, 1, 1, 1, op_label(1, 0)))
        bases = {"sum_base": cases.SUM_BASE + int(self.moved[1]), "result_base": cases.RESULT_BASE + int(self.moved[2])}
        return "control", {"released": self.op - 1} | bases

    def _other(self) -> Step:
        return "control", self._rng.choice((self._live, self._live, self._map, self._job, self._odd))()

    def _live(self) -> dict[str, Any]:
        live = [r for r in (1, 2, 3) if self._rng.randrange(3)] or [1]
        return {"live": [sum(1 << r for r in live), 0, 0, 0], "live_peers": len(live)}

    def _map(self) -> dict[str, Any]:
        """Another owner map, from the next op on or at once."""
        self.moved[3] += 1
        newest = cases.MAP_ID + int(self.moved[3])
        return {"map_id": newest, "map_before": newest - 1, "map_since": self.op + self._rng.randrange(2)}

    def _job(self) -> dict[str, Any]:
        """Another job, in the memory of the one before."""
        self.moved[4] += 2
        return {"cookie": cases.COOKIE + int(self.moved[4])}

    def _odd(self) -> dict[str, Any]:
        group = address_of(cases.RANK) ^ self._rng.randrange(2)
        self._active = self._rng.randrange(3) > 0
        return self._rng.choice(
            ({"shift_cap": self._rng.randrange(7)}, {"group": group}, {"need": self._rng.randrange(1, 5)})
        ) | {"active": int(self._active)}


def _good(rng: random.Random) -> bytes:
    """A packet that this job's ranks may well send."""
    sender, at = rng.randrange(1, 4), rng.randrange(6)
    fields = {"op": cases.OP + rng.choice((0, 0, 0, 1)), "row": at % 4, "rows": rng.choice((1, 4, 4)) + at % 4}
    kind = rng.randrange(4)
    if kind < 2:
        return cases.contribution(sender, seq=cases.SUM_BASE + at, **fields)
    if kind < 3:
        return cases.result(sender, seq=cases.RESULT_BASE + at, **fields)
    return cases.ready(sender, op=fields["op"], contributed=cases.OP, published=cases.OP - 1)
