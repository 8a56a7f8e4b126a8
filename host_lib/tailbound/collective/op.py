"""State of one op on one rank: what has been done of it, and its clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.buffers import Buffers
from tailbound.collective.coder import HOST, Coder, Values
from tailbound.errors import TailboundError
from tailbound.transport.clock import Extension, Quiet
from tailbound.transport.flush import Retry
from tailbound.transport.sequence import Layout, Place
from tailbound.transport.silence import Silence
from tailbound.transport.steps import label_text
from tailbound.transport.trace import Spans


@dataclass
class Outcome:
    """What an op came to, for the caller and the statistics.

    Attributes:
        label: op label.
        expected, delivered: rows: contributions to own rows plus results of others, as they should be and as they came.
        deadline_hits: stages (0..2) that ended by their deadline and not by completeness or quiet.
        failed_groups: groups of which no row arrived (zero in the result).
        void: of one op nothing is there at all, and as far as this rank knows since no rank's gradient was finite.
        abstained: the own gradient was not finite.
        late: the own gradient came after its rows had been sealed.
        missing: ranks from which nothing came in a stage.
        overwritten: result rows that were overwritten before use.
        skipped: nothing of it could be had any more, since this rank came after the ring had moved on (clock-20).
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
    skipped_groups: int = 0
    clipped: int = 0
    void: bool = False
    abstained: bool = False
    late: bool = False
    missing: set[int] = field(default_factory=set)
    overwritten: int = 0
    skipped: bool = False
    missed: int = 0
    unsent: bool = False
    nanoseconds: int = 0
    error: TailboundError | None = None


@dataclass
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
    residual: NDArray[np.float32] | None = None


@dataclass
class Op:
    """One op from its first sign of life to the release of its slots."""

    place: Place
    buffers: Buffers
    launch: Launch | None = None
    #: when the own launch found room; the clocks count from here, since a caller may queue as much as it likes
    admitted: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    #: cold: scales still to be agreed on
    cold: bool = False
    needs: dict[int, NDArray[np.int16]] = field(default_factory=dict)
    needs_own: bool = False
    heard_by: set[int] = field(default_factory=set)
    cold_since: int = 0
    ready_again: int = 0
    #: waiting for marks that may have been lost
    silence: Silence = field(default_factory=Silence)
    #: the own rows are there, or are known not to come
    encoded: bool = False
    own_present: bool = False
    sealed: bool = False
    published: bool = False
    finished: bool = False
    delivered: bool = False
    start: int = 0
    own_clock: Extension = field(default_factory=Extension)
    own_quiet: Quiet = field(default_factory=Quiet)
    result_clock: Extension = field(default_factory=Extension)
    result_quiet: Quiet = field(default_factory=Quiet)
    abstainers: set[int] = field(default_factory=set)
    #: flags of the own results (``Flag.SKIP``, ``STOP``, ``LOSSY``)
    flags: int = 0
    #: ranks that have said that they are too late to bring rows
    stayed_out: set[int] = field(default_factory=set)
    spans: Spans = field(default_factory=Spans)
    #: state of asking for missing rows (``collective.repair``)
    repair: Any = None
    #: its rows go to the job's switch, which owns them
    switched: bool = False
    #: contributions sent to the switch again (``collective.switched``)
    retry: Retry | None = None
    #: rows that the switch released before all that were waited for were in
    partial: int = 0
    #: the rank takes part without rows, by its own choice
    silent: bool = False
    #: when a live rank was last seen to hold: no clock starts before
    held: int = 0
    #: when the own rows were coded and summed
    own_in: int = 0
    #: a half ended by quiet
    early: bool = False
    #: what deadlines cut off of the two halves (``stage.cut``)
    transfer_cut: int | None = None
    results_cut: int | None = None
    lost_1: float = 0.0
    lost_2: float = 0.0
    #: all others were through with it before anything of it was seen here
    overtaken: bool = False

    @property
    def abstains(self) -> bool:
        """Whether the rank takes part without rows, as far as is known: by its own choice, or by its gradient."""
        return self.silent or self.outcome.abstained

    @property
    def rotate(self) -> bool:
        """Whether this op is rotated: the owner map says so, so that all ranks agree (codec-12)."""
        return self.place.placement.owner_map.rotate

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Whose scales this op carries on: another codec mode makes it cold."""
        bucket, numel, chunk, mode = self.place.layout.key
        return bucket, numel, chunk, mode & ~3 | self.rotate  # what was asked for may be "auto"; the map has decided

    @property
    def label(self) -> int:
        """The op label."""
        return self.place.label

    @property
    def name(self) -> str:
        """The label as people read it."""
        return label_text(self.label)
