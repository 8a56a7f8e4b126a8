"""The switch's program by BPF_PROG_TEST_RUN: the protocol list, golden packets, and what it must never do.

Rule: kernel-24.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

import cases as worker
import switch_cases
from golden import golden_packets
from hostile import damaged, noise
from kernel_world import KernelWorld
from switch_cases import CASES, JOB, Case, Job, Step, contribution, expected, ip_of
from switch_world import DROP, HEADERS, PASS, REDIRECT, SwitchWorld, entry_of, mac_bytes
from tailbound.kernel.frames import frame
from tailbound.wire import packets
from tailbound.wire.schema import UNKNOWN_SENDER, Flag, PacketType, Verdict

Make = Callable[..., SwitchWorld]


def check_frame(back: bytes, job: Job) -> None:
    """What a result's frame has in common for all: from the switch, checksums right or absent."""
    assert back[6:12] == mac_bytes(switch_cases.MAC)
    assert back[26:30] == bytes(int(part) for part in job.address.split("."))
    assert back[34:38] == job.port.to_bytes(2, "big") * 2
    assert back[40:42] == b"\0\0"


def check_step(world: SwitchWorld, step: Step, number: int) -> None:
    before = world.frame_of(step)
    counted = world.feed(step)
    if step.verdict is None:
        assert (world.action, world.back, counted) == (PASS, before, {}), number
        return
    place = world.places.get(step.job.cookie, 0)
    want = {(place, step.sender, step.verdict): 1}
    if step.abandoned:
        want[place, step.sender, Verdict.ABANDONED] = step.abandoned
    assert counted == want, number
    sent = expected(step, "mean")
    if sent is None:
        assert (world.action, world.back) == (DROP, before), number
        return
    assert world.back[HEADERS:] == sent, number
    check_frame(world.back, step.job)
    answers = world.switch.port_counters(1)["answers"]
    assert world.action == REDIRECT, number
    assert world.back[0] == place
    assert answers - world.answers == (step.verdict == Verdict.ANSWERED)
    world.answers = answers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(make_switch: Make, case: Case) -> None:
    world = make_switch(case.jobs)
    for number, step in enumerate(case.steps):
        check_step(world, step, number)


@pytest.mark.parametrize("codes", [16, 48, 64, 112, 176, 256, 1408, 1392])
def test_lengths(make_switch: Make, codes: int) -> None:
    """Whole rounds, rests, and both: the same list for rows of other lengths."""
    world = make_switch(width=256 if codes <= 256 else 1408)
    packed = [contribution(rank, codes) for rank in range(3)]
    flush = contribution(1, codes, seq=switch_cases.SEQ + 1, flags=Flag.FLUSH)
    steps = [
        Step(packed[0], Verdict.STORED, 0),
        Step(packed[1], Verdict.ADDED, 1),
        Step(packed[2], Verdict.ADDED, 2, tuple(packed), (0, 1, 2)),
        Step(packed[1], Verdict.ANSWERED, 1, tuple(packed), (1,)),
        Step(flush, Verdict.STORED, 1, (flush,), (0, 1, 2)),
    ]
    for number, step in enumerate(steps):
        check_step(world, step, number)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16, 100, 255])
def test_means_are_those_of_plain_division(make_switch: Make, ranks: int) -> None:
    """Rows of as many workers, among them rows of the largest sums; flushed with every smaller count at random."""
    job = Job(ranks=ranks)
    world = make_switch((job,))
    rng = np.random.default_rng(ranks)
    for turn, low in enumerate((0, 0, 255, 250)):
        codes = rng.integers(low, 256, (ranks, 256), np.uint8)
        count = ranks if turn != 1 else 1 + int(rng.integers(ranks))
        for rank in range(count):
            head = packets.header(
                type=PacketType.CONTRIBUTION, cookie=job.cookie, op=5, sender=rank, owner=ranks, seq=turn, rows=4
            )
            head["flags"] = Flag.FLUSH if rank == count - 1 else 0
            data = packets.packet(head, codes[rank].tobytes())
            world.run(frame(data, ip_of(rank), job.address, job.port, job.port))
        assert world.action == REDIRECT
        total = codes[:count].astype(np.int64).sum(0)
        assert world.back[HEADERS + 64 :] == switch_cases.mean(total, count), (turn, count)


def test_golden(make_switch: Make) -> None:
    """A golden packet gets past the check, one of another check does not; nothing else differs."""
    world = make_switch(width=1408)
    for golden in golden_packets():
        fields = golden.fields
        rank = int(fields["sender"])
        job = Job(cookie=int(fields["cookie"]), ranks=min(rank + 1, 255))
        world.begin((job,))
        ranks = world.switch.maps.arrays["switch_ranks"]
        ranks["address"][:256], ranks["ifindex"][:256] = ranks["address"][0], ranks["ifindex"][0]
        world.switch.maps.arrays["switch_jobs"]["ranks"][0] = 256
        data = frame(golden.data, ip_of(0), job.address, job.port, job.port)
        world.run(data)
        assert Verdict.CORRUPT not in world.counted(), golden.name
        for bit in (0, 7, 31, 63):
            world.run(worker.flipped(data, 8 * (HEADERS + 56) + bit))
        assert world.counted()[Verdict.CORRUPT] == 4, golden.name


