"""Two CPUs at once: the same slots, op records and result rows; and seals against packets in flight.

Threads are pinned and stay in the kernel (the benchmark's program moves one packet through ranks, rows and ops), so
that they really meet; both go through the same packets, so that every one of them is there twice.
"""

from __future__ import annotations

import itertools
import os
import threading
import time

import numpy as np
import pytest

import cases
from kernel_world import KernelWorld
from tailbound.wire.schema import OP_INDEX_BITS, OP_STEPS, Event, Verdict, op_slot

RANK_BY_RANK, ROW_BY_ROW = 1, 2
ROWS = 64
OP = 0x00000400
SENDERS = 255

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")


class Runner(threading.Thread):
    """Repeats a frame on a CPU of its own, once every runner has come to the barrier."""

    def __init__(self, world: KernelWorld, cpu: int, data: bytes, repeat: int, barrier: threading.Barrier) -> None:
        super().__init__()
        self.args = (world, cpu, data, repeat, barrier)
        self.start()

    def run(self) -> None:
        world, cpu, data, repeat, barrier = self.args
        os.sched_setaffinity(0, {cpu})
        barrier.wait()
        world.run(data, repeat)


def together(world: KernelWorld, frames: list[bytes], repeat: int) -> None:
    """Runs the frames on two CPUs at the same time, to the end."""
    barrier = threading.Barrier(len(frames), timeout=60)
    cpus = sorted(os.sched_getaffinity(0))
    runners = [Runner(world, cpu, data, repeat, barrier) for cpu, data in zip(cpus, frames, strict=False)]
    for runner in runners:
        runner.join()


def bench_world(make) -> KernelWorld:
    """255 senders in turn (the last of 256 ranks is this one), rings of 64 rows, bases at 0."""
    world = make(ranks=256, width=256, source="bench", sum_rows=ROWS, result_rows=ROWS)
    world.store.peers["address"] = world.store.peers["address"][1]
    world.store.peers["live"] = 1
    live = [2**64 - 1] * 3 + [2**63 - 1]
    world.control(rank=255, sum_base=0, result_base=0, first_op=OP, live=live, live_peers=SENDERS, need=128)
    world.control(map_since=0)
    world.sealer.seal(OP - 1, 0, ROWS)
    return world


def frame_of(world: KernelWorld, data: bytes, turn: int) -> bytes:
    """The UDP source port tells the benchmark's program how to move on."""
    frame = bytearray(world.frame_of(data, 1))
    frame[34:36] = turn.to_bytes(2, "big")
    return bytes(frame)


@needs_two
def test_same_slots_and_ops(make) -> None:
    """Rules: kernel-15, kernel-16."""
    world = bench_world(make)
    fields = {"owner": 255, "seq": 0, "row": 0, "rows": ROWS, "contributed": OP - 1}
    data = cases.contribution(0, 256, op=OP, **fields)
    frame = frame_of(world, data, RANK_BY_RANK)
    # The program moves on before it takes the packet, so the first rank comes again at the end, in the next op.
    repeat = SENDERS * ROWS - 1
    together(world, [frame, frame], repeat)
    counts = world.counted()
    assert counts.pop(Verdict.STORED) == ROWS
    assert counts.pop(Verdict.ADDED) == repeat - ROWS
    assert counts.pop(Verdict.DUPLICATE) == repeat
    assert not counts
    codes = np.frombuffer(data[64:], np.uint8).astype(np.uint16)
    for slot in range(ROWS):
        senders = SENDERS - (slot == 0)
        assert np.array_equal(world.lanes(slot, 256), codes * senders), slot
        assert world.store.slots[slot]["count"] == senders
    op = world.store.ops[op_slot(OP)]
    assert (op["heard_live"], op["rows_complete"]) == (SENDERS, ROWS - 1)
    assert world.store.arrivals.reshape(-1, 256)[op_slot(OP)]["first_us"][:SENDERS].all()
    kinds = [kind for kind, _, _ in world.ring.drain()]
    assert kinds.count(Event.OPENED) == 1
    assert kinds.count(Event.MAJORITY) == 2


