"""Random, mutated and hostile packets: counted by reason, never summed, and judged as the udp datapath judges them."""

from __future__ import annotations

import random

import numpy as np

import cases
from hostile import bad_head, damaged, noise
from kernel_world import PASS
from loaders import both_loaders
from tailbound.wire.schema import Verdict
from tailbound_lab.bench.frames import frame
from twins import KINDS, REPLAYED, Attack, Twins

#: Per loader; issue: at least 100,000 in all.
RANDOM, MUTATED, HEADS = 20_000, 25_000, 15_000


@both_loaders
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
    twins = Twins(make())
    twins.live(random.Random(5), 3000)
    assert len(twins.counts) > 20, twins.counts
    assert min(twins.counts[v] for v in (Verdict.STORED, Verdict.ADDED, Verdict.RESULT_TAKEN, Verdict.CORRUPT)) > 50


def test_nothing_is_taken_without_the_key(make) -> None:
    """Rules: auth-1, auth-2."""
    attack = Attack(make())
    attack.send(random.Random(7), 2000)
    attack.end()
    reasons = {kind: {verdict for of, verdict in attack.counts if of == kind} for kind in KINDS}
    assert reasons["forged"] == {Verdict.FORGED}
    assert reasons["replayed"] == set(REPLAYED)
    assert Verdict.FORGED in reasons["spliced"] <= {Verdict.FORGED, *REPLAYED}
    assert attack.counts["flipped", Verdict.FORGED] > 400
