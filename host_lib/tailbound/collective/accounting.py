"""What is counted of every op: rows by peer, limits on loss, times. Called once a stage, not per packet."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable

from tailbound.collective.alerts import Episodes
from tailbound.collective.buffers import Tally
from tailbound.collective.op import Half, Op
from tailbound.collective.speaker import Speaker
from tailbound.errors import TransportError
from tailbound.observe.ledger import Ledger
from tailbound.observe.trace import TRACE_VARIABLE, Trace
from tailbound.transport.steps import step_of
from tailbound.wire.ranks import ranks_of
from tailbound.wire.schema import Action, Flag, Stage, Verdict

#: Durations that are kept, for a median and a tail.
_DURATIONS = 512
#: Ops running with a majority until a stretch without one is over.
_WHOLE = 4
#: Verdict on rows that come a second time by a request, by stage.
_TWICE = Verdict.DUPLICATE_REPAIR, Verdict.DUPLICATE_REPAIR_RESULT


class Accounts:
    """What one rank notes of its ops.

    Args:
        job: of the rank.
        complain: told of a peer most of whose rows have not come, in ops running, although it has sent them.

    Attributes:
        ledger: rows by peer and what became of them.
        latency: of the last ops, from launch to the end of decode, ns.
        trace: the timeline of the last ops; None without ``TAILBOUND_TRACE``.
    """

    def __init__(self, job: Speaker, complain: Callable[[int], None]) -> None:
        self._job = job
        self._complain = complain
        self.ledger = Ledger(job.world)
        self._minority = Episodes(1, _WHOLE)
        self.latency = deque[int](maxlen=_DURATIONS)
        self.trace = Trace(job.rank) if os.environ.get(TRACE_VARIABLE) else None

    def _complain_of(self, tally: Tally) -> None:
        """Complains of peers whose rows do not come."""
        if any(tally.lacking):
            for peer in sorted(ranks_of(tally.lacking)):
                self._complain(peer)

    def closed(self, op: Op) -> None:
        """Says what the first half of an op came to, which binds all ranks (``tb_close_first``)."""
        tally = op.buffers.tally[Stage.CONTRIBUTIONS]
        self._complain_of(tally)
        if op.action:
            self._say(op, Action(op.action), 1 - tally.judged_came / tally.judged)

    def collected(self, op: Op) -> None:
        """Says what the second half of an op came to, and obeys what the owners' flags say of it."""
        job, tally = self._job, op.buffers.tally[Stage.RESULTS]
        flags = tally.flags
        self._complain_of(tally)
        op.outcome.overflowed |= bool(flags & Flag.OVERFLOW)
        told, flags = flags & (Flag.SKIP | Flag.STOP), flags | op.say
        self._look_at_quorum(op, tally)
        if not flags & (Flag.SKIP | Flag.STOP):
            return
        op.outcome.doubtful |= not told
        # nobody applies this op: every rank that has a row of the owner who said so gets zeros
        assert op.launch is not None
        op.launch.coder.clear(op.launch.out)
        op.outcome.skipped = True
        job.counters["ops_skipped"] += 1
        job.events.emit("skipped", f"op {op.name} is not applied: too much of it was lost", op=op.name)
        if flags & Flag.STOP and op.outcome.error is None:
            op.outcome.error = TransportError(
                f"rank {job.rank}: op {op.name}: more contributions were lost than the safeguard allows "
                "(its stop=); `tailbound top` and stats()['ledger'] say between which ranks"
            )

    def _look_at_quorum(self, op: Op, tally: Tally) -> None:
        """No rank applies an op without a majority; the log says it once a stretch (clock-38)."""
        assert op.launch is not None
        job, step = self._job, step_of(op.label)
        empty = op.outcome.failed_groups == op.place.layout.shape.groups
        abstained = op.abstains and job.membership.quorum({job.rank, *op.abstainers})
        nothing = empty and (abstained or op.overtaken)
        if nothing or not op.launch.quorum:
            return
        owners, well = tally.owners + (op.own > 0), tally.well + (op.own > 0 and bool(op.say & Flag.QUORUM))
        minority = self._lacks_rows(op) if op.switched else 2 * well <= owners
        minority &= not job.membership.quorum({job.rank})
        if minority:
            op.launch.coder.clear(op.launch.out)
            op.outcome.minority = True
            job.counters["ops_minority"] += 1
        turn = self._minority.see(None, minority, op.collected_at, step)
        if turn is None:
            return
        since = self._minority.begun(None)
        if turn == "over":
            text = f"a majority of ranks contributes again (step {step}); nothing was trained for some steps"
            job.events.emit("quorum", text, level=logging.INFO, since=since, step=step)
            return
        text = (
            f"fewer than a majority of the job's ranks contribute since step {since} (now {step}): such steps are void "
            "on all ranks, and nothing is trained. Look at the network, and at the hosts of the other ranks; "
            "docs/torch/failures.md, Quorum"
        )
        job.events.emit("no_quorum", text, since=since, step=step)

    def _lacks_rows(self, op: Op) -> bool:
        """Whether half of a switch's rows or more have fewer contributors than a majority, as they say themselves.

        Ranks that bring none do not count here: when that is heard differs from rank to rank.
        """
        well = op.buffers.row_count[op.buffers.source >= 0] >= self._job.membership.majority
        return 2 * int(well.sum()) <= op.place.layout.shape.rows

    def settle(self, half: Half, stage: Stage) -> None:
        """Counts, at the end of a half, what repair has brought (clock-23)."""
        job = self._job
        for flow in half.begun if half.requested else ():
            if flow.again:
                self.ledger.lines[stage][flow.rank].repaired += flow.mended
                job.counters["repair_rows_asked"] += flow.again
                job.counters["rows_repaired"] += flow.mended
                twice = job.records.count(flow.rank, _TWICE[stage])
                job.repairs.paths[stage * job.world + flow.rank].settled(flow.again, twice, probed=bool(flow.probed))

    def delivered(self, op: Op) -> None:
        """Enters an op whose result has been given to its caller."""
        outcome, counters = op.outcome, self._job.counters
        self.latency.append(outcome.nanoseconds)
        if self.trace is not None:
            assert op.launch is not None
            launched = op.launch.launched
            times = {"launched": launched, "admitted": op.admitted, "encoding": op.coding, "queued": op.own_in}
            times |= {"clock": op.start, "sent": op.sent_at, "sealed": op.closed_at, "published": op.published_at}
            times |= {"decoding": op.collected_at, "finished": launched + outcome.nanoseconds}
            facts = {"rows": op.place.layout.shape.rows, "map": op.place.placement.owner_map.id}
            facts |= {"expected": outcome.expected, "delivered": outcome.delivered, "missing": len(outcome.missing)}
            facts |= {"late": outcome.late, "skipped": outcome.skipped, "deadline_hits": outcome.deadline_hits}
            self.trace.add(op.label, times, facts)
        counters["ops"] += 1
        counters["ops_incomplete"] += outcome.delivered < outcome.expected
        counters["rows_expected"] += outcome.expected
        counters["rows_delivered"] += outcome.delivered
        counters["ops_late"] += outcome.late
        counters["clipped"] += outcome.clipped

    def _say(self, op: Op, action: Action, loss: float) -> None:
        job, what = self._job, action.name.lower()
        job.counters[f"safeguard_{what}"] += 1
        level = logging.WARNING if action < Action.STOP else logging.ERROR
        limit = getattr(job.config.safeguard, what)
        text = f"op {op.name}: {loss:.1%} of the contributions to rank {job.rank} are lost, more than {limit:.1%}"
        job.events.emit("loss", text, level=level, op=op.name, action=what)
