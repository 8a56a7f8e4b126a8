"""What a P4 switch says of itself, in the form of ``tailbound.switch.report``, whose ``lines`` print it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailbound.kernel.switch import Entry
from tailbound.p4.box import P4Box
from tailbound.wire.schema import Verdict


def examine(box: P4Box) -> dict[str, Any]:
    """Everything, as plain values.

    Raises:
        AttachError: the switch does not answer.
    """
    switch = box.switch
    alive = switch.process is None or switch.process.alive()
    return {
        "address": box.address,
        "mac": box.mac.hex(":"),
        "width": switch.sizes.codes,
        "slots": switch.sizes.slots,
        "ports": [
            {"name": name, "attached": alive, **switch.port_counters(number)} for number, name in enumerate(box.ports)
        ],
        "jobs": [_job(box, place, entry) for place, entry in switch.entries().items()],
    }


def _job(box: P4Box, place: int, entry: Entry) -> dict[str, Any]:
    ledger, unknown = box.switch.ledger(place), box.switch.sizes.ranks
    cookies, final = box.switch.slot_state()
    own = cookies[entry.base : entry.base + entry.rows] == entry.cookie
    done = int(np.count_nonzero(own & (final[entry.base : entry.base + entry.rows] == 1)))
    verdicts = _named(ledger.sum(0))
    return {
        "cookie": f"{entry.cookie:#010x}",
        "port": entry.port,
        "ranks": len(entry.members),
        "base": entry.base,
        "rows": entry.rows,
        "headroom": entry.headroom,
        "slots": {"final": done, "open": int(own.sum()) - done, "abandoned": verdicts.get(Verdict.ABANDONED.name, 0)},
        "verdicts": verdicts,
        "senders": {
            "unknown" if rank == unknown else str(rank): _named(ledger[rank]) for rank in np.flatnonzero(ledger.sum(1))
        },
    }


def _named(row: Any) -> dict[str, int]:
    return {Verdict(int(v)).name: int(row[v]) for v in np.flatnonzero(row)}
