"""Repair: answers ranks that ask for rows again, and counts what the own questions have brought (clock-23)."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.collective.buffers import Kept
from tailbound.collective.job import Job
from tailbound.collective.op import Half
from tailbound.collective.repair import RESULTS, Request, encode_repair
from tailbound.collective.window import Window
from tailbound.kernel.core import core
from tailbound.transport.batch import burst_packets
from tailbound.transport.headers import add_flags
from tailbound.transport.sequence import Place
from tailbound.wire.schema import Flag, PacketType, Stage, Verdict


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
            ledger = job.records.verdicts([rank])[0]
            twice = int(ledger[Verdict.DUPLICATE_REPAIR] + ledger[Verdict.DUPLICATE_REPAIR_RESULT])
            job.repairs.paths[rank].settled(flow.again, twice, probed=bool(flow.probed))


def answer(job: Job, window: Window, now: int) -> int:
    """Sends rows that others have asked for, as far as the budget goes; returns when to go on (0: nothing left)."""
    if not len(job.repairs.requests):  # asked in every turn
        return 0
    repairs, queue, share = job.repairs, job.flow.queue, job.flow.pace / max(1, len(job.peers))
    held: set[int] = set()  # askers that have had their share
    again = 0

    def sent(count: int) -> None:
        job.counters["repair_rows_sent"] += count

    while (request := repairs.requests.newest(held)) is not None:
        found = find(window, request)
        if found is None:
            _gone(job, request, request.places)
            repairs.requests.done(request, len(request.places))
            continue
        rows, states, exists, at, place = found
        stride = rows.shape[1]
        asker, budget = request.asker, repairs.budgets[request.asker]
        pace = min(queue.pacer.limit(asker) or share, share) * (1 if request.first_half else RESULTS)
        count = min(len(request.places), budget.ready(now, pace) // stride)
        budget.spend(count * stride)
        if count == 0:
            held.add(asker)
            burst = min(len(request.places), burst_packets(stride))
            look = now + budget.enough_in(burst * stride, pace)
            again = min(again, look) if again else look
            continue
        part = at[request.places[:count]]
        here = exists[part]
        there = part[here]
        out = rows[there]
        add_flags(out, states[there], int(Flag.REPEAT), job.key_of(place))
        until = now + job.config.stage_max
        queue.submit(request.label, PacketType.RESULT, [(asker, out)], until, sent, now, again=True)
        _gone(job, request, request.places[:count][~here])
        repairs.requests.done(request, count)
    return again


def find(
    window: Window, request: Request
) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.bool_], Places, Place] | None:
    """The list that is asked for: packets, partial checks, and which of them exist, in memory's order; where in it
    every place is; and the op's place. None if it is not kept.
    """
    op, asker, first = window.ops.get(request.label), request.asker, 0
    if request.first_half:
        if op is None or not op.encoded or op.abstains or op.outcome.late or op.returned:
            return None
        placement, b = op.place.placement, op.buffers
        own, (memory, _, partials) = placement.positions_of(asker), b.contributions
        place, rows, states = op.place, memory[own], partials[own]
        exists: NDArray[np.bool_] = np.ones(len(rows), bool)
        first = b.first[asker]
    else:
        if op is not None and op.publishing and not op.returned:
            kept: Kept | None = Kept(op.place, op.buffers.results)
        else:
            kept = window.pool.kept(request.label)
        if kept is None:
            return None
        place, results = kept
        rows, states, exists = results.packets, results.partials, results.usable.astype(bool)
    if place.layout.tag != request.layout or int(request.places[-1]) >= len(rows):
        return None
    return rows, states, exists, (np.arange(len(rows)) - first) % len(rows), place


def _gone(job: Job, request: Request, places: Places) -> None:
    """Tells the asker that there are no such rows."""
    if not len(places):  # as a rule
        return
    flags = Flag.FIRST_HALF if request.first_half else Flag(0)
    flags |= job.said.get(request.label, Flag(0))
    for row, body in encode_repair(places, job.store.width):
        head = job.header(
            PacketType.GONE, request.label, request.layout, owner=request.asker, row=row, rows=len(places), flags=flags
        )
        job.tell(request.asker, head, body)
        job.counters["repair_gone"] += 1
