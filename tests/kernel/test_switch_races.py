"""Two CPUs in one switch: a flush against the last contribution, a newer generation against an older one.

All ranks send the same codes, so a row's mean is these codes whoever is in it, and anything else is a sum that does not
belong to its count. Threads stay in the kernel: a turntable in front of the program (``switch_bench.bpf.c``) moves each
CPU's packet from row to row.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from packed import header, packet
from tailbound.kernel import load, syscalls
from tailbound.kernel.maps import possible_cpus
from tailbound.kernel.switch import MAP_NAMES, Entry, Member, Sizes, Switch
from tailbound.wire.address import words_of
from tailbound.wire.schema import HEADER_BYTES, MAX_RANKS, OP_PER_STEP, Flag, PacketType, Verdict
from tailbound_lab.bench.frames import frame
from tailbound_lab.bench.program_run import run_xdp

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="missing capability 'two CPUs'")

SLOTS, WIDTH, RANKS, PORT, COOKIE = 1024, 256, 2, 7000, 0x7A11
SWITCH, WORKER = "198.18.252.1", "198.18.0.1"
CODES = np.random.default_rng(7).integers(1, 256, WIDTH, np.uint8).tobytes()
#: How the turntable moves a packet on: rank by rank and row by row, or row by row.
RANK_BY_RANK, ROW_BY_ROW = 1, 2
#: Laps at most until both sides have won.
LAPS = 300


class Turntable:
    """The switch with the turntable in front; one job of two workers, both at one address."""

    def __init__(self, loader: str) -> None:
        with contextlib.ExitStack() as stack:
            self.switch = Switch.make(Sizes(WIDTH, SLOTS, 64), loader)
            stack.callback(self.switch.close)
            fds = self.switch.maps.fds
            fds["switch_turn"] = syscalls.map_create(
                syscalls.MAP_TYPE_ARRAY, 4, HEADER_BYTES + 16, possible_cpus(), name="switch_turn"
            )
            defines, names = {"TB_WIDTH": WIDTH, "TB_PORTS": 64}, (*MAP_NAMES, "switch_turn")
            self._program = load.load("switch_bench.bpf.c", "tb_switch_bench", defines, names, fds, loader)
            stack.callback(os.close, self._program)
            members = (Member(WORKER, bytes(6), 1),) * RANKS
            self.switch.put(0, Entry(COOKIE, SWITCH, bytes(6), PORT, 0, SLOTS, 2, members))
            self.switch.maps.arrays["switch_ranks"]["ifindex"] = 1  # loopback, by which test runs come in
            self.close = stack.pop_all().close
        self.slots = self.switch.maps.arrays["switch_slots"]

    def together(self, *runs: tuple[int, int, Flag | int, int, int]) -> Counter[Verdict]:
        """Each on a CPU of its own: sender, first row, flags, turn, and repeats. Returns the verdicts."""
        before, barrier = self.switch.ledger(0).sum(0), threading.Barrier(len(runs), timeout=60)

        def body(cpu: int, sender: int, seq: int, flags: int, turn: int, repeat: int) -> None:
            os.sched_setaffinity(0, {cpu})
            head = header(
                type=PacketType.CONTRIBUTION, flags=flags, cookie=COOKIE, op=OP_PER_STEP, sender=sender, owner=RANKS,
                seq=seq, rows=MAX_RANKS, need=-3, exponent=-1, weight=1, count=RANKS,
            )  # fmt: skip
            data = packet(head, CODES)
            after = struct.pack("=IIII", words_of(WORKER)[0], words_of(SWITCH)[0], turn, RANKS)
            syscalls.map_update(
                self.switch.maps.fds["switch_turn"], struct.pack("=I", cpu), data[:HEADER_BYTES] + after
            )
            barrier.wait()
            run_xdp(self._program, frame(data, WORKER, SWITCH, PORT, PORT), repeat)

        cpus = sorted(os.sched_getaffinity(0))
        threads = [threading.Thread(target=body, args=(cpu, *run)) for cpu, run in zip(cpus, runs, strict=False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._check_rows()
        return Counter({Verdict(v): int(n) for v, n in enumerate(self.switch.ledger(0).sum(0) - before) if n})

    def _check_rows(self) -> None:
        """Every row is final, its count is that of its bitmap, and its mean is the codes."""
        assert self.slots["final"].all()
        assert self.slots["count"].tolist() == [int(word).bit_count() for word in self.slots["ranks"][:, 0]]
        kept = self.switch.maps.arrays["switch_sums"].view(np.uint64)[:, : WIDTH // 4 : 2]
        assert (np.ascontiguousarray(kept).view(np.uint8) == np.frombuffer(CODES, np.uint8)).all()


@pytest.fixture
def table(loader: str) -> Iterator[Turntable]:
    with contextlib.closing(Turntable(loader)) as made:
        yield made


def test_flush_against_the_last_contribution(table: Turntable) -> None:
    """Each row has one outcome: both are in it, or the flush alone; and the loser is told which."""
    both = Counter[Verdict]()
    for lap in range(LAPS):
        seq = lap * SLOTS
        gained = table.together((0, seq, Flag.FLUSH, ROW_BY_ROW, SLOTS), (1, seq, 0, ROW_BY_ROW, SLOTS))
        assert (table.slots["ranks"][:, 0] & 1).all()
        assert gained[Verdict.STORED] == SLOTS
        assert gained[Verdict.ADDED] == np.count_nonzero(table.slots["count"] == 2)
        assert gained[Verdict.ANSWERED] == np.count_nonzero(table.slots["count"] == 1)
        both += gained
        if lap >= 9 and both[Verdict.ADDED] and both[Verdict.ANSWERED]:
            return
    pytest.fail("the flush was always first, or always last: the test has not met its race")


def test_generations(table: Turntable) -> None:
    """Two generations of the same slots at once: a row of the newer one is never made of the older one's codes."""
    met = 0
    for lap in range(0, LAPS, 2):
        older, newer = lap * SLOTS, (lap + 1) * SLOTS
        gained = table.together((0, older, 0, RANK_BY_RANK, 2 * SLOTS), (0, newer, 0, RANK_BY_RANK, 2 * SLOTS))
        assert np.array_equal(np.sort(table.slots["seq"]), newer + np.arange(SLOTS))
        assert (table.slots["count"] == 2).all()
        met += gained[Verdict.STALE_OP] + gained[Verdict.ABANDONED]
        if met and lap >= 10:
            return
    pytest.fail("the generations never met")
