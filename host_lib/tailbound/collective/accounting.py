"""What is counted of every op: rows by peer, limits on loss, times. Called once a stage, not per packet."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from operator import or_

from tailbound.collective.alerts import Episodes
from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.collective.tally import flags_by
from tailbound.errors import TransportError
from tailbound.observe.ledger import Ledger
from tailbound.observe.trace import TRACE_VARIABLE, Trace
from tailbound.transport.safeguard import Action, Safeguard
from tailbound.transport.steps import step_of
from tailbound.wire.schema import UNKNOWN_SENDER, Flag, Stage, Verdict

#: Ops running of which less than half has come from a rank that has sent all, until it is told so.
_COMPLAIN = 2
#: As plain numbers: arithmetic on an IntFlag costs microseconds.
_SKIP, _STOP, _OVERFLOW, _QUORUM = int(Flag.SKIP), int(Flag.STOP), int(Flag.OVERFLOW), int(Flag.QUORUM)
#: Durations that are kept, for a median and a tail.
_DURATIONS = 512
#: Ops running with a majority until a stretch without one is over.
_WHOLE = 4


class Accounts:
    """What one rank notes of its ops.

    Args:
        job: of the rank.
        complain: told of a peer most of whose rows have not come, in ops running, although it has sent them.

    Attributes:
        ledger: rows by peer and what became of them.
        contributions: judges contributions to the own rows; its verdict binds all ranks.
        results: judges the results of others; its verdict is this rank's alone, so it only warns.
        latency: of the last ops, from launch to the end of decode, ns.
        flow_bytes: of one rank's contributions to this one, in the last op.
        trace: the timeline of the last ops; None without ``TAILBOUND_TRACE``.
    """

    def __init__(self, job: Speaker, complain: Callable[[int], None]) -> None:
        self._job, limits = job, job.config.safeguard
        self._complain = complain
        self._short = {(stage, peer): 0 for stage in Stage for peer in job.peers}  # ops running, see _COMPLAIN
        self.ledger = Ledger(job.world)
        self.contributions, self.results = Safeguard(limits), Safeguard(limits)
        self._minority = Episodes(1, _WHOLE)
        self.latency = deque[int](maxlen=_DURATIONS)
        self.flow_bytes = 0
        self.trace = Trace(job.rank) if os.environ.get(TRACE_VARIABLE) else None
        self._in_pieces = 0  # frames that the log has told of

    def judge(self, op: Op, summed: Sequence[int], through: Collection[int]) -> None:
        """Sets the flags of the own results of an op that has just been sealed: what binds all ranks.

        Args:
            summed: contributions of each rank in the own rows.
            through: ranks that have sent all that they had for them.
        """
        job, own = self._job, op.own
        there = {rank for rank, count in enumerate(summed) if count or (rank == job.rank and op.own_present)}
        abstainers, stayed_out = op.abstainers, op.stayed_out
        if job.membership.quorum(there | abstainers | stayed_out | ({job.rank} if op.abstains else set())):
            op.flags |= _QUORUM
        awaited = set(job.membership.live).intersection(through) - stayed_out
        judged = [p for p in job.membership.here if p not in abstainers and (summed[p] or p in awaited)]
        found = self.contributions.judge(own * len(judged), sum([summed[peer] for peer in judged]))
        if found.action >= Action.SKIP:
            op.flags |= _SKIP
        if found.action == Action.STOP:
            op.flags |= _STOP
        if found.action:
            self._say(op, found.action, f"of the contributions to rank {job.rank}: {found.why}")

    def sealed(self, op: Op, summed: Sequence[int], through: Collection[int]) -> None:
        """Enters the first half of an op whose results are on their way; arguments as in ``judge``."""
        asked, stayed_out, abstainers = op.first.asked, op.stayed_out, op.abstainers
        for peer in self._job.membership.here:
            if peer not in abstainers:
                again, finished = asked.get(peer, 0), peer in through and peer not in stayed_out
                self._close(Stage.CONTRIBUTIONS, peer, op.own, summed[peer], again, finished=finished)

    def _close(self, stage: Stage, peer: int, due: int, came: int, again: int, *, finished: bool) -> None:
        """``again``: rows that had to be asked for; that some of them came hides no loss here."""
        self.ledger.close(stage, peer, due, came, finished=finished)
        if not finished:
            return
        short = self._short[stage, peer] = self._short[stage, peer] + 1 if 2 * min(came, due - again) < due else 0
        if short >= _COMPLAIN:
            self._complain(peer)

    def collected(self, op: Op, by_owner: Sequence[int]) -> None:
        """Enters the second half of an op that has just ended, and obeys what the owners' flags say.

        Args:
            by_owner: results present of each owner.
        """
        job, counts, asked = self._job, op.place.placement.shares, op.second.asked
        expected = taken = 0
        owners = [peer for peer in job.membership.here if counts[peer]]
        through = {*job.records.all_published(owners, op.label)}
        for peer in owners:
            due, count = counts[peer], by_owner[peer]
            finished = peer in through
            self._close(Stage.RESULTS, peer, due, count, asked.get(peer, 0), finished=finished)
            if count or finished:
                expected += due
                taken += count
        if op.switched:  # what contributors bring is in the counts of the results
            expected, taken = op.outcome.expected, op.outcome.delivered
        said = [one for one in flags_by(job, op) if one >= 0]
        flags = reduce(or_, said, 0)
        op.outcome.overflowed |= bool(flags & _OVERFLOW)
        told, flags = flags & (_SKIP | _STOP), flags | op.flags
        self._look_at_quorum(op, said + [op.flags] * (counts[job.rank] > 0))
        found = self.results.judge(expected, taken)
        if found.action:
            self._say(op, Action.WARN, f"of the results for rank {job.rank}: {found.why}")
        if not flags & (_SKIP | _STOP):
            return
        op.outcome.doubtful |= not told
        # nobody applies this op: every rank that has a row of the owner who said so gets zeros
        assert op.launch is not None
        op.launch.coder.clear(op.launch.out)
        op.outcome.skipped = True
        job.counters["ops_skipped"] += 1
        job.events.emit("skipped", f"op {op.name} is not applied: too much of it was lost", op=op.name)
        if flags & _STOP and op.outcome.error is None:
            op.outcome.error = TransportError(
                f"rank {job.rank}: op {op.name}: more contributions were lost than the safeguard allows "
                "(its stop=); `tailbound top` and stats()['ledger'] say between which ranks"
            )

    def _look_at_quorum(self, op: Op, flags: Sequence[int]) -> None:
        """No rank applies an op without a majority; the log says it once a stretch (clock-38).

        Args:
            flags: of the results of each owner of which there are any.
        """
        assert op.launch is not None
        job, step = self._job, step_of(op.label)
        empty = op.outcome.failed_groups == op.place.layout.shape.groups
        abstained = op.abstains and job.membership.quorum({job.rank, *op.abstainers})
        nothing = empty and (abstained or op.overtaken)
        if nothing or not op.launch.quorum:
            return
        minority = self._lacks_rows(op) if op.switched else 2 * sum(one & _QUORUM > 0 for one in flags) <= len(flags)
        minority &= not job.membership.quorum({job.rank})
        if minority:
            op.launch.coder.clear(op.launch.out)
            op.outcome.minority = True
            job.counters["ops_minority"] += 1
        turn = self._minority.see(None, minority, op.spans.decoding, step)
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

    def in_pieces(self, op: Op) -> None:
        """Says that the driver hands over frames of rows in pieces; an error while no row has come in any other."""
        lacks = op.outcome.delivered < op.outcome.expected
        if not (lacks or op.first.requested or op.second.requested):  # as a rule; to count takes a while
            return
        job, count = self._job, self._job.records.count(UNKNOWN_SENDER, Verdict.NOT_LINEAR)
        if count <= self._in_pieces:
            return
        self._in_pieces = count
        totals = job.records.verdicts().sum(axis=0)
        taken = int(totals[Verdict.STORED] + totals[Verdict.ADDED] + totals[Verdict.RESULT_TAKEN])
        said = (
            f"{count} frames of this job came in pieces (NOT_LINEAR) and were dropped, {taken} rows were taken: the "
            "driver does not hand over frames of this size in one piece; give all ranks a smaller TAILBOUND_MTU (and "
            "attach again, with a smaller --mtu), or use the udp datapath"
        )
        job.events.emit("not_linear", said, level=logging.ERROR, frames=count, taken=taken)
        if not taken and op.outcome.error is None:
            op.outcome.error = TransportError(f"rank {job.rank}: no row can be taken: {said}")

    def delivered(self, op: Op) -> None:
        """Enters an op whose result has been given to its caller."""
        outcome, counters = op.outcome, self._job.counters
        self.latency.append(outcome.nanoseconds)
        self.flow_bytes = op.flow_bytes
        if self.trace is not None:
            op.spans.clock = op.start
            if op.launch is not None:
                op.spans.launched, op.spans.admitted = op.launch.launched, op.admitted
            facts = {"rows": op.place.layout.shape.rows, "map": op.place.placement.owner_map.id}
            facts |= {"expected": outcome.expected, "delivered": outcome.delivered, "missing": len(outcome.missing)}
            facts |= {"late": outcome.late, "skipped": outcome.skipped, "deadline_hits": outcome.deadline_hits}
            self.trace.add(op.label, op.spans, facts)
        counters["ops"] += 1
        counters["ops_incomplete"] += outcome.delivered < outcome.expected
        counters["rows_expected"] += outcome.expected
        counters["rows_delivered"] += outcome.delivered
        counters["ops_late"] += outcome.late
        counters["clipped"] += outcome.clipped

    def _say(self, op: Op, action: Action, what: str) -> None:
        job = self._job
        job.counters[f"safeguard_{action.name.lower()}"] += 1
        level = logging.WARNING if action < Action.STOP else logging.ERROR
        job.events.emit("loss", f"op {op.name}, {what}", level=level, op=op.name, action=action.name.lower())
