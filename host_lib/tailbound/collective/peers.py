"""Ops whose rows the ranks own: what the owner and the receiver see of them, and what they ask for again.

Contributions and results are repaired in every op (clock-23). A missing contribution costs its row one contributor,
which the mean allows for, and a missing result costs every replica; but both are asked for while others are still
sending, as a rule, so that a row that was lost costs no op its time.
"""

# ruff: noqa: D102 - ``stage.Seen`` and ``aggregation.Aggregation`` say what their methods do
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.owners import first_place
from tailbound.codec.scale import Weights
from tailbound.collective.actions import Action, AskMarks, AskRows
from tailbound.collective.announce import announce
from tailbound.collective.job import Job
from tailbound.collective.known import Known, Session
from tailbound.collective.op import Half, Op, Phase
from tailbound.collective.retransmit import settle_results
from tailbound.collective.tally import read_records
from tailbound.collective.timing import cut_off, suspect
from tailbound.collective.view import View
from tailbound.transport.headers import finalise_contributions
from tailbound.transport.recovery import NEVER, Incoming
from tailbound.transport.stage import NO_REPAIR, Repair, Seen, Why
from tailbound.wire.schema import PacketType

#: A requested row may still come.
_WAITS: Repair[Action] = Repair(open=True)


class Contributions:
    """What an owner sees of the first half (``stage.Seen``)."""

    def __init__(self, view: View) -> None:
        self._view, self._known, self._op = view, view.known, view.op
        self._own_in = view.op.encoded or view.known.self_late
        self._live = view.known.membership.live

    @property
    def progress(self) -> int:
        record = self._view.record
        return int(record["progress"]) if record is not None else 0

    @property
    def left(self) -> int:
        waited = sum(p not in self._op.abstainers for p in self._live)
        return self._view.own * waited - self.progress

    def complete(self) -> bool:
        known, record = self._known, self._view.record
        if known.ranks == 1:
            return self._op.encoded
        return (
            record is not None
            and self._own_in
            and int(record["rows_complete"]) >= self._view.own
            and self._really(int(record["opened_ns"]))
        )

    def _really(self, opened: int) -> bool:
        """Whether the kernel's count of complete rows can be believed.

        A row counts once: it may have become complete without a rank that became live in the middle of the op.
        """
        if opened > self._known.live_since:
            return True
        summed = self._view.summed()
        return all(summed[p] >= self._view.own for p in self._live)

    def finished(self) -> bool:
        return self._own_in and len(self._view.through()) == len(self._live)

    def heard(self, now: int) -> int:
        return self._known.silent_since((p for p in self._live if not self._view.brings_no_more(p)), now)

    def repair(self, now: int, *, late: bool) -> Repair[Action]:
        return _open(self._op.first)

    def recover(self, now: int) -> tuple[list[Action], int]:
        """See ``aggregation.Aggregation``: of ranks that may still bring rows, or whose mark is missing."""
        op, view, known, half = self._op, self._view, self._known, self._op.first
        if op.overtaken or not view.own or view.foreseen_wrongly():
            return [], NEVER
        ended = view.all_contributed(self._live)
        left = [p for p in self._live if p not in op.abstainers and not (p in op.stayed_out and p in ended)]
        placement, ranks = op.place.placement, known.ranks
        flows = [Incoming(p, view.own, first_place(placement, known.rank, p, ranks), p in ended) for p in left]
        return _requests(view, half, flows, now)

    def insists(self, over: int, *, late: bool) -> int:
        return 0


class Results:
    """What a receiver sees of the second half (``stage.Seen``)."""

    def __init__(self, view: View) -> None:
        self._view, self._known, self._op = view, view.known, view.op
        self._counts = view.op.place.placement.shares
        # rows that came when their op was too far ahead for a record, or whose record has gone, are there all the same
        here = view.record
        self.progress = int(here["results_in"]) if here is not None else self._present_of(view.known.peers)
        self._owners = view.owners()
        self._due = sum(self._counts[p] for p in self._owners)

    def _present_of(self, owners: list[int]) -> int:
        by_owner = np.zeros(self._known.world, np.int64)
        self._view.gather(by_owner)
        present: list[int] = by_owner.tolist()
        return sum([present[p] for p in owners])

    @property
    def left(self) -> int:
        return self._due - self.progress

    def complete(self) -> bool:
        if self.progress >= self._op.place.layout.shape.rows - self._view.own:
            return True
        if self.left > 0 or len(self._owners) == len(self._known.peers) or self._owed():
            return False
        return self._present_of(self._owners) >= self._due

    def _owed(self) -> bool:
        """Whether a rank that has said goodbye, and is not waited for, may still answer for its results (clock-15)."""
        asked = self._op.second.recovery
        gone = (p for p in self._known.membership.gone if self._counts[p] and self._view.published(p))
        return self._repairable() and any(asked is None or not asked.over(p) for p in gone)

    def _repairable(self) -> bool:
        """Whether results are repaired: not those of an op that left no trace here, since the others are far ahead.

        Nor those of an op to which all say that they bring nothing: there are none.
        """
        known, op = self._known, self._op
        return (
            known.config.repair and not (op.overtaken and self._view.record is None) and not _nobody_had_any(known, op)
        )

    def finished(self) -> bool:
        return len(self._view.all_published(self._owners)) == len(self._owners)

    def heard(self, now: int) -> int:
        return self._known.silent_since((p for p in self._owners if not self._view.published(p)), now)

    def repair(self, now: int, *, late: bool) -> Repair[Action]:
        return _open(self._op.second)

    def recover(self, now: int) -> tuple[list[Action], int]:
        """See ``aggregation.Aggregation``: of owners, also of those that have said goodbye."""
        op, view, counts = self._op, self._view, self._counts
        ended = view.givers() if self._repairable() else []
        running = [p for p in self._owners if not view.published(p)]
        rows_of = op.place.placement.rows_of
        flows = [Incoming(p, counts[p], 0, p in ended, rows_of(p)) for p in (*running, *ended)]
        return _requests(view, op.second, flows, now)

    def insists(self, over: int, *, late: bool) -> int:
        """As long as owners may still give results that they have published."""
        asked = self._op.second.recovery
        if asked is None:  # no rank has looked at its flows
            return over + 1 if late and self._repairable() and self._view.givers() else 0
        return over + self._known.config.insist if asked.open else 0


