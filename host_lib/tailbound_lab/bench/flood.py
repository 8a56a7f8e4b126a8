"""``tailbound bench flood``: what a flood of forged packets costs a job with a key, and whether it costs a row.

A stranger beside rank 0 of a lab (``bench.stranger``) sees a row of every op, turns a bit of its codes, and sends that
again and again: cookie, addresses, op and place are right, the tag is wrong. The control is the same stranger sending
the same packets to a worker of the lab that has no rank, whose interface drops them at once: what that costs the job is
the sender and the way, and what the flood costs beyond it is the verifying.

Rounds take every rate in turn, flood and control. Frames leave in bursts, one every 20 ms.
"""

from __future__ import annotations

import os
import tempfile
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
from tailbound.kernel.interfaces import xdp_below
from tailbound.wire.schema import HEADER_BYTES
from tailbound_lab.bench import figures
from tailbound_lab.bench.save import save
from tailbound_lab.bench.stranger import DROP, Stranger, forged
from tailbound_lab.bench.table import show
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

RATES = (0, 100_000, 300_000, 1_000_000)
_WORKER = "tailbound_lab.bench.flood_worker"
#: Ops before those that count: scales, deadlines, rates.
_WARM_UP = 25
_SILENCE = 180.0


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
    """Runs all of it, prints a table, writes ``json_file``; returns the rows.

    Returns:
        Rows ``to, asked, reached, p50_ms, p99_ms, rows, rows_lost, arrived, forged, no_room, frames_lost, ns_forged,
        program_share, sender_share, keys_turned`` and more: packets a second asked for and sent; rows of all ranks and
        those that did not come; packets of the stranger that came into the worker's ring, those that the program
        counted as FORGED, those for which the ring had no room, and other frames that the lab dropped; nanoseconds of
        rank 0's program for each forged packet; the shares of a core that its program takes, and the stranger with all
        that happens in its calls (for ``to`` "rank 0" the program is in it); turns of keys before their time.

    Raises:
        CapabilityError: no lab, or no XDP here.
        TransportError: a rank failed.
    """
    from tailbound.prepare import compile_all

    console = console or Console()
    console.print("preparing: loading, and compiling what is not compiled yet", highlight=False)
    compile_all()
    arms = [(rate, to) for rate in wanted.rates for to in (("rank 0", "nobody") if rate else ("nobody",))]
    found: dict[tuple[int, str], list[dict[str, Any]]] = {arm: [] for arm in arms}
    with _bench(wanted, console) as bench:
        for turn in range(wanted.rounds):
            for rate, to in arms[:: -1 if turn % 2 else 1]:
                found[rate, to].append(bench.phase(rate, to))
    calm = _row(0, "nobody", found[0, "nobody"], None) if (0, "nobody") in found else None
    rows = [_row(rate, to, phases, calm) for (rate, to), phases in found.items()]
    save(rows, json_file)
    show(
        f"{wanted.size / 1024:g} KiB, {wanted.ranks} ranks, a stranger's packets with wrong tags", table(rows), console
    )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is shown of the rows, under short names."""
    return [
        {
            "to": row["to"],
            "asked": f"{row['asked'] // 1000}k",
            "sent/s": f"{row['reached'] / 1e3:.0f}k",
            "p50": round(row["p50_ms"], 2),
            "lost": row["rows_lost"],
            "arrived": row["arrived"],
            "FORGED": row["forged"],
            "full": row["no_room"],
            "ns": None if row["ns_forged"] is None else round(row["ns_forged"]),
            "program": round(row["program_share"], 3),
            "sender": round(row["sender_share"], 3),
        }
        for row in rows
    ]


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
        "sent": int(total["sent"]),
        "arrived": int(total["arrived"]),
        "forged": int(total["forged"]),
        "no_room": int(total["no_room"]),
        "frames_lost": int(total["frames_lost"]),
        "program_ns": total["program_ns"] / max(1, total["program_runs"]),
        "ns_forged": (total["program_ns"] - own_ns) / total["forged"] if total["forged"] else None,
        "program_share": total["program_ns"] / 1e9 / total["seconds"],
        "sender_share": total["sender_cpu"] / total["seconds"] if asked else 0.0,
        "rank_cpu_ms": 1e3 * total["cpu_seconds"] / max(1, len(took)),
        "keys_tried": int(total["keys_tried"]),
        "keys_turned": int(total["turns"]),
    }


class _Bench:
    """A job with a key, warm, and the stranger."""

    def __init__(self, lab: Cluster, team: Team, wanted: Wanted, shown: Path, stack: ExitStack) -> None:
        self._lab, self._team, self._ops = lab, team, wanted.ops
        ready = [message for _, message in team.gather("ready")]
        self._length = HEADER_BYTES + ready[0]["width"]
        self._seen = np.memmap(shown, np.uint8, "r", shape=(self._length,))
        self._programs = [self._program(rank) for rank in range(wanted.ranks)]
        for fd in self._programs:
            stack.callback(os.close, fd)
        self._strangers = {"rank 0": stack.enter_context(Stranger(lab, 0))}
        self._strangers["nobody"] = stack.enter_context(Stranger(lab, wanted.ranks))
        self._before = self._reports(_WARM_UP)

    def _program(self, rank: int) -> int:
        there = self._lab.run(rank, xdp_below, self._lab.workers[rank].interface)
        assert there is not None
        return syscalls.prog_by_id(there.prog_id)

    def _forged(self) -> bytes:
        """The newest row that can be seen, with a bit turned, to rank 0 from rank 1."""
        return forged(self._seen, self._lab)

    def _reports(self, ops: int) -> list[dict[str, Any]]:
        self._team.tell(str(ops))
        reports = dict(self._team.gather("phase"))
        return [reports[rank] for rank in sorted(reports)]

    def phase(self, rate: int, to: str) -> dict[str, Any]:
        """Ops of all ranks, while the stranger sends; what they took, and counts."""
        stranger, stop = self._strangers[to], threading.Event()
        into, no_room = stranger.counts()
        lost = self._lab.lost_frames()
        ran, runs = self._ran()
        with ThreadPoolExecutor(1) as threads:
            flood = threads.submit(stranger.flood, rate, self._forged, stop)
            try:
                reports = self._reports(self._ops)
            finally:
                stop.set()
            sent, seconds, cpu = flood.result()
        after = self._reports(0)  # what came since the last op of each
        now_into, now_no_room = stranger.counts()
        now_ran, now_runs = self._ran()
        mine, was = after[0], self._before[0]
        self._before = after
        return {
            "took": [seconds for report in reports for seconds in report["took"]],
            "seconds": seconds,
            "sent": sent,
            "sender_cpu": cpu,
            "arrived": now_into - into,
            "no_room": now_no_room - no_room,
            # what found no room is counted at both ends of the veth
            "frames_lost": self._lab.lost_frames() - lost - 2 * (now_no_room - no_room),
            "program_ns": now_ran - ran,
            "program_runs": now_runs - runs,
            **{name: sum(report[name] for report in reports) for name in ("expected", "delivered", "cpu_seconds")},
            **{name: mine[name] - was[name] for name in ("forged", "keys_tried", "turns")},
        }

    def _ran(self) -> tuple[int, int]:
        """Nanoseconds and runs of rank 0's program."""
        info = syscalls.prog_info(self._programs[0])
        return info.run_ns, info.runs


@contextmanager
def _bench(wanted: Wanted, console: Console) -> Iterator[_Bench]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailbound-bench-")))
        key, shown = folder / "key", folder / "shown"
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        shown.write_bytes(bytes(1 << 14))
        lab = stack.enter_context(Cluster(LabSpec(wanted.ranks + 1)))
        nobody = lab.workers[wanted.ranks]
        drop = syscalls.prog_load(DROP, name="tb_drop")
        try:
            stack.callback(os.close, lab.run(nobody.rank, attach, drop, nobody.interface))
        finally:
            os.close(drop)
        stack.callback(os.close, syscalls.count_run_time())
        job = {"ranks": wanted.ranks, "size": wanted.size, "key_file": str(key), "shown": str(shown)}
        team = stack.enter_context(Team(lab, _WORKER, job, console, silence=_SILENCE, hosts=wanted.ranks, forked=True))
        yield _Bench(lab, team, wanted, shown, stack)
        team.tell("end")
        team.finish()
