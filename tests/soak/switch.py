"""The switch's program and the reference switch of the tests as twins, with two jobs on one port."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import switch_cases
from golden import golden_packets
from hostile import bad_head, hostile_to_switch
from kernel_world import HEADERS
from reference_switch import Rules
from soak import fed
from soak.forge import MOST, framed, heads_of
from soak.life import Fault, Step
from switch_cases import JOB, OTHER, WIDTH
from switch_world import DROP, PASS, REDIRECT, SwitchWorld
from tailbound.kernel.frames import frame
from tailbound.wire.schema import HEADER_BYTES, SWITCH_JOBS, UNKNOWN_SENDER, VERDICTS, PacketType, Verdict

JOBS = (JOB, OTHER)
_RANKS = max(job.ranks for job in JOBS)
ADDRESSES = [switch_cases.ip_of(rank) for rank in range(_RANKS)] + ["198.18.9.9"]
HEADS = heads_of(ADDRESSES, switch_cases.ADDRESS, switch_cases.PORT)
_TYPES = set(PacketType)
#: Before its sender is known to be who it says.
_NOBODYS = {
    Verdict.BAD_LENGTH, Verdict.BAD_VERSION, Verdict.WRONG_COOKIE, Verdict.UNKNOWN_RANK, Verdict.WRONG_ADDRESS,
    Verdict.CORRUPT,
}  # fmt: skip


@functools.cache
def _known() -> tuple[bytes, ...]:
    """What every pool has in it: golden packets, and those of the list of cases."""
    return (*(g.data for g in golden_packets()), *(s.packet for case in switch_cases.CASES for s in case.steps))


@fed.compiled
def _run(
    program: Any, ledgers: Any, frames: Any, sizes: Any, jobs: int, told: NDArray[np.int64], back: NDArray[np.uint8]
) -> int:
    """Runs frames; what became of each goes to ``told`` i64[n, 6] and ``back`` u8[n, HEADERS + MOST].

    ``told`` is: action, bytes, how often counted, place of the job, row and verdict as one number, ABANDONED. Returns
    how many have run.
    """
    attr, out = program
    ledger, known = ledgers
    for n in range(frames.shape[0]):
        length = HEADERS + sizes[n]
        named = np.int64(frames[n, HEADERS + 14]) if sizes[n] >= HEADER_BYTES else np.int64(UNKNOWN_SENDER)
        told[n, 0] = fed.run(attr, out, frames[n], length)
        told[n, 1] = attr[3]
        if told[n, 0] < 0:
            return n
        for i in range(min(np.int64(attr[3]), back.shape[1])):
            back[n, i] = out[i]
        told[n, 2] = told[n, 5] = 0
        for job in range(jobs):
            count, last, abandoned = fed.gained(ledger[job], known[job], 4, named)
            told[n, 2] += count
            told[n, 5] += abandoned
            if count:
                told[n, 3], told[n, 4] = job, last
    return np.int64(frames.shape[0])


class _Host:
    """A switch's does nothing while jobs run; its workers get on."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.moved = np.zeros(5, np.int64)

    def acts(self) -> Iterator[Step]:
        self.moved[0] += self._rng.choice((0, 1))
        self.moved[1] += self._rng.choice((0, 1, 4, 8))
        return iter(())