def test_a_worker_takes_the_result(make_switch: Make, make: Callable[..., KernelWorld]) -> None:
    """The worker's program, told of one rank more, takes what the switch sends; no rule is the switch's alone."""
    job = Job(ranks=worker.RANKS - 1, address=ip_of(worker.RANKS - 1))
    switch, receiver = make_switch((job,)), make()
    seq = worker.RESULT_BASE + 9
    sent = [contribution(rank, job=job, seq=seq, map_id=worker.MAP_ID) for rank in range(job.ranks)]
    for packet in sent:
        switch.feed(Step(packet, None, job=job, destination=job.address))
    copy = bytearray(switch.back)
    copy[30:34] = bytes(int(part) for part in ip_of(worker.RANK).split("."))  # as the device map's program does
    assert receiver.judge(bytes(copy)) == (Verdict.RESULT_TAKEN, job.ranks)
    place = seq % worker.RESULT_ROWS
    record = receiver.store.result_records[place]
    assert (record["count"], record["owner"], record["flags"]) == (job.ranks, job.ranks, Flag.SWITCHED)
    assert record["exponent"] == worker.NEED + job.headroom
    assert record["scale"] == switch_cases.scale_of(worker.EXPONENT)
    codes = receiver.store.results[place, : switch_cases.CODES].tobytes()
    assert codes == switch_cases.mean(switch_cases.sums(sent), job.ranks)


def test_probe_comes_back(make_switch: Make) -> None:
    world = make_switch()
    probe = contribution(1, 16, type=PacketType.PROBE)
    assert world.feed(Step(probe, Verdict.REFLECTED, 1)) == {(0, 1, Verdict.REFLECTED): 1}
    assert world.action == REDIRECT
    parsed = packets.parse(world.back[HEADERS:])
    assert parsed is not None
    assert (parsed[0]["type"][0], parsed[0]["sender"][0], parsed[0]["owner"][0]) == (PacketType.ECHO, JOB.ranks, 1)


def test_a_worker_sends_by_its_own_port_alone(make_switch: Make) -> None:
    """Who has another port is not it, whatever address it sends with (kernel-24)."""
    world = make_switch()
    world.switch.maps.arrays["switch_ranks"]["ifindex"][1] += 1
    check_step(world, Step(contribution(0), Verdict.STORED, 0), 0)
    check_step(world, Step(contribution(1), Verdict.WRONG_ADDRESS), 1)


def test_a_job_that_is_gone(make_switch: Make) -> None:
    """Its packets are nobody's and pass; another one in its place begins with empty rows."""
    world = make_switch()
    first = Step(contribution(0), Verdict.STORED, 0)
    check_step(world, first, 0)
    world.switch.drop(0)
    check_step(world, Step(contribution(1), None), 1)
    again = Job(cookie=JOB.cookie + 1)
    world.switch.put(0, entry_of(again))
    world.places = {again.cookie: 0}
    sent = [contribution(rank, job=again) for rank in range(3)]
    for number, step in enumerate(switch_cases._row(*sent, job=again)):
        check_step(world, step, number)


#: Per loader; 100,000 in all.
NOISE, MUTATED = 15_000, 35_000


def test_never_a_wrong_sum(make_switch: Make) -> None:
    """50,000 random and mutated frames a loader between the packets of rows: what is released is right to the bit."""
    world = make_switch()
    rng = random.Random(7)
    good = [[contribution(rank, seq=seq, row=seq % 16) for rank in range(3)] for seq in range(1, 9)]
    frames = [world.frame_of(Step(p, None)) for row in good for p in row]

    def any_bytes() -> bytes:
        return frame(noise(rng), ip_of(rng.randrange(3)), JOB.address, JOB.port, JOB.port)

    def mutated() -> bytes:
        data = damaged(rng, frames)
        return data[: rng.choice((len(data), len(data), rng.randrange(14, len(data))))]

    jobs = [any_bytes] * NOISE + [mutated] * MUTATED
    rng.shuffle(jobs)
    step = len(jobs) // 24
    for i in range(24):
        for make_one in jobs[i * step : (i + 1) * step]:
            world.run(make_one())
            assert world.action in (PASS, DROP)
        row, rank = divmod(i, 3)
        verdict = Verdict.ADDED if rank else Verdict.STORED
        summed = tuple(good[row]) if rank == 2 else ()
        check_step(world, Step(good[row][rank], verdict, rank, summed, (0, 1, 2) if summed else ()), i)
    counts = world.counted()
    assert counts[Verdict.CORRUPT] > MUTATED // 4
    trusted = world.ledger()[:, :UNKNOWN_SENDER].sum((0, 1))
    assert {Verdict(i) for i in np.flatnonzero(trusted)} == {Verdict.STORED, Verdict.ADDED}
