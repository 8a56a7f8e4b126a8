"""The switch's program without interfaces: the jobs of ``switch_cases``, and frames fed by BPF_PROG_TEST_RUN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import switch_cases
from switch_cases import Job, Step
from tailbound.kernel import switch
from tailbound.kernel.switch import Entry, Member, Sizes, Switch
from tailbound.switch.job import mac_bytes
from tailbound.wire.schema import SWITCH_JOBS, UNKNOWN_SENDER, VERDICTS, Verdict
from tailbound_lab.bench.frames import frame
from tailbound_lab.bench.program_run import run_xdp

DROP, PASS, REDIRECT = 1, 2, 4
#: Ethernet, IP and UDP before the payload.
HEADERS, HEADERS_IPV6 = 42, 62
_LO = 1


def entry_of(job: Job, ifindices: Sequence[int] | None = None, *, ipv6: bool = False) -> Entry:
    """The job entry of a job; every rank behind the loopback interface unless told otherwise."""
    at = switch_cases.in_ipv6 if ipv6 else str
    there = range(job.ranks) if job.registered is None else job.registered
    members: list[Member | None] = [None] * job.ranks
    for rank in there:
        port = _LO if ifindices is None else ifindices[rank]
        members[rank] = Member(at(switch_cases.ip_of(rank)), mac_bytes(switch_cases.mac_of(rank)), port)
    mac = mac_bytes(switch_cases.MAC)
    return Entry(job.cookie, at(job.address), mac, job.port, job.base, job.rows, job.headroom, tuple(members))


class SwitchWorld:
    """A switch with 64 slots; ``begin`` empties it for the entries of ``jobs``, as often as one likes.

    The program's own maps are not frozen, since they are zeroed from here, and a test may write what is in them.
    """

    def __init__(self, loader: str, width: int = switch_cases.WIDTH, slots: int = 64, *, ipv6: bool = False) -> None:
        self.ipv6 = ipv6
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(switch, "SWITCH_MAPS", tuple(replace(m, writer="both") for m in switch.SWITCH_MAPS))
            self.switch = Switch.make(Sizes(width, slots, 64), loader, ipv6=ipv6)
        arrays = self.switch.maps.arrays
        self._host = {m.name: arrays[m.name] for m in switch.SWITCH_MAPS if m.writer == "host" and m.name in arrays}
        self._jobs: tuple[Job, ...] = ()
        self._entries: dict[str, NDArray[Any]] = {}
        self.begin()

    def begin(self, jobs: Sequence[Job] = (switch_cases.JOB,)) -> None:
        """As new: maps are zero, no device map is left but those of ``jobs``, and these have entries.

        Entries that are as they were put stay: for every device map the kernel waits until no program runs.
        """
        kept = [np.array_equal(self._host[name], entries) for name, entries in self._entries.items()]
        same = tuple(jobs) == self._jobs and all(kept)
        if not same:
            for place in self.switch.entries():
                self.switch.drop(place)
        for array in self.switch.maps.arrays.values():
            array.view(np.uint8)[...] = 0
        self.places = {job.cookie: place for place, job in enumerate(jobs)}
        if same:
            for name, entries in self._entries.items():
                self._host[name][...] = entries
        else:
            for place, job in enumerate(jobs):
                self.switch.put(place, entry_of(job, ipv6=self.ipv6))
            self._jobs, self._entries = tuple(jobs), {name: array.copy() for name, array in self._host.items()}
        self.answers = 0
        self.action = -1
        self.back = b""

    def close(self) -> None:
        self.switch.close()

    def frame_of(self, step: Step) -> bytes:
        """The frame that a step feeds."""
        at = switch_cases.in_ipv6 if self.ipv6 else str
        return frame(step.packet, at(step.source_address), at(step.destination), step.port, step.port)

    def run(self, data: bytes, repeat: int = 1) -> int:
        """One frame; returns and keeps the action, and keeps the frame as it is afterwards."""
        done = run_xdp(self.switch.program, data, repeat)
        self.action, self.back = done.action, done.data
        return done.action

    def ledger(self) -> NDArray[np.uint64]:
        """Counters u64[jobs, senders, verdicts], over all CPUs."""
        rows = self.switch.maps.arrays["switch_ledger"]["verdict"]
        counts: NDArray[np.uint64] = rows.reshape(-1, SWITCH_JOBS, UNKNOWN_SENDER + 1, VERDICTS).sum(0)
        return counts

    def counted(self) -> dict[Verdict, int]:
        """Counters by verdict that are not zero."""
        return {Verdict(i): int(n) for i, n in enumerate(self.ledger().sum((0, 1))) if n}

    def slots(self) -> Any:
        """Records of the slots."""
        return self.switch.maps.arrays["switch_slots"]

    def feed(self, step: Step) -> dict[tuple[int, int, Verdict], int]:
        """Runs a step's packet; what was counted, by (place of the job, sender, verdict)."""
        before = self.ledger()
        self.run(self.frame_of(step))
        after = self.ledger() - before
        counted = zip(*np.unravel_index(np.flatnonzero(after), after.shape), strict=True)
        return {(int(j), int(s), Verdict(v)): int(after[j, s, v]) for j, s, v in counted}
