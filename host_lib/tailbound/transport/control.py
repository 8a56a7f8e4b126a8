"""Control packets and headers of rows, as records; checks and tags by the library (``host_lib/core/stamp.c``).

The encode pass leaves codes in packet memory and, per packet, the state of the check or the tag
(``wire.proof.absorb``). A header is made late, just before its burst leaves, since marks, deadlines and lateness change
until then. So the headers of a run are copies of a template (a complete header in network byte order) in which only the
fields that differ from packet to packet are replaced: one call a run, without the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address, core
from tailbound.wire.packets import packer_of, record_of
from tailbound.wire.schema import HEADER, HEADER_BYTES, KEY_WORDS, RUN, STAMP
from tailbound.wire.tag import NO_KEY

_RUN = packer_of(RUN)


class Header(record_of(HEADER, ctypes.BigEndianStructure)):  # type: ignore[misc]
    """A packet's header (``wire.schema.HEADER``): its fields are numbers, its memory is in network byte order."""


assert ctypes.sizeof(Header) == HEADER_BYTES


def parse(data: bytes, keys: Sequence[NDArray[np.uint64]] = ()) -> tuple[Header, bytes] | None:
    """Header and payload of a packet that is well formed and whose check is right, else None.

    With ``keys``, those of the even and the odd epoch in force, its tag is to be right.
    """
    even, odd = map(address, keys) if keys else (0, 0)
    most = 8 * (len(keys[0]) - KEY_WORDS) if keys else 0
    if not core().fast.tb_proven(data, len(data), even, odd, most):
        return None
    return Header.from_buffer_copy(data), data[HEADER_BYTES:]


def encode_needs(needs: NDArray[np.int16] | None) -> bytes:
    """The body of a READY packet, in network byte order; ``needs`` is i16[groups] for a cold op, else None."""
    return b"" if needs is None else needs.astype(">i2").tobytes()


def decode_needs(body: bytes, groups: int) -> NDArray[np.int16] | None:
    """The needs in a READY packet; None if it has none, or too few."""
    return np.frombuffer(body, ">i2", groups).astype(np.int16) if len(body) >= 2 * groups else None


class Stamp(record_of(STAMP)):  # type: ignore[misc]
    """What headers of packets are made of whose payloads are in place (``tb_stamp``); made once and used again.

    Args:
        packets: u8[T, stride], stride a multiple of 16; codes at [:, 64:]. Headers are written.
        states: u64[T, 4], partial checks of the payloads (kept, so that a header can be finalised again).
        place: u32 or i32[T]; ``seq`` of packet p is that of its run plus ``place[p]``. None: ``places`` is set later.
        groups: i32[T], where a packet's values are in ``columns``; none: at its own number.
        columns: what else differs: ``exponents`` and ``needs`` i16, ``scales`` f32, ``counts`` u16, ``weights`` u8.
    """

    def __init__(
        self,
        packets: NDArray[np.uint8],
        states: NDArray[np.uint64],
        place: NDArray[np.uint32] | NDArray[np.int32] | None = None,
        groups: NDArray[np.int32] | None = None,
        **columns: NDArray[Any],
    ) -> None:
        columns |= {name: array for name, array in (("places", place), ("groups", groups)) if array is not None}
        self._memory = packets, states, columns
        found = {name: address(column) for name, column in columns.items()}
        super().__init__(address(packets), address(states), stride=packets.shape[1], **found)

    def write(
        self,
        head: Header,
        runs: Iterable[tuple[int, int, int, int, int, int]],
        mark: int,
        key: NDArray[np.uint64] = NO_KEY,
    ) -> None:
        """Writes the headers of runs of packets, in sending order; ``row`` is the place in the run.

        Args:
            head: the template; its own mark (``contributed`` of contributions, ``published``
                of results) holds for all packets but the one of each run that leaves last.
            runs: as ``tb_run``: first packet, packets, which of them leaves last, u32 row sequence of place 0, and
                ``owner`` and ``rows`` of the headers.
            mark: u32, of the packet that leaves last: this op where it ends the run, else as in the template.
            key: of the op, which the states were made with; empty: packets carry the check.
        """
        self.head, self.key, self.mark = ctypes.addressof(head), address(key), mark
        packed = [_RUN.pack(*run) for run in runs]
        core().waits.tb_stamp(ctypes.addressof(self), b"".join(packed), len(packed))
