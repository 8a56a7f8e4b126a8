"""The shared table of cases through the kernel program, and random packets: judged as the udp datapath judges them."""

from __future__ import annotations

import random

import numpy as np
import pytest

import cases
from case_worlds import ACTIONS, prepare, udp_after
from hostile import bad_head, damaged, noise
from kernel_world import DROP, HEADERS, PASS, same_memory
from loaders import both_loaders
from tailbound.transport.config import WIDTH_MOST
from tailbound.wire import packets
from tailbound.wire.schema import PacketType, Verdict
from tailbound_lab.bench.frames import frame
from twins import KINDS, REPLAYED, Attack, Twins


@both_loaders
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(make, case: cases.Case) -> None:
    world = make(registered=case.registered)
    prepare(world, case)
    sums, results = world.store.sums.copy(), world.store.results.copy()
    assert world.take(case.packet, case.source) == (case.verdict, case.sender)
    assert world.action == ACTIONS.get(case.verdict, DROP)
    if case.events is not None:
        assert tuple(kind for kind, _, _ in world.ring.drain()) == case.events
    assert (world.store.sums != sums).any() == (case.verdict in (Verdict.STORED, Verdict.ADDED))
    assert (world.store.results != results).any() == (case.verdict == Verdict.RESULT_TAKEN)
    if case.verdict != Verdict.REFLECTED:
        assert world.back == world.frame_of(case.packet, case.source)
    same_memory(world, udp_after(case))


def test_cases_with_tags(make) -> None:
    """They hold in a job with a key (auth-1, auth-2), with FORGED for what is damaged."""
    world = make()
    for case in map(cases.with_tags, cases.CASES):
        world.begin(registered=case.registered)
        prepare(world, case, armed=True)
        assert world.take(case.packet, case.source) == (case.verdict, case.sender), case.name
        assert world.action == ACTIONS.get(case.verdict, DROP), case.name
        same_memory(world, udp_after(case, armed=True))
        if case.verdict == Verdict.REFLECTED:
            assert packets.parse(world.back[HEADERS:], cases.KEYS) is not None


@pytest.mark.parametrize("keyed", [False, True], ids=["check", "tag"])
def test_cases_over_ipv6(make, keyed: bool) -> None:
    """In a job over IPv6, whose ranks' addresses end in four bytes of 0: as over IPv4."""
    world = make(ipv6=True)
    for plain in cases.CASES[:: 8 if keyed else 2]:
        case = cases.with_tags(plain) if keyed else plain
        world.begin(registered=case.registered)
        prepare(world, case, armed=keyed)
        assert world.take(case.packet, case.source) == (case.verdict, case.sender), case.name
        assert world.action == ACTIONS.get(case.verdict, DROP), case.name
        if case.verdict != Verdict.REFLECTED:
            assert world.back == world.frame_of(case.packet, case.source), case.name
        same_memory(world, udp_after(case, armed=keyed, ipv6=True))


def test_probe_comes_back_whole(make) -> None:
    """The echo is a packet of its own right: addresses turned, check right, IP checksum right, UDP checksum absent.

    Rule: kernel-18.
    """
    world = make()
    probe = cases.control_packet(PacketType.PROBE, bytes(range(16)), sender=2)
    world.take(probe)
    there = frame(b"", cases.ip_of(2), cases.ip_of(cases.RANK), cases.PORT, cases.PORT)
    assert world.back[:6] == there[6:12]
    assert world.back[6:12] == there[:6]
    assert world.back[26:30] == there[30:34]
    assert world.back[30:34] == there[26:30]
    assert sum(int.from_bytes(world.back[i : i + 2], "big") for i in range(14, 34, 2)) % 0xFFFF == 0
    assert world.back[40:42] == b"\0\0"
    parsed = packets.parse(world.back[HEADERS:])
    assert parsed is not None
    head, payload = parsed
    assert (head["type"][0], head["sender"][0], head["owner"][0]) == (PacketType.ECHO, cases.RANK, 2)
    assert payload == bytes(range(16))


def _marked(data: bytes) -> bytes:
    """The frame as a router leaves it that marks: CE, and the IP checksum made for it."""
    head = bytearray(data[14:34])
    head[1] |= 3
    head[10:12] = b"\0\0"
    total = sum(int.from_bytes(head[i : i + 2], "big") for i in range(0, 20, 2))
    total = (total & 0xFFFF) + (total >> 16)
    head[10:12] = (~((total & 0xFFFF) + (total >> 16)) & 0xFFFF).to_bytes(2, "big")
    return data[:14] + bytes(head) + data[34:]


def test_marks_are_counted_by_sender_and_told_by_echoes(make) -> None:
    """Rule: kernel-26."""
    world = make()
    row = cases.contribution(1)
    assert world.judge(_marked(world.frame_of(row))) == (Verdict.STORED, 1)
    assert world.judge(_marked(world.frame_of(row))) == (Verdict.DUPLICATE, 1)
    assert world.judge(world.frame_of(cases.contribution(2))) == (Verdict.ADDED, 2)
    world.judge(_marked(world.frame_of(cases.control_packet(PacketType.ECHO, bytes(7) + b"\1" + bytes(8), seq=9))))
    world.judge(_marked(world.frame_of(b"\0" + row[1:])))
    assert world.store.peer_states["marked"].tolist()[:3] == [0, 2, 0]
    assert world.store.peer_states["told"][1] == 9
    world.judge(_marked(world.frame_of(cases.control_packet(PacketType.PROBE, bytes(16)))))
    head, _ = packets.parse(world.back[HEADERS:])
    assert (head["type"][0], head["seq"][0]) == (PacketType.ECHO, 2)
    assert world.back[15] & 3 == 2  # the mark stays here
    assert sum(int.from_bytes(world.back[i : i + 2], "big") for i in range(14, 34, 2)) % 0xFFFF == 0
    assert world.store.peer_states["marked"][1] == 3


def test_not_linear(make) -> None:
    """A frame that does not lie in one piece is none of ours to sum: counted under its own reason (kernel-2)."""
    world = make(width=WIDTH_MOST)
    data = packets.packet(packets.header(type=PacketType.CONTRIBUTION, cookie=cases.COOKIE), bytes(4096))
    assert world.take(data, 1) == (Verdict.NOT_LINEAR, 256)
    assert not world.store.sums.any()


# -- random, mutated and hostile packets: counted by reason, never summed ----------------------------------------------


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
