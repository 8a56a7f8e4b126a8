"""Counting over slot records and presence, by the library (``host_lib/core/rows.c``): one pass each."""

from __future__ import annotations

import ctypes

from tailbound.collective.known import Known
from tailbound.collective.op import Op
from tailbound.kernel.core import core

#: s64[world], by rank.
Counts = ctypes.Array[ctypes.c_int64]


def counts(known: Known) -> Counts:
    """One for every rank of the job, a switch included."""
    return (ctypes.c_int64 * known.world)()


def summed_by(known: Known, op: Op) -> Counts:
    """Own rows that hold a contribution, by rank."""
    found = counts(known)
    core().fast.tb_summed(known.terms.pointer, ctypes.addressof(op), found)
    return found


def gather(known: Known, op: Op, by_owner: Counts) -> int:
    """Notes in ``op.buffers.source`` which results are here; returns how many.

    Args:
        by_owner: written: how many of whom.
    """
    return int(core().fast.tb_gather(known.terms.pointer, ctypes.addressof(op), by_owner))


def point_own(known: Known, op: Op) -> None:
    """Points the own rows of ``op.buffers.source`` at the own results."""
    core().fast.tb_point_own(known.terms.pointer, ctypes.addressof(op))


def read_records(known: Known, op: Op, form: int = 0) -> int:
    """Reads scales, and of a switch next exponents and contributors, of all results that ``gather`` has found.

    Args:
        form: ``Flag.SWITCHED`` or ``Flag.SUMS``, which rows of a switch must have; 0: of ranks, none of them.

    Returns:
        Rows that were overwritten before use, or are not as they should be; they are taken out.
    """
    return int(core().fast.tb_read(known.terms.pointer, ctypes.addressof(op), form))
