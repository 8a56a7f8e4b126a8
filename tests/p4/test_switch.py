"""The P4 switch in bmv2: the table of cases, its own rules, and workers that take its results and average over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import cases
import p4_world
import packed
import switch_cases
from golden import golden_packets
from kernel_world import KernelWorld
from left_behind import nothing_left_behind as nothing_left_behind
from p4_team import p4_team
from support import patient, whole
from switch_cases import JOB, Step, contribution, ip_of, mac_of
from tailbound.switch import report
from tailbound.switch.job import mac_bytes
from tailbound.wire.address import words_of
from tailbound.wire.schema import HEADER_BYTES, Flag, PacketType, Verdict
from tailbound_lab.bench.frames import internet_checksum

pytestmark = pytest.mark.needs("root", "netns", "p4c", "bmv2", "thrift")
_U32 = 0xFFFFFFFF


@pytest.fixture(scope="module")
def world() -> Iterator[p4_world.World]:
    """A running switch with four ports; tests install their own jobs."""
    with p4_world.world() as made:
        yield made


def rows(count: int, job: switch_cases.Job = JOB) -> list[list[bytes]]:
    """``count`` neighbouring rows of an op, a contribution of each rank for each."""
    return [[contribution(r, job=job, seq=64 + i, row=i, rows=count) for r in range(job.ranks)] for i in range(count)]


def feed(world: p4_world.World, packet: bytes, job: switch_cases.Job = JOB) -> dict[int, bytes]:
    """A contribution into its sender's port; port -> the result that comes out."""
    step = Step(packet, None, port=job.port, destination=job.address)
    return p4_world.results(world.feed(packet[14], p4_world.frame_of(step, packet[14])), job)


def send(world: p4_world.World, listed: list[bytes], job: switch_cases.Job = JOB) -> list[dict[int, bytes]]:
    return [feed(world, packet, job) for packet in listed]


def counted(world: p4_world.World, place: int = 0) -> dict[Verdict, int]:
    """Verdicts of a job that are not zero, over all senders."""
    return {Verdict(v): int(n) for v, n in enumerate(world.switch.ledger(place).sum(0)) if n}


def test_a_restart_forgets_open_rows_and_sums_none_twice(world: p4_world.World) -> None:
    a, b, c = rows(1)[0]
    with world.jobs([JOB]):
        assert send(world, [a, b]) == [{}, {}]
        p4_world.forget(world.switch)
        assert send(world, [c, a]) == [{}, {}]
        (last,) = send(world, [b])
        assert last == dict.fromkeys(range(3), switch_cases.result(b, [c, a, b], "sums"))


def test_two_jobs_in_the_same_slots_never_mix(world: p4_world.World) -> None:
    """A mistake of the control plane costs rows, not sums."""
    other = replace(switch_cases.OTHER, base=JOB.base, port=JOB.port + 1)
    mine, theirs = rows(1)[0], rows(1, other)[0]
    with world.jobs([JOB, other]):
        assert send(world, mine[:2]) == [{}, {}]
        assert send(world, theirs[:1], other) == [{}]
        assert send(world, mine[2:]) == [{}]  # begins anew: the other job took the slot
        assert send(world, theirs[1:], other) == [{}]
        out = send(world, [*theirs[:1]], other)[0]
        assert out == dict.fromkeys(range(2), switch_cases.result(theirs[0], theirs, "sums", other))


def test_a_worker_sends_by_its_own_port_alone(world: p4_world.World) -> None:
    """Who has another port is not it, whatever address it sends with (kernel-24)."""
    with world.jobs([JOB]):
        assert world.feed(1, p4_world.frame_of(Step(contribution(0), None), 1)) == {}
        assert counted(world) == {Verdict.WRONG_ADDRESS: 1}


def of_service(data: bytes, service: int) -> bytes:
    """A frame with that in the second byte of its IP header."""
    ip = data[14:15] + bytes([service]) + data[16:24] + bytes(2) + data[26:34]
    return data[:14] + ip[:10] + internet_checksum(ip).to_bytes(2, "big") + ip[12:] + data[34:]


