"""The kernel program, the udp datapath or the model, two side by side: what packets do to both, packet by packet."""

from __future__ import annotations

import random
from collections import Counter

import cases
from datapath_world import same_memory
from hostile import damaged, hostile, plain
from kernel_world import HEADERS, KernelWorld
from tailbound.wire.packets import HEADER_DTYPE
from tailbound.wire.schema import FIRST_DROP, HEADER_BYTES, Verdict, serial_distance
from udp_world import World

_SEQ = HEADER_DTYPE.fields["seq"][1]  # type: ignore[index]
#: Packets between two moves of the host.
EVERY = 200
#: What a sender without the key may send.
KINDS = ("forged", "replayed", "spliced", "flipped")
#: Reasons besides FORGED that packets have whose header was recorded, joined or turned.
REPLAYED = (Verdict.DUPLICATE, Verdict.DUPLICATE_RESULT)


class Twins:
    """Both, in the same state.

    Attributes:
        counts: packets by verdict.
    """

    def __init__(self, kernel: KernelWorld | World, udp: World | None = None) -> None:
        self.kernel, self.udp = kernel, udp or World()
        self.counts: Counter[Verdict] = Counter()

    def take(self, data: bytes, source: int | None = None) -> Verdict:
        """One packet, of which both count and say the same."""
        mine, theirs = self.kernel.take(data, source), self.udp.take(data, source)
        assert mine == theirs, data.hex()
        ours, others = self.kernel.events(), self.udp.events()
        assert [event[:2] for event in ours] == [event[:2] for event in others], f"{mine}: {data.hex()}"
        self.udp.tables.take_controls()
        if isinstance(self.kernel, World):
            self.kernel.tables.take_controls()
        self.counts[mine[0]] += 1
        return mine[0]

    def live(self, rng: random.Random, count: int) -> None:
        """So many packets, some of them damaged, while the host goes on; the same memory at the end."""
        for i in range(count):
            moved = i // EVERY
            if i % EVERY == 0:
                self._move(rng, moved)
            data = rng.choice((hostile, plain))(rng, moved)
            sender = data[14]
            if rng.random() < 0.2 and len(data) > HEADER_BYTES:
                data = damaged(rng, [bytes(HEADERS) + data])[HEADERS:]
            if self.take(data, sender if 0 < sender < cases.RANKS else None) == Verdict.CORRUPT:
                self._leave(data)
        same_memory(self.kernel, self.udp)

    def _move(self, rng: random.Random, moved: int) -> None:
        """Seals what the op before has, and moves windows, live set and owner map."""
        at, op = cases.SUM_BASE + 4 * moved, cases.OP + moved
        live = rng.randrange(1, 8) << 1
        for world in (self.kernel, self.udp):
            world.seal(op - 1, at - 4, 6)
            world.control(
                sum_base=at, result_base=cases.RESULT_BASE + 4 * moved, released=op - 1,
                live=[live, 0, 0, 0], live_peers=live.bit_count(), need=live.bit_count() // 2 + 1,
            )  # fmt: skip

    def _leave(self, data: bytes) -> None:
        """What a damaged packet may leave: its codes, in its own row, where no rank reads any more (kernel-9)."""
        seq, control = int.from_bytes(data[_SEQ : _SEQ + 4], "big"), self.kernel.store.control
        for rows, records in (("sums", "slots"), ("results", "result_records")):
            record = getattr(self.kernel.store, records)
            at = seq % len(record)
            over = serial_distance(int(record["op"][at]), int(control["released"][0])) <= 0
            if record["cookie"][at] != control["cookie"][0] or over:
                getattr(self.udp.store, rows)[at] = getattr(self.kernel.store, rows)[at]


class Attack:
    """Both in the middle of an op, half of whose rows have come, and a sender without the key or, in a job without
    one, a line that turns bits.

    Attributes:
        counts: packets by kind and verdict.
    """

    def __init__(
        self, kernel: KernelWorld | World, udp: World | None = None, *, keyed: bool = True, length: int = cases.WIDTH
    ) -> None:
        self.twins = Twins(kernel, udp)
        for world in (kernel, self.twins.udp) if keyed else ():
            world.arm()
        self._kinds = KINDS if keyed else ("flipped",)
        self.taken, self.to_come = (genuine(rows, keyed, length) for rows in (range(8), range(8, 16)))
        self._take(self.taken)
        self.counts: Counter[tuple[str, Verdict]] = Counter()

    def _take(self, packets: list[bytes]) -> None:
        for data in packets:
            assert self.twins.take(data) < FIRST_DROP

    def send(self, rng: random.Random, count: int) -> None:
        """So many packets. None is taken, each is counted alike by both, and nothing that anybody may read changes."""
        before = self._memory()
        for _ in range(count):
            kind = rng.choice(self._kinds)
            data = getattr(self, f"_{kind}")(rng)
            verdict = self.twins.take(data)
            assert verdict >= FIRST_DROP, f"{kind}: {data.hex()}"
            self.counts[kind, verdict] += 1
        assert self._memory() == before

    def _memory(self) -> dict[str, bytes]:
        store = self.twins.kernel.store
        out = {name: getattr(store, name).tobytes() for name in ("slots", "result_records", "presence", "peer_states")}
        for rows, records in (("sums", store.slots), ("results", store.result_records)):
            used = (records["cookie"] == cases.COOKIE) & (records["op"] == cases.OP)
            out[rows] = getattr(store, rows)[used].tobytes()
        return out

    def end(self) -> None:
        """Rows that were still to come are taken, and once."""
        self._take(self.to_come)

    def _forged(self, rng: random.Random) -> bytes:
        """Codes of its own: with a check, which needs no key, with a tag at random, or with that of a row."""
        data = bytearray(rng.choice(self.taken + self.to_come))
        data[HEADER_BYTES:] = rng.randbytes(len(data) - HEADER_BYTES)
        how = rng.randrange(3)
        if how == 1:
            data[HEADER_BYTES - 8 : HEADER_BYTES] = rng.randbytes(8)
        return cases.checked(bytes(data)) if how == 0 else bytes(data)

    def _replayed(self, rng: random.Random) -> bytes:
        return rng.choice(self.taken)

    def _spliced(self, rng: random.Random) -> bytes:
        """Header and tag of a row, or all but the tag, and the rest of another one."""
        one, other = rng.sample(self.taken + self.to_come, 2)
        at = rng.choice((HEADER_BYTES, HEADER_BYTES - 8))
        data = one[:at] + other[at:]
        return cases.flipped(data, 8 * HEADER_BYTES - 1) if data in self.taken + self.to_come else data

    def _flipped(self, rng: random.Random) -> bytes:
        data = rng.choice(self.taken + self.to_come)
        return cases.flipped(data, rng.randrange(8 * len(data)))


def genuine(rows: range, keyed: bool, length: int) -> list[bytes]:
    """Contributions and results of all other ranks to these rows, perhaps with tags of both epochs."""
    made = []
    for row in rows:
        for sender in range(1, cases.RANKS):
            made.append(cases.contribution(sender, length, seq=cases.SUM_BASE + row, row=row))
            place = cases.RESULT_BASE + cases.RANKS * row + sender
            made.append(cases.result(sender, length, seq=place, row=row))
    return [cases.tagged(data, data[14] & 1) for data in made] if keyed else made
