"""Random, mutated and hostile packets: counted by reason, never summed, and judged as the udp datapath judges them."""

from __future__ import annotations

import random

import numpy as np

import cases
from kernel_world import HEADERS, PASS, same_memory
from tailbound.kernel.frames import frame
from tailbound.wire.schema import Flag, PacketType, Verdict, op_label
from udp_world import World

#: Per loader; issue: at least 100,000 in all.
RANDOM, MUTATED, HEADS = 20_000, 25_000, 15_000
KINDS = [*PacketType, 0, max(PacketType) + 1, 255]


def test_never_summed(make) -> None:
    """60,000 frames a loader: every one to our port is counted once, and nothing reaches a sum or a record."""
    world = make()
    world.store.control["active"] = 1
    rng = random.Random(11)
    seeds = [cases.contribution(s, row=s) for s in (1, 2, 3)] + [cases.result(2), cases.ready(3)]
    whole = [bytearray(world.frame_of(data)) for data in seeds]
    passed = 0

    def noise() -> bytes:
        size = rng.choice((0, 8, 63, 64, 80, 64 + cases.CODES, 64 + cases.WIDTH, rng.randrange(1400)))
        return frame(rng.randbytes(size), cases.ip_of(rng.randrange(1, 4)), cases.ip_of(0), cases.PORT, cases.PORT)

    def mutated() -> bytes:
        data = rng.choice(whole).copy()
        for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
            at = rng.randrange(HEADERS, len(data))
            data[at] ^= rng.randrange(1, 256)
        return bytes(data)

    def bad_head() -> bytes:
        """Anything in Ethernet, IP and UDP; the check is wrong too, for most of those fields are not under it."""
        data = rng.choice(whole).copy()
        data[-1] ^= 1 + rng.randrange(255)
        for _ in range(rng.choice((1, 2, 4))):
            data[rng.randrange(12, HEADERS)] = rng.randrange(256)
        return bytes(data[: rng.choice((len(data), rng.randrange(14, len(data))))])

    for make_one, count in ((noise, RANDOM), (mutated, MUTATED), (bad_head, HEADS)):
        for _ in range(count):
            passed += world.run(make_one()) == PASS
    counts = world.counted()
    assert sum(counts.values()) + passed == RANDOM + MUTATED + HEADS
    assert min(counts) >= Verdict.BAD_LENGTH, counts
    assert counts[Verdict.CORRUPT] > MUTATED // 4
    assert {Verdict.BAD_LENGTH, Verdict.BAD_VERSION, Verdict.BAD_TYPE, Verdict.WRONG_COOKIE} <= counts.keys()
    assert not world.ledger()[:256].any(), "charged to a sender although the check was wrong"
    for name in ("slots", "sums", "results", "result_records", "presence", "ops", "arrivals", "peer_states"):
        assert not getattr(world.store, name).view(np.uint8).any(), name


def hostile(rng: random.Random) -> bytes:
    """A packet with its check right and fields drawn from what is near the borders of every rule."""
    kind = rng.choice([PacketType.CONTRIBUTION] * 6 + [PacketType.RESULT] * 4 + [PacketType.READY] * 2 + KINDS)
    sender = rng.choice((0, 1, 2, 3, 3, 2, 1, 4, 200))
    op = rng.choice(
        (cases.OP, cases.OP, cases.OP, cases.OP + 1, cases.OP - 1, op_label(7, 1), op_label(3, 257), op_label(1, 3), 5)
    )
    base = cases.SUM_BASE if kind == PacketType.CONTRIBUTION else cases.RESULT_BASE
    ring = cases.SUM_ROWS if kind == PacketType.CONTRIBUTION else cases.RESULT_ROWS
    rows = rng.choice((1, 4, 4, 4, 300))
    count = rng.choice((16, 128, 128, 128, 128, 128, 256, 0, 272))
    return cases.build(
        kind,
        cases.codes(rng.randrange(1000), count),
        sender=sender,
        cookie=rng.choice([cases.COOKIE] * 30 + [cases.COOKIE ^ 1]),
        op=op,
        layout=rng.choice([cases.LAYOUT] * 20 + [1]),
        owner=rng.choice((sender, cases.RANK) if kind == PacketType.RESULT else (cases.RANK,) * 9 + (2,)),
        seq=base + rng.choice((0, 1, 2, 3, 3, 2, 1, 0, ring - 1, ring, -1, 1 << 31)) & 0xFFFFFFFF,
        row=rng.choice((0, 1, 2, 3, 4, 299)),
        rows=rows,
        shift=rng.choice((0, 0, 0, 0, 1, 6, 7)),
        exponent=rng.choice([cases.EXPONENT] * 9 + [3]),
        need=rng.randrange(-60, 60),
        scale=rng.random(),
        count=rng.randrange(5),
        flags=rng.choice((0, 0, 0, Flag.ABSTAIN, Flag.NIBBLES)),
        contributed=rng.choice((0, op - 1, op, cases.OP)),
        published=rng.choice((0, op - 1, op, cases.OP)),
        deadline=rng.choice((0, 0, 9)),
        lateness=rng.choice((0, 0, 0, 2)),
        incast=rng.choice((0, 3)),
        map_id=rng.choice([cases.MAP_ID] * 9 + [cases.MAP_BEFORE]),
        map_known=rng.choice((0, 7, 8)),
    )


def test_judged_as_by_udp(make) -> None:
    """A long life of one job: the same verdict for every packet, the same events, the same memory at the end."""
    kernel, udp = make(), World()
    rng = random.Random(5)
    seen: set[Verdict] = set()
    for i in range(6000):
        if i % 500 == 499:  # the host moves on: seals, changes expectations, moves its windows
            at, live = cases.SUM_BASE + rng.randrange(4), rng.randrange(1, 8) << 1
            kernel.sealer.seal(cases.OP - 1, at, 2)
            udp.tables.seal(cases.OP - 1, at, 2)
            for world in (kernel, udp):
                world.store.expect[(at + 1) % cases.SUM_ROWS] = (cases.OP + 1, 3, 1)
                world.control(sum_base=cases.SUM_BASE + i // 2500, live=[live, 0, 0, 0])
        data = hostile(rng)
        mine, theirs = kernel.take(data), udp.take(data)
        assert mine == theirs, f"packet {i}"
        assert [k[:2] for k in kernel.ring.drain()] == [k[:2] for k in udp.tables.take_events()], f"packet {i}: {mine}"
        seen.add(mine[0])
    same_memory(kernel, udp)
    assert len(seen) > 20, seen