@pytest.mark.parametrize(("came", "leaves"), [(0xB9, 0xB9), (0xBA, 0xBA), (0xBB, 0xBA), (0xB8, 0xB8)], ids=hex)
def test_the_class_of_service_stays_and_a_mark_does_not(world: p4_world.World, came: int, leaves: int) -> None:
    """Of results and of echoes (kernel-26)."""
    with world.jobs([JOB]):
        for rank in range(JOB.ranks):
            frame_in = of_service(p4_world.frame_of(Step(contribution(rank), None), rank), came)
            out = world.feed(rank, frame_in)
        assert [data[15] for (data,) in out.values()] == [leaves] * JOB.ranks
        p4_world.results(out, JOB)  # whose IP checksums are right
        probe = contribution(1, codes=16, type=PacketType.PROBE)
        out = world.feed(1, of_service(p4_world.frame_of(Step(probe, None), 1), came))
        assert counted(world)[Verdict.REFLECTED] == 1
    ((echo,),) = out.values()
    assert (list(out), echo[:6], echo[15]) == ([1], mac_bytes(mac_of(1)), leaves)
    assert internet_checksum(echo[14:24] + bytes(2) + echo[26:34]) == int.from_bytes(echo[24:26], "big")
    head, body = packed.parse(echo[p4_world.HEADERS :])
    assert (head["type"][0], head["sender"][0], head["owner"][0]) == (PacketType.ECHO, JOB.ranks, 1)
    assert body == probe[HEADER_BYTES:]


def test_counters_by_port(world: p4_world.World) -> None:
    a, b, c = rows(1)[0]
    before = [world.switch.port_counters(port) for port in range(2)]
    with world.jobs([JOB]):
        send(world, [a, a, b, c, a])
    after = [world.switch.port_counters(port) for port in range(2)]
    change = [{name: y[name] - x[name] for name in x} for x, y in zip(before, after, strict=True)]
    fences = 2
    assert change[0] == {"ours": 3, "foreign": 3 * fences, "results": 1, "answers": 1, "lost_in": 0, "lost_out": 0}
    assert change[1] == {"ours": 1, "foreign": fences, "results": 1, "answers": 0, "lost_in": 0, "lost_out": 0}


def drawn(seed: int, count: int) -> list[int]:
    """The generator of ``p4/drops.p4``."""
    out = []
    for _ in range(count):
        seed ^= seed << 13 & _U32
        seed ^= seed >> 17
        seed ^= seed << 5 & _U32
        out.append(seed)
    return out


@pytest.mark.parametrize("way", ["in", "out"])
def test_the_drop_simulator_loses_what_its_seed_says(world: p4_world.World, way: str) -> None:
    count, seed, loss = 40, 12345, 0.3
    lost = [x < int(loss * 2**32) for x in drawn(seed, count)]
    alone = switch_cases.Job(ranks=1)
    p4_world.lose(world.switch, 0, way, loss, seed)
    try:
        with world.jobs([alone]):
            out = [feed(world, contribution(0, job=alone, seq=i), alone) for i in range(count)]
            stored = counted(world)
    finally:
        p4_world.lose(world.switch, 0, way, 0.0, 1)
    assert [not frames for frames in out] == lost
    assert 0 < sum(lost) < count
    assert stored == {Verdict.STORED: count - sum(lost) if way == "in" else count}


def test_the_switch_answers_for_its_address_where_it_has_a_job(world: p4_world.World) -> None:
    asker, switch = mac_bytes(mac_of(2)), mac_bytes(switch_cases.MAC)
    theirs, own = asker + bytes([198, 18, 0, 3]), bytes([198, 18, 252, 1])
    request = b"\xff" * 6 + asker + bytes.fromhex("0806 0001 0800 0604 0001") + theirs + bytes(6) + own
    with world.jobs([JOB]):
        ((answer,),) = world.feed(2, request).values()
    assert answer[:42] == asker + switch + bytes.fromhex("0806 0001 0800 0604 0002") + switch + own + theirs
    assert world.feed(2, request) == {at: [request] for at in (0, 1, 3)}


