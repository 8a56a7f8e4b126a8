"""State of one op on one rank: how far its own rows and its two halves are.

An op has two halves, and a rank waits in both: as the owner of rows for the contributions to them, and as a receiver
for the results of all rows. Where a switch owns the rows, the first half has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import Places
from tailbound.codec.records import Coding
from tailbound.collective.buffers import Buffers
from tailbound.collective.coder import HOST, Coder, Values
from tailbound.errors import TailboundError
from tailbound.observe.trace import Spans
from tailbound.transport.backoff import Backoff, Policy
from tailbound.transport.flush import Retry
from tailbound.transport.overtime import Extension
from tailbound.transport.recovery import Recovery
from tailbound.transport.sequence import Layout, Place
from tailbound.transport.stage import Quiet, Why
from tailbound.transport.steps import label_text
from tailbound.wire.schema import HEADER_BYTES, op_slot

#: How a cold op tells its needs again to ranks that have not heard them.
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
        doubtful: this rank alone is known to skip it: others apply it where they heard too late that it was lost.
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


class Sending(IntEnum):
    """How far a rank is with its own contribution."""

    FORESEEN = 0  #: others' packets have named the op, this rank has not launched it
    LAUNCHED = 1
    AGREEING = 2  #: the op is cold: this rank has told its scales and waits for those of the others
    CODING = 3  #: a device makes the codes
    OVER = 4  #: the rows are in the send queue, or it is known that none will come


class Phase(IntEnum):
    """How far one half of an op is."""

    OPEN = 0  #: rows are taken
    CLOSED = 1  #: nothing more is taken: the first half is sealed, or the second decoded
    DONE = 2  #: and passed on: the results have left, or the caller has the gradient


#: A member by the name of its enum takes two calls (until Python 3.12), and these are asked for a hundred times an op.
_OVER, _OPEN, _DONE = Sending.OVER, Phase.OPEN, Phase.DONE


@dataclass(slots=True)
class Half:
    """One half of an op: contributions to the own rows, or results of all."""

    phase: Phase = Phase.OPEN
    #: what has closed it
    why: Why | None = None
    clock: Extension = field(default_factory=Extension)
    quiet: Quiet = field(default_factory=Quiet)
    #: loss detection of its flows; None: no flow has begun
    recovery: Recovery | None = None
    #: what its deadline cut off (``stage.cut``): how long the slowest flow would have taken, ns, and the share of rows
    cut: int | None = None
    lost: float = 0.0

    @property
    def asked(self) -> Mapping[int, Places]:
        """Rows that were asked for again, by the rank that was asked."""
        return self.recovery.requested if self.recovery is not None else {}


@dataclass(slots=True)
class Op:
    """One op from its first sign of life to the release of its slots."""

    place: Place
    buffers: Buffers
    #: its rows go to the job's switch, which sums them all (``aggregation``)
    switched: bool = False
    launch: Launch | None = None
    #: when the own launch found room; the clocks count from here, since a caller may queue as much as it likes
    admitted: int = 0
    #: c(i), when the stage clock started (clock-3); 0: it has not
    start: int = 0
    #: when a live rank was last seen to hold: no clock starts before
    held: int = 0
    sending: Sending = Sending.FORESEEN
    first: Half = field(default_factory=Half)
    second: Half = field(default_factory=Half)
    outcome: Outcome = field(default_factory=Outcome)
    spans: Spans = field(default_factory=Spans)
    #: scales are still to be agreed on
    cold: bool = False
    #: the scales that ranks need, by rank; who has heard this rank's; and who knows scales, so that it has told none
    needs: dict[int, NDArray[np.int16]] = field(default_factory=dict)
    heard_by: set[int] = field(default_factory=set)
    warm: set[int] = field(default_factory=set)
    #: since when the own needs are known, and telling them again
    cold_since: int = 0
    agreeing: Backoff = field(default_factory=lambda: Backoff(AGREEING))
    #: when a device was last given something to do for the own rows, and whether it is through; 0, None: it was not
    begun: int = 0
    ready: Callable[[], bool] | None = None
    #: the own rows are in the own sums, and since when
    own_present: bool = False
    own_in: int = 0
    #: ranks that have said that they bring no rows, and those that said that they come too late to
    abstainers: set[int] = field(default_factory=set)
    stayed_out: set[int] = field(default_factory=set)
    #: flags of the own results (``Flag.SKIP``, ``STOP``, ``QUORUM``)
    flags: int = 0
    #: how it is coded, once that was asked for
    coding: Coding | None = None
    #: all others were through with it before this rank had sent rows
    overtaken: bool = False
    #: what is sent to the switch again
    retry: Retry | None = None
    #: rows that the switch released before all that were waited for were in
    partial: int = 0
    #: its row among the running ones (``running``), and whether something but the kernel has changed it
    row: int = -1
    stirred: bool = True
    #: it had news since its lost rows were looked for last, and when to look for them again, ns
    news: bool = True
    listen: int = 0
    #: the results of the own rows were handed to the send queue
    handed_out: bool = False
    #: what follows from its place, and is asked for many times: its label, and where its record is ...
    label: int = field(init=False)
    slot: int = field(init=False)
    #: ... which op of every step it is, coded in which mode: the one whose scales it carries on ...
    key: tuple[int, int, int, int] = field(init=False)
    #: ... and the bytes of its largest flow: one rank's contributions to one owner, headers included
    flow_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        place = self.place
        self.label = place.label
        self.slot = op_slot(place.label)
        self.key = place.layout.key
        self.flow_bytes = max(place.placement.shares) * (place.layout.shape.codes + HEADER_BYTES)

    @property
    def encoded(self) -> bool:
        """Whether the own rows are there, or known not to come."""
        return self.sending is _OVER

    @property
    def sealed(self) -> bool:
        """Whether the own rows take no contribution any more."""
        return self.first.phase is not _OPEN

    @property
    def published(self) -> bool:
        """Whether the results of the own rows have left."""
        return self.first.phase is _DONE

    @property
    def publishing(self) -> bool:
        """Whether the results of the own rows are in the send queue, or have left."""
        return self.published or self.handed_out

    @property
    def finished(self) -> bool:
        """Whether the result has been decoded."""
        return self.second.phase is not _OPEN

    @property
    def delivered(self) -> bool:
        """Whether the caller has the result."""
        return self.second.phase is _DONE

    @property
    def early(self) -> bool:
        """Whether silence has closed a half."""
        return "quiet" in (self.first.why, self.second.why)

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
        waited: from the own launch to ``start``, ns; None: it was launched later.
        sealed: when the own rows were sealed, or the switch was first asked to release rows.
        own: when the own rows were summed; 0: they did not take part.
        mended: when the last of the rows that were asked for again was in; 0: there were none, or they did not come.
        waited_for, suspects: ranks whose contributions were waited for, and those that were not since they are suspect.
        owners: ranks whose results were waited for.
        complete: when the last result was in, as far as this rank has noticed.
        present: results that were in.
        early: silence has closed a half.
        transfer_cut, results_cut: what deadlines cut off of the halves (``stage.cut``), ns.
        lost: share of the rows that a deadline cut off.
        switched: a switch summed its rows.
        partial: the switch released more than a few of its rows early.
    """

    label: int
    step: int
    flow_bytes: int
    start: int
    waited: int | None
    sealed: int
    own: int
    mended: int
    waited_for: tuple[int, ...]
    suspects: tuple[int, ...]
    owners: tuple[int, ...]
    complete: int
    present: int
    early: bool
    transfer_cut: int | None
    results_cut: int | None
    lost: float
    switched: bool
    partial: bool
