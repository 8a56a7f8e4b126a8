"""``tailbound bench flood``: what a flood of forged packets costs a job with a key, and whether it costs a row.

A stranger beside rank 0 of a lab (``bench.stranger``) sees a row of every op, turns a bit of its codes, and sends that
again and again: cookie, addresses, op and place are right, the tag is wrong. The control is the same stranger sending
the same packets to a worker of the lab that has no rank, whose interface drops them at once: what that costs the job is
the sender and the way, and what the flood costs beyond it is the verifying. Rounds take every rate in turn.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tailbound.kernel import syscalls
from tailbound.kernel.attach import attach
from tailbound.kernel.net import xdp_below
from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.bench import figures
from tailbound_lab.bench.channel import OURS
from tailbound_lab.bench.experiment import WARM_UP, Experiment, opened
from tailbound_lab.bench.stranger import DROP, Stranger, forged
from tailbound_lab.bench.table import Columns, save, show
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

RATES = (0, 100_000, 300_000, 1_000_000)
COLUMNS: Columns = {
    "to": ("to", ""), "asked": ("asked/s", ",d"), "reached": ("sent/s", ",.0f"), "p50_ms": ("p50 ms", "ms"),
    "rows_lost": ("lost", "d"), "arrived": ("arrived", ",d"), "forged": ("FORGED", ",d"),
    "no_room": ("full", ",d"), "ns_forged": ("ns", ".0f"), "program_share": ("program", ".3f"),
}  # fmt: skip
_RING_MIB = 8.0


@dataclass(frozen=True)
class Wanted:
    """What is run.

    Attributes:
        ranks: of the job.
        size: bytes of float32 of an op.
        rates: forged packets a second.
        ops: of each rate, to and fro, in a round.
        rounds: of all rates.
    """

    ranks: int = 4
    size: int = 1 << 20
    rates: tuple[int, ...] = RATES
    ops: int = 100
    rounds: int = 3


def run(wanted: Wanted, json_file: Path | None = None, console: Console | None = None) -> list[dict[str, Any]]:
    """Run all of it, print a table, write ``json_file``; return the rows.

    Returns:
        Rows ``to, asked, reached, p50_ms, p99_ms, ops, rows, rows_lost, sent, arrived, forged, no_room, frames_lost,
        ns_forged, program_share, rank_cpu_ms, keys_tried, keys_turned``: packets a second asked for and sent; rows of
        all ranks and those that did not come; packets of the stranger that came into the worker's ring, those that the
        program counted as FORGED, those for which the ring had no room, and other frames that the lab dropped;
        nanoseconds of rank 0's program for each forged packet; the share of a core that it takes; turns of keys.

    Raises:
        CapabilityError: no lab, or no XDP here.
        TransportError: a rank failed.
    """
    console = console or Console()
    arms = [(rate, to) for rate in wanted.rates for to in (("rank 0", "nobody") if rate else ("nobody",))]
    found: dict[tuple[int, str], list[dict[str, Any]]] = {arm: [] for arm in arms}
    with _bench(wanted, console) as bench:
        for turn in range(wanted.rounds):
            for rate, to in arms[:: -1 if turn % 2 else 1]:
                found[rate, to].append(bench.phase(rate, to))
    calm = _row(0, "nobody", found[0, "nobody"], None) if (0, "nobody") in found else None
    rows = [_row(rate, to, phases, calm) for (rate, to), phases in found.items()]
    save(rows, json_file)
    title = f"{wanted.size / 1024:g} KiB, {wanted.ranks} ranks, a stranger's packets with wrong tags"
    show(title, rows, COLUMNS, console)
    return rows


def _row(asked: int, to: str, phases: Sequence[dict[str, Any]], calm: dict[str, Any] | None) -> dict[str, Any]:
    """One arm, of all rounds; ``calm``: the row without a stranger, for what the program takes of the job alone."""
    total = Counter[str]()
    for phase in phases:
        total.update({name: value for name, value in phase.items() if name != "took"})
    took = [seconds for phase in phases for seconds in phase["took"]]
    jobs_own = total["program_runs"] - total["arrived"] * (to == "rank 0")
    own_ns = (calm["program_ns"] if calm else total["program_ns"] / max(1, total["program_runs"])) * jobs_own
    return {
        "to": to if asked else "-",
        "asked": asked,
        "reached": total["sent"] / total["seconds"] if asked else 0.0,
        "p50_ms": 1e3 * figures.percentile(took, 50),
        "p99_ms": 1e3 * figures.percentile(took, 99),
        "ops": len(took),
        "rows": int(total["expected"]),
        "rows_lost": int(total["expected"] - total["delivered"]),
        **{name: int(total[name]) for name in ("sent", "arrived", "forged", "no_room", "frames_lost")},
        "program_ns": total["program_ns"] / max(1, total["program_runs"]),
        "ns_forged": (total["program_ns"] - own_ns) / total["forged"] if total["forged"] else None,
        "program_share": total["program_ns"] / 1e9 / total["seconds"],
        "rank_cpu_ms": 1e3 * total["cpu_seconds"] / max(1, len(took)),
        "keys_tried": int(total["keys_tried"]),
        "keys_turned": int(total["keys_turned"]),
    }


class _Bench:
    """A job with a key, warm, and the stranger."""

    def __init__(self, lab: Cluster, experiment: Experiment, wanted: Wanted, shown: Path, stack: ExitStack) -> None:
        self._lab, self._experiment, self._wanted = lab, experiment, wanted
        experiment.prepare()
        length = HEADER_BYTES + experiment.ready[0]["width"]
        self._seen = np.memmap(shown, np.uint8, "r", shape=(length,))
        there = lab.run(0, xdp_below, lab.workers[0].interface)
        assert there is not None
        self._program = syscalls.prog_by_id(there.prog_id)
        stack.callback(os.close, self._program)
        self._strangers = {"rank 0": stack.enter_context(Stranger(lab, 0))}
        self._strangers["nobody"] = stack.enter_context(Stranger(lab, wanted.ranks))
        self._forged = 0

    def phase(self, rate: int, to: str) -> dict[str, Any]:
        """Ops of all ranks, while the stranger sends; what they took, and counts."""
        stranger, stop = self._strangers[to], threading.Event()
        before, lost = (*stranger.counts(), *self._ran()), self._lab.lost_frames()
        with ThreadPoolExecutor(1) as threads:
            flood = threads.submit(stranger.flood, rate, lambda: forged(self._seen, self._lab), stop)
            try:
                phase = self._ops(self._wanted.ops)
            finally:
                stop.set()
            sent, seconds, _ = flood.result()
        last = self._ops(0).reports[0]["forged"]  # what came since the last op, too
        after = (*stranger.counts(), *self._ran())
        arrived, no_room, program_ns, program_runs = (now - was for now, was in zip(after, before, strict=True))
        counted, self._forged = last - self._forged, last
        names = ("expected", "delivered", "cpu_seconds", "keys_tried", "keys_turned")
        return {
            "took": [seconds for by_rank in phase.times[OURS] for seconds in by_rank],
            "seconds": seconds,
            "sent": sent,
            "arrived": arrived,
            "no_room": no_room,
            # what found no room is counted at both ends of the veth
            "frames_lost": self._lab.lost_frames() - lost - 2 * no_room,
            "program_ns": program_ns,
            "program_runs": program_runs,
            "forged": counted,
            **{name: phase.counted(name) for name in names},
        }

    def _ops(self, count: int) -> Any:
        return self._experiment.phase(names=[OURS], size=self._wanted.size, rounds=count, free=True)

    def _ran(self) -> tuple[int, int]:
        """Nanoseconds and runs of rank 0's program."""
        info = syscalls.prog_info(self._program)
        return info.run_ns, info.runs


@contextmanager
def _bench(wanted: Wanted, console: Console) -> Iterator[_Bench]:
    with ExitStack() as stack:
        lab, _, path = stack.enter_context(opened(LabSpec(wanted.ranks + 1), "xdp", console, forked=True))
        assert isinstance(lab, Cluster)
        nobody = lab.workers[wanted.ranks]
        drop = syscalls.prog_load(DROP, name="tb_drop")
        try:
            stack.callback(os.close, lab.run(nobody.rank, attach, drop, nobody.interface))
        finally:
            os.close(drop)
        stack.callback(os.close, syscalls.count_run_time())
        job = {"ranks": wanted.ranks, "datapath": path}
        warm = {"names": [OURS], "size": wanted.size, "rounds": WARM_UP, "free": True}
        experiment = Experiment(lab, job, console, warm=warm, hosts=wanted.ranks, forked=True)
        key, shown = experiment.folder / "key", experiment.folder / "shown"
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        shown.write_bytes(bytes(1 << 14))
        experiment.job |= {"settings": {"ring_mib": _RING_MIB, "key_file": str(key)}, "shown": str(shown)}
        yield _Bench(lab, stack.enter_context(experiment), wanted, shown, stack)
