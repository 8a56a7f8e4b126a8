"""Compiles the codec, or loads it from the cache, before the first packet is due.

numba compiles at the first call; several seconds there would cost the first ops their deadlines.
"""

from __future__ import annotations

import os

import numpy as np

from tailbound.codec.decode import decode
from tailbound.codec.encode import encode, measure, normalised
from tailbound.codec.feedback import read_back, write_residual
from tailbound.codec.mean import mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Received, Ring, Sums
from tailbound.codec.shape import shape_for
from tailbound.collective.buffers import Buffers
from tailbound.collective.job import Job, log
from tailbound.wire.jit import kept


def announce_compilation(rank: int) -> None:
    """Says that the next minute goes into compiling, where it does; one rank of a host says it for all."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and not kept(normalised):
        log.warning(
            "rank %d: compiling the codec for this machine before the start, up to a minute, once "
            "per installation; `tailbound doctor --warm` does it ahead",
            rank,
        )


def warm_up(job: Job) -> None:
    """Runs one tiny op through the codec; sends nothing and changes no map."""
    store, rank, scratch = job.store, job.rank, job.threads.scratch
    shape = shape_for(store.width, store.width)
    placement = place(shape, OwnerMap(0, tuple(range(job.ranks))), job.world)
    b = Buffers(shape, placement, rank, job.ranks)
    (memory, _, _), results, source = b.contributions, b.results, b.source
    data = np.zeros(shape.numel, np.float32)
    coding = Coding(1, job.weights, job.config.rotate)
    measure(data, shape, coding, b.scales.need, scratch)
    encode(data, shape, coding, b.contributions, b.scales, scratch)
    contributed = Own(b.own_rows, memory[placement.positions_of(rank)], True, b.scales)
    sums = Sums(Ring(store.sums, store.slots), 0, 0, 1)
    mean_rows(sums, contributed, shape, coding, results, scratch)
    write_residual(data, read_back(b.contributions, source, b.row_scale), b.scales, shape, coding, data.copy(), scratch)
    source[:] = -1
    decode(Received(store.results, results.packets, source, b.row_scale), shape, coding, data, scratch)
