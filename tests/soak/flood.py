"""Part five: a stranger beside a rank of a job with a key sends forged rows at any rate, in a lab, while it averages.

No row may be lost but for want of a core, and every result has to be that of all ranks. The program counts as FORGED
each packet that came into its ring.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from conftest import missing
from lab_team import lab_team
from soak.part import Tell, is_over
from soak.stranger import Stranger, forged, show_rows
from support import Team, await_that, gradients, patient
from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.lab.cluster import Cluster

#: Labs take turns: two cores carry one of them.
PROCESSES = 1
RANKS, OPS = 3, 20
_NEEDS = ("root", "netns", "bpf", "bcc", "headers")


class Target:
    """Rank 0 of a job in a lab, and a stranger beside it that sees what rank 1 sends it; a context manager.

    Attributes:
        stranger: who sends.
    """

    def __init__(self, lab: Cluster, job: Team) -> None:
        self._lab, self._job = lab, job
        self._length = HEADER_BYTES + job[0].config.width
        self._file = tempfile.NamedTemporaryFile(prefix="tailbound-seen-")  # noqa: SIM115 - closed in __exit__
        self._file.truncate(1 << 14)
        self._file.flush()
        show_rows(job[1], Path(self._file.name))
        self._seen = np.memmap(self._file.name, np.uint8, "r", shape=(self._length,))
        self.stranger = Stranger(lab, 0)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.stranger.__exit__()
        self._file.close()

    def forged(self, at: int = -1, bit: int = 0) -> bytes:
        """A frame with the newest row seen, one bit of which is turned."""
        return forged(self._seen, self._lab, at, bit)

    def forged_count(self) -> int:
        """Packets that rank 0's program has counted as FORGED."""
        return int(self._job[0].stats()["drops"].get("FORGED", 0))

    def settled(self) -> None:
        """Waits until the program has had what came into its ring."""
        await_that(lambda: self.forged_count() >= self.stranger.counts()[0], "all that came is counted", 20.0)


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return next(filter(None, map(missing, _NEEDS)), "") or ""


def life(seed: int, tell: Tell) -> str:
    """One job under one flood; what is wrong, in words, or nothing."""
    chance = random.Random(seed)
    rate, numel = 10 ** chance.uniform(3, 6), 64 * 1408 * chance.randrange(1, 9)
    at, bit = chance.choice([-1, HEADER_BYTES, HEADER_BYTES - 1]), chance.randrange(8)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tailbound-soak-"))
        key = Path(folder, "key")
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        lab = stack.enter_context(Cluster(RANKS))
        job = stack.enter_context(lab_team(lab, patient(width=1408, ring_mib=8.0, key_file=str(key))))
        target = stack.enter_context(Target(lab, job))
        job.allreduce(gradients("U", RANKS, numel, seed=0))
        stop, lost = threading.Event(), 0
        flood = threading.Thread(
            target=target.stranger.flood, args=(rate, lambda: target.forged(at, bit), stop), daemon=True
        )
        flood.start()
        try:
            for op in range(OPS):
                results = job.allreduce(gradients("U", RANKS, numel, seed=op))
                short = sum(outcome.expected - outcome.delivered for _, outcome in results)
                lost += short
                if not short and len({out.tobytes() for out, _ in results}) > 1:
                    return f"seed {seed}, {rate:.0f}/s: ranks have different results in op {op}"
        finally:
            stop.set()
            flood.join()
        target.settled()
        arrived, no_room = target.stranger.counts()
        tell("told", {"jobs": 1, "packets": arrived, "no room": no_room, "rows lost": lost})
        if target.forged_count() != arrived:
            return f"seed {seed}, {rate:.0f}/s: {target.forged_count()} FORGED of {arrived} that came"
        if lost and not no_room and not lab.lost_frames():
            return f"seed {seed}, {rate:.0f}/s: {lost} rows lost, and no queue was full"
    return ""


def work(number: int, seed: int, until: float, tell: Tell) -> None:
    """Jobs until ``until`` (monotonic)."""
    logging.disable(logging.CRITICAL)
    while time.monotonic() < until and not is_over():
        if wrong := life(seed, tell):
            tell("found", wrong)
        seed += 1


def said(counts: Counter[str]) -> str:
    """How far it is."""
    return (
        f"{counts['jobs']} jobs, {counts['packets']:,} forged packets, {counts['no room']:,} without room, "
        f"{counts['rows lost']} rows lost"
    )
