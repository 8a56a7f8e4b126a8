"""The shared table of cases through the kernel program, and random packets: judged as the udp datapath judges them."""

from __future__ import annotations

import random

import numpy as np
import pytest

import cases
import packed
from case_worlds import udp_before
from datapath_world import same_memory
from hostile import damaged, noise
from kernel_world import ACTIONS, DROP, PASS, KernelWorld
from loaders import both_loaders
from tailbound.transport.config import WIDTH_MOST
from tailbound.wire.schema import PacketType, Verdict
from tailbound_lab.bench.frames import frame
from twins import KINDS, REPLAYED, Attack, Twins


def check_case(world: KernelWorld, case: cases.Case, *, armed: bool = False) -> None:
    world.begin(registered=case.registered)
    world.prepare(case, armed=armed)
    sums, results = world.store.sums.copy(), world.store.results.copy()
    assert world.take(case.packet, case.source) == (case.verdict, case.sender), case.name
    assert world.action == ACTIONS.get(case.verdict, DROP), case.name
    if case.events is not None:
        assert tuple(kind for kind, _, _ in world.events()) == case.events, case.name
    assert (world.store.sums != sums).any() == (case.verdict in (Verdict.STORED, Verdict.ADDED)), case.name
    assert (world.store.results != results).any() == (case.verdict == Verdict.RESULT_TAKEN), case.name
    if case.verdict != Verdict.REFLECTED:
        assert world.back == world.frame_of(case.packet, case.source), case.name
    other = udp_before(case, armed=armed, ipv6=world.ipv6)
    other.take(case.packet, case.source)
    same_memory(world, other)


@both_loaders
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(make, case: cases.Case) -> None:
    check_case(make(), case)


@pytest.mark.parametrize(
    ("keyed", "ipv6", "every"), [(True, False, 1), (False, True, 2), (True, True, 8)],
    ids=["tags", "IPv6", "tags over IPv6"],
)  # fmt: skip
def test_cases_of_other_jobs(make, keyed: bool, ipv6: bool, every: int) -> None:
    """They hold in a job with a key (auth-1, auth-2), with FORGED for what is damaged, and over IPv6."""
    world = make(ipv6=ipv6)
    for case in cases.CASES[::every]:
        check_case(world, cases.with_tags(case) if keyed else case, armed=keyed)


def test_not_linear(make) -> None:
    """A frame that does not lie in one piece is none of ours to sum: counted under its own reason (kernel-2)."""
    world = make(width=WIDTH_MOST)
    data = packed.packet(packed.header(type=PacketType.CONTRIBUTION, cookie=cases.COOKIE), bytes(4096))
    assert world.take(data, 1) == (Verdict.NOT_LINEAR, 256)
    assert not world.store.sums.any()


# -- random, mutated and hostile packets: counted by reason, never summed ----------------------------------------------


#: Per loader; 100,000 in all.
RANDOM, MUTATED = 25_000, 25_000


@both_loaders
def test_never_summed(make) -> None:
    """Every random or damaged frame to our port is counted once, and nothing reaches a sum or a record."""
    world = make()
    world.store.control["active"] = 1
    rng = random.Random(11)
    seeds = [cases.contribution(s, row=s) for s in (1, 2, 3)] + [cases.result(2), cases.ready(3)]
    whole = [world.frame_of(data) for data in seeds]
    passed = 0
    for _ in range(RANDOM):
        there = cases.ip_of(rng.randrange(1, 4))
        passed += world.run(frame(noise(rng), there, cases.ip_of(0), cases.PORT, cases.PORT)) == PASS
    for _ in range(MUTATED):
        passed += world.run(damaged(rng, whole)) == PASS
    counts = world.counted()
    assert sum(counts.values()) + passed == RANDOM + MUTATED
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


@pytest.mark.parametrize("length", [cases.WIDTH, 112])
def test_a_wrong_bit_is_seen_wherever_it_is(make, length: int) -> None:
    """Of rows that would be stored, added or copied, and of rows that are there. Rule: kernel-9."""
    attack = Attack(make(), keyed=False, length=length)
    attack.send(random.Random(9), 2000)
    attack.end()
    assert attack.counts["flipped", Verdict.CORRUPT] > 1000