@needs_two
def test_a_record_that_a_newer_op_takes_is_not_of_another_layout(make) -> None:
    """A record is looked at without its lock: between its tag and its layout a newer op may have taken it."""
    world = make()
    span, layout = OP_STEPS << OP_INDEX_BITS, 7
    foreign = world.frame_of(cases.contribution(), port=cases.PORT + 1)
    cpus = sorted(os.sched_getaffinity(0))
    stored = 0

    def take(barrier: threading.Barrier, data: bytes, pause: int) -> None:
        os.sched_setaffinity(0, {cpus[1]})
        barrier.wait()
        world.run(foreign, pause)
        world.run(data)

    for lap in range(60):
        op = cases.OP + 2 * lap * span
        old = cases.contribution(op=op, layout=layout)
        new = cases.contribution(op=op + span, layout=layout + 1, sender=2, seq=cases.SEQ + 1, row=6)
        world.control(released=op)
        barrier = threading.Barrier(2, timeout=60)
        newer = threading.Thread(target=take, args=(barrier, world.frame_of(new), 1 + 61 * lap % 2500))
        newer.start()
        Runner(world, cpus[0], world.frame_of(old), 3000, barrier).join()
        newer.join()
        counts = world.counted()
        assert Verdict.LAYOUT_MISMATCH not in counts, lap
        stored = counts[Verdict.STORED]
    assert stored >= 60  # every newer op
    assert counts[Verdict.STALE_OP] > 0


@needs_two
def test_same_result_rows(make) -> None:
    """Two versions of every result at once: one of them is taken, whole, and the other one is the duplicate.

    Rule: kernel-17.
    """
    world = bench_world(make)
    frames = []
    for version in (1, 2):
        fields = {"op": OP, "seq": 0, "row": 0, "rows": ROWS, "published": OP - 1, "owner": 7}
        data = cases.build(2, bytes([version]) * 256, sender=7, scale=float(version), count=version, **fields)
        frames.append(frame_of(world, data, ROW_BY_ROW))
    laps = 50
    for lap in range(laps):
        together(world, frames, ROWS - 1)
        for position in range(1, ROWS):
            record = world.store.result_records[position]
            assert (world.store.results[position] == record["count"]).all(), (lap, position)
            assert record["scale"] == record["count"]
            assert world.store.presence[position]["op"] == OP + lap
        assert world.store.ops[op_slot(OP + lap)]["results_in"] == ROWS - 1
        frames = [frame_of(world, _next_op(frame, OP + lap + 1), ROW_BY_ROW) for frame in frames]
    assert world.counted() == {Verdict.RESULT_TAKEN: laps * (ROWS - 1), Verdict.DUPLICATE_RESULT: laps * (ROWS - 1)}


def _next_op(frame: bytes, op: int) -> bytes:
    version = frame[-1]
    fields = {"op": op, "seq": 0, "row": 0, "rows": ROWS, "published": op - 1, "owner": 7}
    return cases.build(2, bytes([version]) * 256, sender=7, scale=float(version), count=version, **fields)


@needs_two
def test_nothing_is_added_after_a_seal(make) -> None:
    """Seals while packets come in: what the host reads once the seal has returned never changes again (kernel-19)."""
    world = bench_world(make)
    cpus = sorted(os.sched_getaffinity(0))
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpus[1]})
    late = taken = 0
    try:
        until = time.monotonic() + 60
        for lap in itertools.count():
            if lap >= 60 and ((late and taken > 10000) or time.monotonic() > until):
                break
            op = OP + lap
            fields = {"owner": 255, "seq": 0, "row": 0, "rows": ROWS, "contributed": op - 1}
            frame = frame_of(world, cases.contribution(0, 256, op=op, **fields), RANK_BY_RANK)
            before = world.counted()
            runner = Runner(world, cpus[0], frame, SENDERS * ROWS - 1, threading.Barrier(1))
            middle = 1 + lap * 7 % (ROWS - 4)  # the runner is somewhere in its rows, at another place every lap
            while runner.is_alive() and world.store.slots[middle]["op"] != op:
                pass
            world.sealer.seal(op, middle - 1, 4)
            rows = slice(middle - 1, middle + 3)
            slots, sums = world.store.slots[rows].copy(), world.store.sums[rows].copy()
            runner.join()
            assert np.array_equal(world.store.slots[rows], slots), lap
            assert np.array_equal(world.store.sums[rows], sums), lap
            codes = np.frombuffer(frame[106:], np.uint8).astype(np.uint16)
            for row in range(middle - 1, middle + 3):
                if world.store.slots[row]["op"] == op:
                    assert np.array_equal(world.lanes(row, 256), codes * world.store.slots[row]["count"])
            after = world.counted()
            late += after.get(Verdict.LATE, 0) - before.get(Verdict.LATE, 0)
            taken += after[Verdict.ADDED] - before.get(Verdict.ADDED, 0)
            world.ring.drain()
    finally:
        os.sched_setaffinity(0, mine)
    assert late > 0, "no packet came after its seal: the test has not met its race"
    assert taken > 10000
