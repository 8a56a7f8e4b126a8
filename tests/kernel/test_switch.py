"""The switch's program by BPF_PROG_TEST_RUN: the protocol list, golden packets, and what it must never do.

Rule: kernel-24.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

import numpy as np
import pytest

import cases as worker
import packed
import switch_cases
from hostile import damaged, noise
from kernel_world import HEADERS_IPV6, KernelWorld
from loaders import both_loaders
from switch_cases import CASES, JOB, Case, Job, Step, contribution, expected, in_ipv6, ip_of
from switch_world import DROP, HEADERS, PASS, REDIRECT, SwitchWorld, entry_of
from tailbound.errors import ConfigError
from tailbound.switch.job import RankSpec, mac_bytes, parse_rank
from tailbound.wire.schema import HEADER_BYTES, UNKNOWN_SENDER, Flag, PacketType, Verdict
from tailbound_lab.bench.frames import frame, internet_checksum

Make = Callable[..., SwitchWorld]
#: Of a frame over IPv6: its addresses, and UDP's header.
_SOURCE, _DESTINATION, _UDP = 22, 38, 54


def summed(data: bytes) -> int:
    """The checksum of all that UDP's covers over IPv6 with that in it: 0 where it is right."""
    udp = data[_UDP:]
    covered = data[_SOURCE:_UDP] + len(udp).to_bytes(4) + bytes(3) + b"\x11" + udp
    return internet_checksum(covered + bytes(len(covered) % 2))


def check_frame(back: bytes, job: Job, ipv6: bool) -> None:
    """What a result's frame has in common for all: from the switch, checksums right or (over IPv4) absent."""
    at = _UDP if ipv6 else 34
    assert back[6:12] == mac_bytes(switch_cases.MAC)
    assert back[at : at + 4] == job.port.to_bytes(2, "big") * 2
    if ipv6:
        assert back[_SOURCE:_DESTINATION] == raw(job.address)
        assert back[at + 6 : at + 8] != bytes(2)
        assert summed(back) == 0
    else:
        assert back[26:30] == bytes(int(part) for part in job.address.split("."))
        assert back[40:42] == b"\0\0"


def raw(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, in_ipv6(address))


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
    assert world.back[HEADERS_IPV6 if world.ipv6 else HEADERS :] == sent, number
    check_frame(world.back, step.job, world.ipv6)
    answers = world.switch.port_counters(1)["answers"]
    assert world.action == REDIRECT, number
    assert world.back[0] == place
    assert answers - world.answers == (step.verdict == Verdict.ANSWERED)
    world.answers = answers


@both_loaders
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(make_switch: Make, case: Case) -> None:
    """Over IPv4 and IPv6."""
    for ipv6 in (False, True):
        world = make_switch(case.jobs, ipv6=ipv6)
        for number, step in enumerate(case.steps):
            check_step(world, step, number)


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_lengths(make_switch: Make, ipv6: bool) -> None:
    """Whole rounds, rests, and both: rows of the list in other lengths."""
    widest, rows = 1344 if ipv6 else 1408, ("duplicate after completion answered", "flush of a row nobody began")
    worlds = {width: make_switch(width=width, ipv6=ipv6) for width in (256, widest)}
    for codes in (16, 48, 64, 112, 176, 256, widest, widest - 16):
        for case in (case for case in switch_cases.cases(codes) if case.name in rows):
            world = worlds[256 if codes <= 256 else widest]
            world.begin((JOB,))
            for number, step in enumerate(case.steps):
                check_step(world, step, number)


@both_loaders
def test_every_mean_is_that_of_plain_division(make_switch: Make) -> None:
    """Every sum of every count, in full rows and, of some counts, in the steps behind the rounds of short ones."""
    world = make_switch((Job(ranks=255),), width=1408)
    for count in range(1, 256):
        all_means(world, count, 1408)
    for count in (1, 2, 3, 7, 64, 127, 254, 255):
        all_means(world, count, 48)