@pytest.mark.parametrize(
    "change",
    [{"fragment": 0x2000}, {"fragment": 1}, {"first": 0x46}, {"protocol": 6}],
    ids=["more fragments", "a fragment", "options", "TCP"],
)
def test_what_only_looks_like_ours_is_forwarded(world: p4_world.World, change: dict[str, int]) -> None:
    data = bytearray(p4_world.frame_of(Step(contribution(0), None, destination=ip_of(1)), 0))
    data[30:34] = bytes([198, 18, 252, 1])  # to the switch's address, by way of rank 1's MAC
    data[14] = change.get("first", data[14])
    data[20:22] = change.get("fragment", 0).to_bytes(2, "big")
    data[23] = change.get("protocol", data[23])
    with world.jobs([JOB]):
        assert world.feed(0, bytes(data)) == {1: [bytes(data)]}
        assert counted(world) == {}


def test_golden_packets_between_others_pass_bit_by_bit(world: p4_world.World) -> None:
    """All fields are parsed and written again on their way to another worker."""
    for golden in golden_packets():
        step = Step(golden.data, None, source=ip_of(0), destination=ip_of(2))
        p4_world.play(world, [JOB], step)


#: Rows of two whole chunks, of one and every kind of rest, of the rests alone, and of the shortest.
OTHER_LENGTHS = [
    pytest.param(case, id=f"{case.name} of {codes} codes")
    for codes in (512, 496, 240, 16)
    for case in switch_cases.cases(codes)
    if case.name in ("basic sum of three workers", "corrupt")
]
CASES = [pytest.param(case, id=case.name) for case in switch_cases.CASES]


@pytest.mark.parametrize("case", CASES + OTHER_LENGTHS)
def test_case(world: p4_world.World, case: switch_cases.Case) -> None:
    with world.jobs(case.jobs):
        for step in case.steps:
            p4_world.play(world, case.jobs, step)


@pytest.mark.needs("bpf", "bcc", "headers")
@pytest.mark.parametrize("codes", [cases.CODES, 48, 16])
def test_sums_are_taken(world: p4_world.World, codes: int) -> None:
    place = {"seq": cases.RESULT_SEQ, "row": 3, "contributed": cases.OP - 1}
    sent = [contribution(rank, codes, **place) for rank in range(JOB.ranks)]
    with world.jobs([JOB]):
        for packet in sent:
            out = world.feed(packet[14], p4_world.frame_of(Step(packet, None), packet[14]))
    (data,) = out[cases.RANK]
    kernel = KernelWorld("bcc")
    kernel.begin(JOB.ranks + 1)
    try:
        kernel.store.peers[JOB.ranks] = (words_of(switch_cases.ADDRESS)[0], 1, 0, 0)
        assert kernel.judge(data) == (Verdict.RESULT_TAKEN, JOB.ranks)
        assert kernel.judge(data) == (Verdict.DUPLICATE_RESULT, JOB.ranks)
        head, body = packed.parse(data[p4_world.HEADERS :])
        slot = cases.RESULT_SEQ % cases.RESULT_ROWS
        record = kernel.store.result_records[slot]
        assert kernel.store.results[slot, : 2 * codes].tobytes() == body
        assert (record["flags"], record["count"], record["owner"]) == (Flag.SUMS, JOB.ranks, JOB.ranks)
        assert (record["scale"], record["exponent"]) == (head["scale"][0], head["exponent"][0])
    finally:
        kernel.close()


@pytest.mark.parametrize(
    ("datapath", "width"),
    [("udp", 256), pytest.param("xdp", 1408, marks=[pytest.mark.thorough, pytest.mark.needs("bpf", "bcc", "headers")])],
)
def test_a_job_averages(datapath: str, width: int) -> None:
    with p4_team(3, patient(width=width), datapath=datapath) as (job, box):
        for op in range(3):
            inputs, results = job.averaged(9000, op)
            whole(results, inputs, 3e-3)
        assert job[0].datapath == f"switch-{datapath}"
        found = report.examine(box)
        (entry,) = found["jobs"]
        assert entry["slots"]["open"] == 0
        verdicts = set(entry["verdicts"])
        assert {"STORED", "ADDED"} <= verdicts <= {"STORED", "ADDED", "REFLECTED", "ANSWERED", "DUPLICATE"}
        assert f"{entry['slots']['final']} final" in "\n".join(report.lines(found))
