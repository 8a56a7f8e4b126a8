"""Repair: answers ranks that ask for rows again, and counts what the own questions have brought (clock-23).

A REPAIR packet asks for rows of one list of an op. Header: ``rows`` of that list, ``row`` the place of the first bit.
Body: a bitmap, most significant bit first; a set bit is a missing row. With ``rows`` 0 it only asks for marks. GONE
names rows that do not exist alike.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.collective.job import Job
from tailbound.collective.op import Half
from tailbound.kernel.core import address, core
from tailbound.wire.schema import HEADER_BYTES, Flag, PacketType, Stage, Verdict

#: Verdict on rows that come a second time by a request, by stage.
_TWICE = Verdict.DUPLICATE_REPAIR, Verdict.DUPLICATE_REPAIR_RESULT


def settle(job: Job, half: Half, stage: Stage) -> None:
    """Counts, at the end of a half, what repair has brought."""
    if not half.requested:  # as a rule
        return
    for flow in half.begun:
        if flow.again:
            rank, came = flow.rank, int(core().fast.tb_repaired(ctypes.addressof(half), flow.rank))
            job.repairs.came[stage, rank] += came
            job.counters["repair_rows_asked"] += flow.again
            job.counters["rows_repaired"] += came
            twice = job.records.count(rank, _TWICE[stage])
            job.repairs.paths[stage * job.world + rank].settled(flow.again, twice, probed=bool(flow.probed))


def encode_repair(places: NDArray[np.int64], width: int) -> list[tuple[int, bytes]]:
    """(``row``, body) of the REPAIR packets that ask for ``places`` (i64[], rising), at most ``width`` bytes each."""
    out, body, size = [], ctypes.create_string_buffer(width), ctypes.c_uint32()
    while len(places):
        taken = core().fast.tb_bitmap(address(places), len(places), body, width, ctypes.byref(size))
        out.append((int(places[0]), body.raw[: size.value]))
        places = places[taken:]
    return out


def answer(job: Job, now: int) -> int:
    """Sends rows that others have asked for, as far as budgets go; returns when to go on (0: nothing is left)."""
    asking, queue = job.repairs.asking, job.flow.queue
    if not asking.waiting:  # asked in every turn
        return 0
    pace, stride = job.flow.pace / max(1, len(job.peers)), job.store.width + HEADER_BYTES
    while queue.answer(job.repairs.asked, job.terms.pointer, now, pace, stride):
        _gone(job, np.frombuffer((ctypes.c_int64 * asking.gone).from_address(asking.places), np.int64))
    queue.pump(now)
    return int(asking.again)


def _gone(job: Job, places: Places) -> None:
    """Tells the asker that there are no such rows."""
    asking = job.repairs.asking
    flags = (Flag.FIRST_HALF if asking.first_half else 0) | job.said.get(asking.label, 0)
    for row, body in encode_repair(places, job.store.width):
        head = job.header(PacketType.GONE, asking.label, asking.layout, row=row, rows=len(places), flags=flags)
        job.tell(asking.asker, head, body)
        job.counters["repair_gone"] += 1