class Twins:
    """``life.Twins``."""

    length = 8
    ranks = (0, _RANKS)

    def __init__(self, loader: str) -> None:
        self.world = SwitchWorld(loader)
        self._runner = fed.Runner(self.world.switch.program)
        self.counts = np.zeros(VERDICTS, np.int64)
        self.foreign = 0
        self.begin()

    def begin(self) -> None:
        """Empty rows."""
        self.world.begin(JOBS)
        self.rules = {job.cookie: Rules(job.cookie, job.ranks, job.headroom, job.rows, width=WIDTH) for job in JOBS}
        self._ledger = self.world.switch.maps.arrays["switch_ledger"]["verdict"].reshape(
            -1, SWITCH_JOBS, UNKNOWN_SENDER + 1, VERDICTS
        )
        self._seen = self._ledger.copy()

    def close(self) -> None:
        self.world.close()

    def packets(self, rng: random.Random) -> list[bytes]:
        good = [switch_cases.contribution(at % 3, seq=switch_cases.SEQ + at // 9) for at in range(100)]
        return [*(hostile_to_switch(rng, rng.choice((JOB, JOB, OTHER))) for _ in range(300)), *good, *_known()]

    def host(self, rng: random.Random) -> _Host:
        return _Host(rng)

    def frame_of(self, data: bytes) -> bytes:
        return frame(data, ADDRESSES[0], switch_cases.ADDRESS, switch_cases.PORT, switch_cases.PORT)

    def do(self, step: Step) -> None:
        raise AssertionError(f"a switch's host does nothing: {step}")

    def feed(self, payloads: NDArray[np.uint8], sizes: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        frames = np.empty((len(payloads), HEADERS + MOST), np.uint8)
        framed(HEADS, payloads, sizes, sources, frames)
        told, back = np.zeros((len(payloads), 6), np.int64), np.zeros_like(frames)
        ledgers = self._ledger[self._runner.cpu], self._seen[self._runner.cpu]
        ran = _run(self._runner.context, ledgers, frames, sizes, len(JOBS), told, back)
        if ran < len(payloads):
            raise Fault(ran, "NOT_RUN: the kernel would not")
        for n, (row, size, source) in enumerate(zip(told.tolist(), sizes.tolist(), sources.tolist(), strict=True)):
            sent = back[n, HEADERS : row[1]].tobytes()
            try:
                self._compare(payloads[n, :size].tobytes(), source, row, sent)
            except AssertionError as error:
                raise Fault(n, str(error)) from None

    def _compare(self, data: bytes, source: int, row: Sequence[int], back: bytes) -> None:
        whole = len(data) >= HEADER_BYTES
        named, cookie = (data[14], int.from_bytes(data[4:8], "big")) if whole else (UNKNOWN_SENDER, 0)
        place = next((i for i, job in enumerate(JOBS) if job.cookie == cookie), 0)
        rules = self.rules[JOBS[place].cookie]
        before = rules.counts[Verdict.ABANDONED]
        verdict, sent, _ = rules.take(data, source == named)
        abandoned = rules.counts[Verdict.ABANDONED] - before
        early = verdict in _NOBODYS or (verdict == Verdict.BAD_TYPE and data[1] not in _TYPES)
        sender = UNKNOWN_SENDER if early else named
        action, _, count, at, last, lost = row
        ours = f"counts {Verdict(last % VERDICTS).name} of {last // VERDICTS} in job {at}, {count} times"
        assert count == 1, f"COUNTS: the program {ours}"
        wanted = place, sender * VERDICTS + verdict
        assert (at, last) == wanted, f"VERDICTS_DIFFER: it {ours}, the reference {verdict.name} of {sender} in {place}"
        assert bool(lost) == abandoned, f"ABANDONED: {lost} and {abandoned} at {verdict.name}"
        self.counts[verdict] += 1
        if not sent:
            assert (action, back) == (DROP, data), f"REFUSED_AND_SENT: {verdict.name}, action {action}"
            return
        assert action == REDIRECT, f"ACTION: {action} at {verdict.name}"
        assert back == sent, f"OTHER_RESULT: {verdict.name}: {back.hex()} and {sent.hex()}"

    def spoil(self, rng: random.Random, frames: Sequence[bytes], count: int) -> None:
        for _ in range(count):
            data = bad_head(rng, frames)
            action, before = self.world.run(data), self._seen.copy()
            self._seen[...] = self._ledger
            gained = (self._seen - before).sum((0, 1, 2))
            counted, taken = int(gained.sum()), int(gained[: Verdict.BAD_LENGTH].sum())
            if action not in (PASS, DROP) or counted != (action == DROP) or taken:
                raise Fault(-1, f"SPOILT_FRAME: action {action}, counted {counted}: {data.hex()}")
            self.foreign += not counted
            self.counts += gained.astype(np.int64)

    def look(self) -> None:
        if not np.array_equal(self._ledger, self._seen):
            raise Fault(-1, "CHARGED_TO_ANOTHER: a counter rose that no packet named")
        sums = self.world.switch.maps.arrays["switch_sums"].view(np.uint16)
        for job in JOBS:
            for at, slot in self.rules[job.cookie].slots.items():
                record = self.world.slots()[job.base + at]
                ranks = int(record["ranks"][0])
                held = int(record["seq"]), int(record["count"]), bool(record["final"]), ranks
                wanted = slot.head["seq"], len(slot.ranks), slot.final, sum(1 << r for r in slot.ranks)
                if held != wanted:
                    raise Fault(-1, f"ROWS_DIFFER: slot {at} of {job.cookie:#x}: {held} and {wanted}")
                lanes = sums[job.base + at].reshape(-1, 2, 4).transpose(0, 2, 1).reshape(-1)[: len(slot.sums)]
                if not slot.final and not np.array_equal(lanes, slot.sums):
                    raise Fault(-1, f"SUMS_DIFFER: slot {at} of {job.cookie:#x}")
