"""One rank of ``tailbound bench flood``: as many all-reduces as it is told, and what became of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tailbound.collective.communicator import Communicator
from tailbound.settings.table import PORT
from tailbound.transport.config import Config
from tailbound.wire.schema import PacketType
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.join import store_of
from tailbound_lab.bench.worker import gradient

#: Of a rank's result ring.
_RING_MIB = 8.0


def show_rows(ours: Communicator, file: Path) -> None:
    """Leaves the first row of every op for rank 0 in ``file``, u8[stride], as somebody has it who sees all packets."""
    queue, shown = ours.job.flow.queue, np.memmap(file, np.uint8, "r+")
    submit = queue.submit

    def seen(label: int, kind: PacketType, runs: Any, *rest: Any, **named: Any) -> Any:
        if kind is PacketType.CONTRIBUTION:
            for rank, packets in runs:
                if rank == 0 and len(packets):
                    shown[: packets.shape[1]] = packets[0]
        return submit(label, kind, runs, *rest, **named)

    queue.submit = seen  # type: ignore[method-assign]


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    rank, ranks = int(os.environ["RANK"]), job["ranks"]
    store = store_of(rank, ranks)
    config = Config(rank=rank, ranks=ranks, port=PORT.read(), ring_mib=_RING_MIB, key_file=job["key_file"])
    data = gradient(job["size"], rank)
    out = np.zeros_like(data)
    with Communicator(store, config, datapath="xdp") as ours:
        if rank == 1:
            show_rows(ours, Path(job["shown"]))
        head = {"cookie": ours.job.cookie, "width": ours.config.width}
        channel.report("ready", **head)
        while (order := channel.order()) and order != "end":
            took = []
            expected, delivered, cpu = 0, 0, time.process_time()
            for _ in range(int(order)):
                launched = time.monotonic()
                outcome = ours.allreduce(data, out).result()
                if outcome.error is not None:
                    raise outcome.error
                took.append(time.monotonic() - launched)
                expected, delivered = expected + outcome.expected, delivered + outcome.delivered
            stats = ours.stats()
            channel.report(
                "phase",
                took=took,
                expected=expected,
                delivered=delivered,
                cpu_seconds=time.process_time() - cpu,
                forged=stats["drops"].get("FORGED", 0),
                keys_tried=stats["event_counts"].get("keys_tried", 0),
                turns=ours.job.keys.turns if ours.job.keys else 0,
            )
        ours.meet("measured")


if __name__ == "__main__":
    sys.exit(serve(work))
