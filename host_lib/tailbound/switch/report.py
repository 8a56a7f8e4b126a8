"""What a switch says of itself: ports, jobs, slots, and what became of packets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tailbound.switch.box import Box, Port
from tailbound.wire.schema import Verdict


def counted(box: Box[Any], place: int) -> dict[str, int]:
    """Verdicts of a job that were ever given, by name, over all senders."""
    return {Verdict(i).name: int(n) for i, n in enumerate(box.switch.ledger(place).sum(0)) if n}


def examine(box: Box[Any], attached: Callable[[Port], bool] = lambda _: True) -> dict[str, Any]:
    """Everything, as plain values.

    Args:
        attached: tells whether a port still carries the program.

    Raises:
        AttachError: a P4 switch does not answer.
    """
    alive = box.switch.alive()
    ports = [
        {"name": port.name, "attached": alive and attached(port), **box.switch.port_counters(port.ifindex)}
        for port in box.ports
    ]
    jobs = []
    for place, entry in box.switch.entries().items():
        verdicts, ledger = counted(box, place), box.switch.ledger(place)
        final, still_open = box.switch.rows_of(entry)
        senders = {
            str(rank) if rank < len(ledger) - 1 else "unknown": {
                Verdict(int(v)).name: int(ledger[rank, v]) for v in np.flatnonzero(ledger[rank])
            }
            for rank in np.flatnonzero(ledger.sum(1))
        }
        jobs.append(
            {
                "cookie": f"{entry.cookie:#010x}",
                "port": entry.port,
                "ranks": len(entry.members),
                "base": entry.base,
                "rows": entry.rows,
                "headroom": entry.headroom,
                "slots": {"final": final, "open": still_open, "abandoned": verdicts.get(Verdict.ABANDONED.name, 0)},
                "verdicts": verdicts,
                "senders": senders,
            }
        )
    return {
        "address": box.address,
        "mac": box.mac.hex(":"),
        "width": box.switch.width,
        "slots": box.switch.slots,
        "ports": ports,
        "jobs": jobs,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The same for people."""
    out = [f"switch {report['address']} ({report['mac']}): rows of {report['width']} codes, {report['slots']} slots"]
    for port in report["ports"]:
        state = "" if port["attached"] else "  NOT ATTACHED"
        out.append(
            f"  port {port['name']}: {port['ours']} packets for the switch, {port['foreign']} passed on, "
            f"{port['results']} results and {port['answers']} answers sent{state}"
        )
    for job in report["jobs"]:
        slots, last = job["slots"], job["base"] + job["rows"] - 1
        out.append(
            f"  job {job['cookie']}: UDP port {job['port']}, {job['ranks']} workers, slots {job['base']}..{last}: "
            f"{slots['final']} final, {slots['open']} open, {slots['abandoned']} rows abandoned"
        )
        out.append("    " + (", ".join(f"{name} {n}" for name, n in job["verdicts"].items()) or "no packets yet"))
    if not report["jobs"]:
        out.append("  no jobs")
    return out
