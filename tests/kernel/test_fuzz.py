"""Random, mutated and hostile packets: counted by reason, never summed, and judged as the udp datapath judges them."""

from __future__ import annotations

import random

import numpy as np

import cases
from hostile import bad_head, damaged, hostile, noise
from kernel_world import PASS, same_memory
from tailbound.kernel.frames import frame
from tailbound.wire.schema import Verdict
from udp_world import World

#: Per loader; issue: at least 100,000 in all.
RANDOM, MUTATED, HEADS = 20_000, 25_000, 15_000


def test_never_summed(make) -> None:
    """60,000 frames a loader: every one to our port is counted once, and nothing reaches a sum or a record."""
    world = make()
    world.store.control["active"] = 1
    rng = random.Random(11)
    seeds = [cases.contribution(s, row=s) for s in (1, 2, 3)] + [cases.result(2), cases.ready(3)]
    whole = [world.frame_of(data) for data in seeds]
    passed = 0

    def any_bytes() -> bytes:
        return frame(noise(rng), cases.ip_of(rng.randrange(1, 4)), cases.ip_of(0), cases.PORT, cases.PORT)

    for make_one, count in (
        (any_bytes, RANDOM),
        (lambda: damaged(rng, whole), MUTATED),
        (lambda: bad_head(rng, whole), HEADS),
    ):
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