def _requests(view: View, half: Half, flows: Sequence[Incoming], now: int) -> tuple[list[Action], int]:
    """Requests for lost rows and marks of ``flows``, and when to look again."""
    if half.recovery is None:
        half.recovery = view.recovery(results=half is view.op.second)
    op = view.op
    wanted, silent = half.recovery.poll(now, flows, asks=op.encoded, deadline=half.clock.due)
    first_half, sizes = half is op.first, {flow.rank: flow.rows for flow in flows}
    asked: list[Action] = [AskRows(rank, places, sizes[rank], first_half=first_half) for rank, places in wanted]
    return [*asked, AskMarks(tuple(silent))] if silent else asked, half.recovery.due


def _open(half: Half) -> Repair[Action]:
    return _WAITS if half.recovery is not None and half.recovery.open else NO_REPAIR


class PeerOwned:
    """Every rank sums its share of the rows (``aggregation.Aggregation``)."""

    def late_rows_serve(self, view: View) -> bool:
        return False

    def results(self, view: View) -> Seen[Action]:
        return Results(view)

    def recover(self, view: View, now: int) -> tuple[list[Action], int]:
        op = view.op
        half = op.first if op.first.phase is Phase.OPEN else op.second
        results = half is op.second and op.launch is not None and op.encoded and half.phase is Phase.OPEN
        if not (half is op.first or results):
            return [], NEVER
        if now < op.listen and not op.news:
            return [], op.listen
        return Results(view).recover(now) if results else Contributions(view).recover(now)

    def weights(self, session: Session) -> Weights | None:
        return session.weights

    def in_time(self, op: Op) -> bool:
        return not op.sealed

    def send(self, job: Job, op: Op) -> None:
        """Bursts in turn to all peers that take rows, beginning with rank + 1 (clock-17)."""
        b, place = op.buffers, op.place
        placement, scales, label = place.placement, b.scales, op.label
        here = job.membership.here
        takers = [p for p in here if placement.shares[p] and not job.records.published(p, label)]
        shape = place.layout.shape
        head = job.header(
            PacketType.CONTRIBUTION, label, place.layout.tag, flags=shape.code.flags, map_id=placement.owner_map.id
        ).view(np.uint8)
        starts = placement.starts
        to = [(starts[p], placement.shares[p], p, place.sum_seqs[p]) for p in takers]
        finalise_contributions(b.stamped, head, to, scales.exponents, scales.weights, label, job.key_of(place))
        runs = [(peer, b.rows_for[peer]) for peer in takers]
        job.flow.contributions(op, runs)
        others = [p for p in here if p not in takers]
        if others:  # every rank hears of every op (clock-2)
            announce(job, op, others)

    def read(self, job: Job, op: Op, why: Why, by_owner: NDArray[np.int64]) -> None:
        b, outcome, place = op.buffers, op.outcome, op.place
        if not job.peers:
            return
        present = View(job, op).gather(by_owner)
        settle_results(job, op)
        job.datapath.fence()
        records, label = job.records.results, op.label
        outcome.overwritten = int(
            read_records(records, b.source, label, b.row_scale, b.row_exponent, 0, job.ranks, None)
        )
        if outcome.overwritten:
            job.counters["results_overwritten"] += outcome.overwritten
        outcome.delivered += present - outcome.overwritten
        outcome.void = present == 0 and _nobody_had_any(job, op)
        if outcome.void:
            return
        others = place.layout.shape.rows - place.placement.shares[job.rank]
        outcome.expected += others
        outcome.missed = others - present + outcome.overwritten
        _suspect(job, op, by_owner)
        if why == "deadline":
            counts = place.placement.shares
            late = [p for p in job.membership.owners if not job.records.published(p, op.label)]
            flows = [(int(by_owner[p]), counts[p]) for p in late]
            cut_off(job, op, op.second, op.second.clock.over - (op.spans.sealed or op.start), flows)


def _nobody_had_any(known: Known, op: Op) -> bool:
    """Whether no rank brought rows, as all say (a loss scale overflows on all ranks, say): no owner is to blame."""
    brought = not (op.abstains or op.outcome.unsent)
    live = known.membership.live
    heard = known.membership.quorum({known.rank, *op.abstainers})
    return not brought and bool(live) and op.abstainers.issuperset(live) and heard


def _suspect(job: Job, op: Op, by_owner: NDArray[np.int64]) -> None:
    counts = op.place.placement.shares
    absent = {p for p in job.membership.here if counts[p] and by_owner[p] == 0}
    op.outcome.missing |= absent
    # who was left out of the map is present again by its contributions, since it has no results to publish
    silent, marks = job.membership.contribution.suspects, job.records
    absent |= {
        p
        for p in job.membership.result.suspects
        if not counts[p] and (p in silent or not marks.contributed(p, op.label))
    }
    suspect(job, op, absent, ("results",), "published no result for", "its rows count as zero until others own them")
