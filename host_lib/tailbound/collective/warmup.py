"""Compiles, or loads from the cache, all that the transport thread will call, before the first packet is due.

numba compiles at the first call; several seconds there would cost the first ops their deadlines.
"""

from __future__ import annotations

import os

import numpy as np

from tailbound.codec.decode import decode
from tailbound.codec.encode import encode, measure
from tailbound.codec.mean import mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Received, Sums
from tailbound.codec.scale import headroom_of
from tailbound.codec.shape import shape_for
from tailbound.collective.buffers import Buffers
from tailbound.collective.job import Job, log
from tailbound.collective.running import Running
from tailbound.collective.tally import (
    gather_flags,
    gather_results,
    newest_op,
    point_own,
    read_records,
    rows_by_rank,
    write_expect,
)
from tailbound.collective.timing import last_stamps
from tailbound.transport.headers import Fields, add_flags, finalise
from tailbound.wire.jit import kept
from tailbound.wire.schema import EXPONENT_NONE, PacketType


def announce_compilation(rank: int) -> None:
    """Says that the next minute goes into compiling, where it does; one rank of a host says it for all."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and not all(kept(one) for one in (add_flags, rows_by_rank)):
        log.warning(
            "rank %d: compiling the codec and the transport for this machine before the start, up to a minute; it is "
            "done once for an installation, also ahead, by `tailbound doctor --warm`",
            rank,
        )


def warm_up(job: Job) -> None:
    """Runs one tiny op through the codec, the tallies and the headers; sends nothing and changes no map."""
    width = job.store.width
    shape = shape_for(width, width)
    placement = place(shape, OwnerMap(0, tuple(range(job.ranks)), job.map.rotate), job.world)
    b = Buffers(shape, placement, job.rank, job.ranks)
    data = np.zeros(shape.numel, np.float32)
    rank, own = job.rank, len(b.own_rows)
    coding = Coding(1, rank, job.shift_cap, headroom_of(job.ranks), job.map.rotate)
    measure(data, shape, coding, b.need, job.threads.scratch)
    encode(data, shape, coding, b.contributions, b.scales, job.threads.scratch)
    head = job.header(PacketType.CONTRIBUTION, 0, 0)
    finalise(b.packets, head, b.partials, Fields(b.packet_exponent), 0, b.place, 0)
    counts = np.zeros(job.world, np.int64)
    # cookie 0 belongs to no job, so that no record is taken for one of this op
    rows_by_rank(job.slots, 0, own, job.sum_mask, 0, 1, counts)
    contributed = Own(b.own_groups, b.packets[int(placement.starts[rank]) :][:own], True, b.scales, b.need_work)
    mean_rows(
        Sums(job.store.sums, job.store.slots, 0, 0, 1, b.unknown),
        contributed,
        shape,
        coding,
        b.own,
        job.threads.scratch,
    )
    last_stamps(
        job.store.arrivals,
        np.zeros(4, np.uint64),
        *(np.zeros(0, np.int64),) * 2,
        0,
        np.zeros(0, np.int64),
        np.zeros(5, np.int64),
    )
    add_flags(b.results[:1].copy(), b.result_partials[:1], 0)
    newest_op(job.peer_states, job.live_ranks, 0, 0)
    Running(job)
    expect = np.zeros(1, np.uint64)  # not the kernel's own
    write_expect(expect, 0, 0, 1, b.own_groups, b.exponents)
    b.source[:] = -1
    point_own(b.own_rows, b.usable, b.scale, b.exponent_next, b.source, b.row_scale, b.row_exponent, EXPONENT_NONE)
    gather_results(job.presence, 0, 0, 1, placement.owner, rank, b.source, counts)
    read_records(job.result_records, b.source, 1, b.row_scale, b.row_exponent)
    gather_flags(job.result_records, b.source, 1)
    finalise(b.packets, head, b.partials, Fields(b.packet_exponent), 0, placement.row_at, 0)  # read-only places
    read_records(job.result_records, b.source, 1, b.row_scale, b.row_exponent, 0, 0, b.row_count)
    job.flow.queue.warm_up()
    decode(Received(job.store.results, b.results, b.source, b.row_scale), shape, coding, data, job.threads.scratch)
