"""State of one op on one rank: how far its own rows and its two halves are.

An op has two halves, and a rank waits in both: as the owner of rows for the contributions to them, and as a receiver
for the results of all rows. Where a switch owns the rows, the first half has nothing to wait for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import first_places
from tailbound.codec.records import Coding
from tailbound.collective.buffers import Buffers
from tailbound.collective.coder import HOST, Coder, Values
from tailbound.errors import TailboundError
from tailbound.kernel.core import core
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.sequence import Layout, Place
from tailbound.transport.steps import label_text
from tailbound.wire.packets import record_of
from tailbound.wire.ranks import ranks_of
from tailbound.wire.schema import HALF, HEADER_BYTES, INCOMING, OWN_OP, Phase, Sending, Why, op_slot

#: How a cold op asks for needs that it has not heard.
AGREEING = Policy(2_000_000, 2_000_000)


@dataclass(slots=True)
class Outcome:
    """What an op came to, for the caller and the statistics.

    Attributes:
        label: op label.
        expected, delivered: rows: contributions to own rows plus results of others, as they should be and as they came.
        deadline_hits: stages (0..2) that ended by their deadline and not by completeness or quiet.
        failed_groups: groups of which no row arrived (zero in the result).
        void: of one op nothing is there at all, and as far as this rank knows since no rank's gradient was finite.
        abstained: the own gradient was not finite.
        overflowed: some rank's gradient was not, the own one included, as far as this rank has heard.
        late: the own gradient came after its rows had been sealed.
        missing: ranks from which nothing came in a stage.
        overwritten: result rows that were overwritten before use.
        skipped: nothing of it could be had any more, since this rank came after the ring had moved on (clock-20).
        minority: fewer than a majority of the ranks have part in it, so it is void: zero, on all ranks (clock-38).
        doubtful: others may apply something else: this rank alone is known to skip it, and they heard too late that it
            was lost; or this rank was stopped or cut off, and others have gone on without it.
        missed: result rows of others that never came: what other ranks may have in their averages and this one not.
        unsent: the rank sent no rows at all, since it came too late for the first half.
        nanoseconds: from launch to the end of decode.
        error: why the result cannot be used (``LayoutError``, ``TransportError``); None as a rule.
    """

    label: int = 0
    expected: int = 0
    delivered: int = 0
    deadline_hits: int = 0
    failed_groups: int = 0
    clipped: int = 0
    void: bool = False
    abstained: bool = False
    overflowed: bool = False
    late: bool = False
    missing: set[int] = field(default_factory=set)
    overwritten: int = 0
    skipped: bool = False
    minority: bool = False
    doubtful: bool = False
    missed: int = 0
    unsent: bool = False
    nanoseconds: int = 0
    error: TailboundError | None = None

    def add(self, other: Outcome) -> None:
        """Makes it that of a bucket of which ``other`` is one more op; begins with ``unsent``."""
        for name in ("expected", "delivered", "deadline_hits", "failed_groups", "clipped",
                     "overwritten", "missed"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("void", "abstained", "overflowed", "late", "missing", "skipped", "minority", "doubtful"):
            setattr(self, name, getattr(self, name) | getattr(other, name))
        self.unsent &= other.unsent
        self.label, self.error = other.label, self.error or other.error
        self.nanoseconds = max(self.nanoseconds, other.nanoseconds)


@dataclass(slots=True)
class Launch:
    """A request of the training thread: average ``data`` into ``out`` (numel entries each), then call ``done``."""

    layout: Layout
    data: Values
    out: Values
    done: Callable[[Outcome], None]
    launched: int
    prepare: Callable[[], None] | None = None
    #: False: take part without rows of its own (steps applied without computing them, clock-20)
    contribute: bool = True
    #: reads ``data`` and writes ``out``
    coder: Coder = HOST
    #: f32[numel], written when the own rows are coded: what they leave unsaid of ``data`` (``codec.feedback``)
    residual: Values | None = None
    #: without a majority it is void (clock-38)
    quorum: bool = True


#: A member by the name of its enum takes two calls (until Python 3.12), and these are asked for a hundred times an op.
_OVER, _DONE = Sending.OVER, Phase.DONE


class Flow(record_of(INCOMING)):  # type: ignore[misc]
    """Loss detection of one flow (``tb_incoming``)."""


class Half(record_of(HALF)):  # type: ignore[misc]
    """One half of an op: contributions to the own rows, or results of all (``tb_half``)."""

    #: how long the slowest flow that its deadline cut off would have taken, ns (``timing.cut``)
    cut: int | None = None

    @property
    def begun(self) -> Iterator[Flow]:
        """Its flows that were looked at."""
        flows: Any = (Flow * self.count).from_address(self.flows) if self.flows else ()
        return (flow for flow in flows if flow.known)

    def gone(self, rank: int, row: int, body: bytes) -> None:
        """``rank`` has none of these rows: they are not awaited; ``body``: a bitmap of places from ``row`` on."""
        core().fast.tb_gone(ctypes.addressof(self), rank, row, body, len(body))


class Op(record_of(OWN_OP)):  # type: ignore[misc]
    """One op from its first sign of life to the release of its slots; what is decided by is in ``tb_own_op``.

    Args:
        place: where its rows lie.
        buffers: its memory.
        rank, ranks: own rank, and how many contribute.
        switched: its rows go to the job's switch, which sums them all (``switched``).
    """

    launch: Launch | None = None
    #: since when the own needs are known
    cold_since = 0
    #: when a device was last given something to do for the own rows, and whether it has done it; 0, None: it was not
    begun = 0
    ready: Callable[[], bool] | None = None
    #: how its values are coded, once that was asked for
    coded: Coding | None = None
    #: rows that the switch released before all that were waited for were in
    partial = 0
    #: the memory of the own rows was given back
    returned = False

    def __init__(self, place: Place, buffers: Buffers, rank: int, ranks: int, *, switched: bool = False) -> None:
        placement, shape = place.placement, place.layout.shape
        self.first, self.second = Half(), Half()
        # one by one: keywords take three times as long
        self.halves[:] = ctypes.addressof(self.first), ctypes.addressof(self.second)
        self.shares, self.starts, self.row_at, self.owner = placement.addresses
        given = buffers.given
        self.made, self.usable, self.own_scale = ctypes.addressof(given), given.usable, given.stamp.scales
        self.came[:], self.tally[:] = buffers.told
        self.previous, self.map_id = place.previous, placement.owner_map.id
        self.source, self.row_scale, self.row_exponent, self.row_count, self.states, self.firsts = buffers.addresses
        self.stride, self.form = shape.codes + HEADER_BYTES, shape.code.flags
        self.heads = ctypes.addressof(buffers.stamp)
        self.burst, self.largest = buffers.bursts
        self._seqs = (ctypes.c_uint32 * len(place.sum_seqs))(*place.sum_seqs)
        self.seqs = ctypes.addressof(self._seqs)
        self._places, self.places = first_places(placement, rank, ranks)
        self.label, self.slot, self.layout, self.rows = place.label, op_slot(place.label), place.tag, shape.rows
        self.own, self.sum_seq, self.result_seq = placement.shares[rank], place.sum_seqs[rank], place.result_seq
        self.switched = switched
        self.place, self.buffers = place, buffers
        self.outcome = Outcome()
        #: the scales that ranks need, by rank; and who knows scales, so it has told none
        self.needs: dict[int, NDArray[np.int16]] = {}
        self.warm: set[int] = set()
        #: asking for the needs of others
        self.agreeing = Backoff(AGREEING)
        #: which op of every step it is, coded in which mode: the one whose scales it carries on
        self.key = place.layout.key
        #: bytes of its largest flow: one rank's contributions to one owner, headers included
        self.flow_bytes = max(placement.shares) * (shape.codes + HEADER_BYTES)

    def aim_at(self, destinations: Sequence[int]) -> None:
        """The own results go there."""
        self.aims = len(destinations)
        self.aim[: self.aims] = destinations

    @property
    def abstainers(self) -> set[int]:
        """Ranks that have said that they bring no rows (``abstained``)."""
        return ranks_of(self.abstained)

    @property
    def stayed_out(self) -> set[int]:
        """Ranks that have said that they come too late to bring any (``stayed``)."""
        return ranks_of(self.stayed)

    @property
    def encoded(self) -> bool:
        """Whether the own rows are there, or known not to come."""
        return bool(self.sending == _OVER)

    @property
    def sealed(self) -> bool:
        """Whether the own rows take no contribution any more."""
        return bool(self.first.phase)

    @property
    def published(self) -> bool:
        """Whether the results of the own rows have left."""
        return bool(self.first.phase == _DONE)

    @property
    def finished(self) -> bool:
        """Whether the result has been decoded."""
        return bool(self.second.phase)

    @property
    def spent(self) -> bool:
        """Whether the own rows have left, and all owners have published, so that no rank asks for them."""
        return bool(self.finished and self.queued and self.sent_at and not self.outcome.missed)

    @property
    def delivered(self) -> bool:
        """Whether the caller has the result."""
        return bool(self.second.phase == _DONE)

    @property
    def early(self) -> bool:
        """Whether silence has closed a half."""
        return Why.QUIET in (self.first.why, self.second.why)

    @property
    def silent(self) -> bool:
        """Whether the rank takes part without rows by its own choice."""
        return self.launch is not None and not self.launch.contribute

    @property
    def abstains(self) -> bool:
        """Whether the rank takes part without rows, as far as is known: by its own choice, or by its gradient."""
        return self.silent or self.outcome.abstained

    @property
    def name(self) -> str:
        """The label as people read it."""
        return label_text(self.label)


@dataclass(slots=True)
class Pending:
    """What is kept of an op that is over, until its stamps are read (clock-5). Times are monotonic ns; 0: never.

    Attributes:
        start: of its stage clock.
        sealed: when the own rows were sealed, or the switch was first asked to release rows.
        own: when the own rows were summed; 0: they did not take part.
        mended: when the last of the rows that were asked for again was in; 0: there were none, or they did not come.
        waited_for, suspects: ranks whose contributions were waited for, and those that were not since they are suspect.
        owners: ranks whose results were waited for.
        complete: when the last result was in, as far as this rank has noticed.
        transfer_cut, results_cut: what deadlines cut off of the halves (``timing.cut``), ns.
        switched: a switch summed its rows.
        partial: the switch released more than a few of its rows early.
    """

    label: int
    step: int
    flow_bytes: int
    start: int
    sealed: int
    own: int
    mended: int
    waited_for: tuple[int, ...]
    suspects: tuple[int, ...]
    owners: tuple[int, ...]
    complete: int
    transfer_cut: int | None
    results_cut: int | None
    switched: bool
    partial: bool
