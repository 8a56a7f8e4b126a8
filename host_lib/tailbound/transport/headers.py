"""Finalises the headers of packets whose payloads are already in place, by the library (``host_lib/core/stamp.c``).

The encode pass leaves codes in packet memory and, per packet, the state of the check or the tag
(``wire.proof.absorb``). A header is made late, just before its burst leaves, since marks, deadlines and lateness change
until then. So the headers of a run are copies of a template (a complete header in network byte order) in which only the
fields that differ from packet to packet are replaced: one call a run, without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address, core
from tailbound.wire.packets import packer_of
from tailbound.wire.schema import RUN, STAMP
from tailbound.wire.tag import NO_KEY

_STAMP, _RUN = packer_of(STAMP), packer_of(RUN)


class Fields(NamedTuple):
    """Fields that differ from packet to packet; one without packets is as in the template.

    Attributes:
        exponent: i16[T].
        need: i16[T].
        scale: f32[T].
        counted: u16[T].
    """

    exponent: NDArray[np.int16] = np.zeros(0, np.int16)
    need: NDArray[np.int16] = np.zeros(0, np.int16)
    scale: NDArray[np.float32] = np.zeros(0, np.float32)
    counted: NDArray[np.uint16] = np.zeros(0, np.uint16)


def finalise(
    packets: NDArray[np.uint8],
    head: NDArray[Any],
    states: NDArray[np.uint64],
    fields: Fields,
    seq: int,
    places: NDArray[np.uint32] | NDArray[np.int32],
    mark: int,
    key: NDArray[np.uint64] = NO_KEY,
    last: int = -1,
) -> None:
    """Writes the headers of a run of contributions to a switch, or of results: all ``packets``, in sending order.

    ``row`` is the place in the run. The same results go to every peer: ``owner`` in the template is the sending owner's
    rank.

    Args:
        packets: u8[T, stride], stride a multiple of 16; codes at [:, 64:] are in place.
        head: the template (``wire.packets.header``); its own mark (``contributed`` of contributions, ``published`` of
            results) holds for all packets but the last.
        states: u64[T, 4], partial checks of the payloads (kept, so that a header can be finalised again).
        fields: what else differs from packet to packet.
        seq: u32 row sequence of the first place.
        places: u32 or i32[T]; ``seq`` of packet p is ``seq + places[p]``.
        mark: u32, of the last packet: this op where it ends the run, else as in the template.
        key: of the op, which ``states`` were made with; empty: packets carry the check.
        last: which packet leaves last, where not all do; below 0: the last one.
    """
    count, stride = packets.shape
    run = _RUN.pack(0, count, last % count if count else 0, seq, int(head["owner"][0]), int(head["rows"][0]))
    stamp = _STAMP.pack(
        *map(address, (packets, states, head, key, places)), 0, *map(address, fields), 0, stride, mark
    )  # fmt: skip
    core().waits.tb_stamp(stamp, run, 1)


class Contributions(NamedTuple):
    """The packets of one rank's contributions to an op, owner by owner, payloads in place; made once and used again.

    Attributes:
        packets: u8[T, stride], stride a multiple of 16.
        states: u64[T, 4], partial checks of the payloads.
        places: u32[T], place of a packet's row in its owner's list.
        groups: i32[T], group of its row.
    """

    packets: NDArray[np.uint8]
    states: NDArray[np.uint64]
    places: NDArray[np.uint32]
    groups: NDArray[np.int32]


def finalise_contributions(
    out: Contributions,
    head: NDArray[np.uint8],
    runs: Sequence[tuple[int, int, int, int]],
    exponents: NDArray[np.int16],
    weights: NDArray[np.uint8],
    mark: int,
    key: NDArray[np.uint64],
) -> None:
    """Writes the headers of the contributions to ranks that own rows: a run for each, in sending order.

    Args:
        out: its packets are written.
        head: u8[64], the template (``wire.packets.header``); ``owner`` and ``rows`` are those of the run.
        runs: first packet, packets, owner, and u32 row sequence of the owner's first place.
        exponents, weights: i16[G] and u8[G], of every group.
        mark: u32, of the last packet of each run: this op.
        key: of the op, which ``out.states`` were made with; empty: packets carry the check.
    """
    packets, states, places, groups = out
    stamp = _STAMP.pack(
        *map(address, (packets, states, head, key, places, groups, exponents)), 0, 0, 0, address(weights),
        packets.shape[1], mark,
    )  # fmt: skip
    packed = b"".join([_RUN.pack(first, n, n - 1 if n else 0, seq, owner, n) for first, n, owner, seq in runs])
    core().waits.tb_stamp(stamp, packed, len(runs))


def add_flags(packets: NDArray[np.uint8], states: NDArray[np.uint64], flags: int, key: NDArray[np.uint64]) -> None:
    """Sets ``flags`` in finalised headers, and makes their checks or tags anew.

    Args:
        packets: u8[T, stride], stride a multiple of 16.
        states: u64[T, 4], partial checks of the payloads.
        flags: bits to set; the others stay.
        key: of the op, as in ``finalise``.
    """
    count, stride = packets.shape
    core().waits.tb_add_flags(address(packets), stride, count, address(states), flags, address(key))
