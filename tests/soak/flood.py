"""Part five: a stranger beside a rank of a job with a key sends forged rows at any rate, in a lab, while it averages.

No row may be lost but for want of a core, and every result has to be that of all ranks. The program counts as FORGED
each packet that came into its ring.

The stranger's packets are live frames of BPF_PROG_TEST_RUN, redirected to the rank's port. No socket, no bridge and no
buffer of the stack is in their way, so that a share of a core makes a flood. They come to the rank's XDP program as
frames of any other rank do, on the processor that sent them, within the sender's call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import struct
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conftest import missing
from lab_team import lab_team
from soak.part import Tell
from support import Team, await_that, gradients, patient
from tailbound.kernel import ethtool, syscalls
from tailbound.kernel.net import index_of
from tailbound.wire.schema import HEADER_BYTES, PacketType
from tailbound_lab.bench.frames import frame
from tailbound_lab.lab import namespaces
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.topology import Link

#: Labs take turns: two cores carry one of them.
PROCESSES = 1
RANKS, OPS = 3, 20
#: Seconds between two bursts of a flood.
TICK = 0.02
#: Threads that take turns: a call ends with a wait of the kernel's for 10 ms and more, in which others send.
_LANES = 8
#: The helper bpf_redirect.
_REDIRECT = 23
#: Flag of a test run whose frames go where the program sends them.
_LIVE_FRAMES = 1 << 1
_GSTATS, _SS_STATS = 0x1D, 1


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return next(filter(None, map(missing, ("root", "netns", "bpf", "bcc", "headers"))), "")


class Stranger:
    """Sends to rank 0 of a job in a lab, over its data link, and sees what rank 1 sends it."""

    def __init__(self, lab: Cluster, job: Team, at: int, bit: int) -> None:
        self._lab, self._at, self._bit, self._seen = lab, at, bit, b""
        self._switch, self._port = lab.topology.switch, Link.DATA.port(0)
        index = namespaces.call(self._switch, index_of, self._port)
        words = (0xB7, 1, index), (0xB7, 2, 0), (0x85, 0, _REDIRECT), (0x95, 0, 0)
        go = b"".join(struct.pack("=BBhi", code, register, 0, value) for code, register, value in words)
        self.program = syscalls.prog_load(go, name="tb_stranger")
        queue = job[1].job.queue
        submit = queue.submit

        def seen(label: int, kind: PacketType, runs: Any, *rest: Any, **named: Any) -> Any:
            if kind is PacketType.CONTRIBUTION:
                for rank, packets in runs:
                    if rank == 0 and len(packets):
                        self._seen = packets[0].tobytes()
            return submit(label, kind, runs, *rest, **named)

        queue.submit = seen  # type: ignore[method-assign]

    def counts(self) -> tuple[int, int]:
        """Frames that came into the rank's ring so far, and those for which it had no room."""

        def statistics() -> dict[str, int]:  # the driver's (``ethtool -S``)
            count = ethtool._strings(self._port, _SS_STATS)
            values = ethtool._ask(self._port, struct.pack("=2I", _GSTATS, count) + bytes(count * 8))
            names = ethtool._names(self._port, _SS_STATS, count)
            return dict(zip(names, struct.unpack_from(f"={count}Q", values, 8), strict=True))

        found = namespaces.call(self._switch, statistics)
        sent, failed = (
            sum(n for name, n in found.items() if name.startswith("tx_queue_") and name.endswith(end))
            for end in ("_xdp_xmit", "_xdp_xmit_errors")
        )
        return sent, failed

    def flood(self, rate: float, stop: threading.Event) -> None:
        """Sends ``rate`` packets a second in bursts, or as many as it can, until it is told to stop."""
        due, lock = time.monotonic(), threading.Lock()

        def take_turns() -> None:
            nonlocal due
            while True:
                with lock:
                    # packets that no thread was free to send in time are not made up for
                    mine, due = due, max(due + TICK, time.monotonic() - TICK)
                if stop.wait(max(0.0, mine - time.monotonic())):
                    return
                self._burst(max(1, round(rate * TICK)))

        def lanes() -> None:
            with ThreadPoolExecutor(_LANES) as threads:  # in this thread's namespace
                for lane in [threads.submit(take_turns) for _ in range(_LANES)]:
                    lane.result()

        namespaces.call(self._switch, lanes)

    def _burst(self, count: int) -> None:
        """The newest row seen, one bit of which is turned, so many times; a frame comes again as it was left."""
        row, workers = bytearray(self._seen), self._lab.workers
        row[self._at] ^= 1 << self._bit
        data = frame(bytes(row), workers[1].address, workers[0].address, self._lab.spec.port, self._lab.spec.port)
        packet = ctypes.create_string_buffer(data, len(data))
        attr = struct.pack("=IIIIQQII", self.program, 0, len(data), 0, syscalls._address(packet), 0, count, 0)
        syscalls._bpf(syscalls._TEST_RUN, attr + struct.pack("=IIQQIII", 0, 0, 0, 0, _LIVE_FRAMES, 0, 64), 80)


def life(seed: int, tell: Tell) -> str:
    """One job under one flood; what is wrong, in words, or nothing."""
    chance = random.Random(seed)
    rate, numel = 10 ** chance.uniform(3, 6), 64 * 1408 * chance.randrange(1, 9)
    at, bit = chance.choice([-1, HEADER_BYTES, HEADER_BYTES - 1]), chance.randrange(8)
    with contextlib.ExitStack() as stack:
        key = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailbound-soak-")), "key")
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        lab = stack.enter_context(Cluster(RANKS))
        job = stack.enter_context(lab_team(lab, patient(width=1408, ring_mib=8.0, key_file=str(key))))
        stranger = Stranger(lab, job, at, bit)
        stack.callback(os.close, stranger.program)
        job.allreduce(gradients("U", RANKS, numel, seed=0))
        stop, lost = threading.Event(), 0
        with ThreadPoolExecutor(1) as thread:
            flood = thread.submit(stranger.flood, rate, stop)
            try:
                for op in range(OPS):
                    results = job.allreduce(gradients("U", RANKS, numel, seed=op))
                    short = sum(outcome.expected - outcome.delivered for _, outcome in results)
                    lost += short
                    if not short and len({out.tobytes() for out, _ in results}) > 1:
                        return f"{rate:.0f}/s: ranks have different results in op {op}"
            finally:
                stop.set()
            flood.result()

        def forged() -> int:
            return int(job[0].stats()["drops"].get("FORGED", 0))

        await_that(lambda: forged() >= stranger.counts()[0], "all that came is counted", 20.0)
        arrived, no_room = stranger.counts()
        for name, count in {"jobs": 1, "forged packets": arrived, "no room": no_room, "rows lost": lost}.items():
            tell(name, count)
        if forged() != arrived:
            return f"{rate:.0f}/s: {forged()} FORGED of {arrived} that came"
        if lost and not no_room and not lab.lost_frames():
            return f"{rate:.0f}/s: {lost} rows lost, and no queue was full"
    return ""