def all_means(world: SwitchWorld, count: int, codes: int) -> None:
    """Rows that hold every sum of ``count`` codes, written into the switch's memory, each released by a flush."""
    record, job = world.slots()[:1], Job(ranks=255)
    lanes = world.switch.maps.arrays["switch_sums"][0].view(np.uint16).reshape(-1, 2, 4)
    step = Step(contribution(0, codes, job=job, seq=16, flags=Flag.FLUSH), Verdict.FLUSHED, 0, job=job)
    data, head = world.frame_of(step), packed.parse(step.packet)
    assert head is not None
    for name in ("cookie", "seq", "op", "layout", "row", "rows"):
        record[name] = head[0][name]
    record["codes"], record["count"], record["ranks"] = codes, count, 1
    sums = np.arange(255 * count + 1)
    for at in range(0, len(sums), codes):
        row = np.zeros(codes, np.uint16)
        part = sums[at : at + codes]
        row[: len(part)] = part
        lanes[: codes // 8] = row.reshape(-1, 4, 2).transpose(0, 2, 1)
        record["final"] = 0
        assert world.run(data) == REDIRECT
        back = np.frombuffer(world.back, np.uint8, codes, HEADERS + HEADER_BYTES)
        assert np.array_equal(back[: len(part)], (part + count // 2) // count), (count, at)
        kept = world.switch.maps.arrays["switch_sums"][0].view(np.uint64)[: codes // 4 : 2]
        assert np.array_equal(np.ascontiguousarray(kept).view(np.uint8), back), (count, at)


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_a_worker_takes_the_result(make_switch: Make, make: Callable[..., KernelWorld], ipv6: bool) -> None:
    """The worker's program, told of one rank more, takes what the switch sends; no rule is the switch's alone."""
    job = Job(ranks=worker.RANKS - 1)
    switch, receiver = make_switch((job,), ipv6=ipv6), make(ipv6=ipv6)
    seq = worker.RESULT_BASE + 9
    sent = [contribution(rank, job=job, seq=seq, map_id=worker.MAP_ID) for rank in range(job.ranks)]
    for packet in sent:
        switch.feed(Step(packet, None, job=job, destination=job.address))
    assert receiver.take(switch.back[HEADERS_IPV6 if ipv6 else HEADERS :]) == (Verdict.RESULT_TAKEN, job.ranks)
    place = seq % worker.RESULT_ROWS
    record = receiver.store.result_records[place]
    assert (record["count"], record["owner"], record["flags"]) == (job.ranks, job.ranks, Flag.SWITCHED)
    assert record["exponent"] == worker.NEED + job.headroom
    assert record["scale"] == switch_cases.scale_of(worker.EXPONENT)
    codes = receiver.store.results[place, : switch_cases.CODES].tobytes()
    assert codes == switch_cases.mean(switch_cases.sums(sent), job.ranks)


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_a_probe_comes_back_as_an_echo(make_switch: Make, ipv6: bool) -> None:
    """Over IPv6 the device map's program gives copies their addresses and checksum; an echo has them already."""
    world, headers = make_switch(ipv6=ipv6), HEADERS_IPV6 if ipv6 else HEADERS
    for _ in range(2):
        probe = Step(contribution(1, 16, type=PacketType.PROBE), Verdict.REFLECTED, 1)
        assert world.feed(probe) == {(0, 1, Verdict.REFLECTED): 1}
    assert world.action == REDIRECT
    head, _ = packed.parse(world.back[headers:])  # type: ignore[misc]
    assert (head["type"][0], head["sender"][0], head["owner"][0]) == (PacketType.ECHO, JOB.ranks, 1)
    if ipv6:
        assert summed(world.back) == 0
        assert world.back[_SOURCE:_UDP] == raw(JOB.address) + raw(switch_cases.ip_of(1))
        check_step(world, Step(contribution(1, 32, type=PacketType.PROBE), Verdict.BAD_LENGTH, 1), 2)


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


@both_loaders
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


def test_entries_are_read_back(make_switch: Make) -> None:
    world = make_switch(ipv6=True)
    partly = Job(ranks=3, registered=(0, 2))
    world.begin((partly,))
    assert world.switch.entries() == {0: entry_of(partly, ipv6=True)}


def test_addresses_that_nobody_can_have_are_refused() -> None:
    assert parse_rank("FD00:0::1, 02:7b:00:00:00:01,eth1").address == "fd00::1"
    for address in ("::1", "::ffff:10.0.0.1", "fe80::1%eth0", "fd00::g", "10.0.0"):
        with pytest.raises(ConfigError, match="address"):
            RankSpec(address, "02:7b:00:00:00:01", "eth1")
