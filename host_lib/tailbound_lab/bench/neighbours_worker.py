"""One rank of ``tailbound bench neighbours``: all-reduces one after the other for as long as it is told.

With several ranks on a worker each is of another job: the k-th of every worker are the k-th job.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.communicator import Communicator
from tailbound.settings.table import PORT
from tailbound.transport.config import Config
from tailbound.transport.steps import STEP_MASK, step_distance
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.join import store_of
from tailbound_lab.bench.worker import gradient

#: What rows that are missing are, as the ledger has it (``observe.ledger``).
MISSING = ("late", "lost", "refused", "absent")
#: Of a rank's result ring: many ranks share one machine's memory, and ops are small.
_RING_MIB = 8.0
#: Steps from the newest one that rank 0 has heard of to the end of a phase: others may have begun one more meanwhile.
_AHEAD = 2


class _Rank:
    """What a rank keeps from phase to phase. An op is a step.

    Args:
        job: of ``bench.neighbours``.
        number: of the job: each has pauses and data of its own.
        ours: the communicator.
        last: u64[1] in memory that the job's ranks share: the step before which the phase ends; 0: not known.
    """

    def __init__(self, job: dict[str, Any], number: int, ours: Communicator, last: NDArray[np.uint64]) -> None:
        self._ours, self._last, self._apart = ours, last, job["apart_ms"] / 1e3
        self._data = gradient(job["size"], number * job["ranks"] + ours.config.rank)
        self._out = np.zeros_like(self._data)
        self._random = random.Random(f"neighbours/{job['seed']}/{number}/{ours.config.rank}")

    def phase(self, what: dict[str, Any]) -> dict[str, Any]:
        """Ops until ``ops`` are done or ``seconds`` are over (said by rank 0); what became of them."""
        before, begin, cpu = self._missing(), time.monotonic(), time.process_time()
        counts: Counter[str] = Counter()
        took = []
        for done in range(what["ops"] or sys.maxsize):
            if not what["ops"] and self._over(time.monotonic() - begin > what["seconds"]) and done:
                break
            time.sleep(self._random.uniform(0, self._apart))
            launched = time.monotonic()
            outcome = self._ours.allreduce(self._data, self._out).result()
            if outcome.error is not None:
                raise outcome.error
            took.append(time.monotonic() - launched)
            counts += Counter(expected=outcome.expected, delivered=outcome.delivered, cut=outcome.deadline_hits)
        self._ours.drain()
        after = self._missing()
        return {
            "took": took,
            "seconds": time.monotonic() - begin,
            "cpu_seconds": time.process_time() - cpu,
            **{name: counts[name] for name in ("expected", "delivered", "cut")},
            **{name: after[name] - before[name] for name in (*MISSING, "repaired", "on_arrival")},
        }

    def _over(self, late: bool) -> bool:
        """Whether the phase ends before the next op; ``late``: its time is over, which rank 0 says to the others.

        An op ends without a rank that is slow, so that others may be many steps ahead of rank 0. They end at once, and
        rank 0 goes on to where they are.
        """
        if self._ours.config.rank == 0 and late and not self._last[0]:
            self._last[0] = self._ours.step + self._ours.behind + _AHEAD & STEP_MASK
        return bool(self._last[0]) and step_distance(self._ours.step, int(self._last[0])) >= 0

    def _missing(self) -> Counter[str]:
        """Rows that were missing, by why, since the start; and packets that this host lost itself."""
        stats = self._ours.stats()
        entries = [entry for by_peer in stats["ledger"].values() for entry in by_peer.values()]
        found = Counter({name: sum(entry[name] for entry in entries) for name in (*MISSING, "repaired")})
        found["on_arrival"] = sum(stats["lost_on_arrival"].values())
        return found


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    number = int(os.environ["LOCAL_RANK"])
    rank, begin = int(os.environ["RANK"]) // job["jobs"], time.process_time()
    store = store_of(rank, job["ranks"], number)
    last = np.memmap(Path(job["folder"], f"last-{number}"), np.uint64, "r+", shape=(1,))
    config = Config(rank=rank, ranks=job["ranks"], port=PORT.read(), rate=job["known"], ring_mib=_RING_MIB)
    with Communicator(store, config, datapath=job["datapath"]) as ours:
        one = _Rank(job, number, ours, last)
        spent = time.process_time() - begin
        channel.report("ready", datapath=ours.datapath, result=ours.stats()["choice"]["result"], cpu_seconds=spent)
        while (order := channel.order()) and order != "end":
            channel.report("phase", **one.phase(json.loads(order)))
        ours.meet("measured")


if __name__ == "__main__":
    sys.exit(serve(work))
