"""Whether steps average anything: a job that does not ends with an error, not with gradients of zeros (clock-37)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.errors import TransportError
from tailbound.transport.rendezvous import spoken
from tailbound.transport.sequence import Sequence
from tailbound.transport.steps import step_of
from tailbound.wire.schema import Flag


class Averages:
    """Looks at every op that is over.

    An op averages nothing if this rank got no row of it, or had all ranks skip it. All owners must say that they sent
    theirs, or have gone: one that is stopped or cut off says nothing, and that tells for neither side. Steps in flight
    when such a step is over do not count: an owner that was lost says so of all that it has left behind (clock-20).
    Nothing is wrong in ops in which all abstain or this rank is behind, nor in those of a switch, which has a fallback.
    The same holds for a rank that has still to hear of an owner map.

    Args:
        known: of this rank.
        sequence: tells when a step has been launched.
        trying: whether a trial of the way of rows is under way, which may mend it or says more (``paths``).
    """

    def __init__(self, known: Speaker, sequence: Sequence, trying: Callable[[], bool]) -> None:
        self._known, self._sequence, self._trying = known, sequence, trying
        self._good: int | None = None  # the last step with an op of which nothing is wrong
        self._since: int | None = None  # the first of the steps that have averaged nothing since ...
        self._last = self._when = 0  # ... the last of them, and when that was known, ns

    def check(self, op: Op, ops: Iterable[Op]) -> TransportError | None:
        """Takes an op that is over; the error with which the job ends after two steps that have averaged nothing.

        Args:
            op: its result is known.
            ops: all that are in flight.
        """
        step = op.place.step
        if not (self._empty(op) and self._known.in_step):
            self._good, self._since = step, None
            return None
        if step == self._good:
            return None
        if self._in_vain(op) and (self._since is None or step == self._last or op.admitted > self._when):
            self._since, self._last = step if self._since is None else self._since, step
            self._when = self._known.now()
        launched = step_of(self._sequence.upcoming) != step
        over = launched and not any(o.launch and not o.delivered and o.place.step == step for o in ops)
        if not over or self._since in (None, self._last) or self._trying():
            return None
        return self._error(op)

    def _empty(self, op: Op) -> bool:
        """Whether this rank has nothing of an op to which it could have contributed."""
        outcome = op.outcome
        nothing = outcome.skipped or outcome.failed_groups == op.place.layout.shape.groups
        counts = not (op.switched or op.silent or op.overtaken or outcome.void)
        return nothing and counts and not self._known.misses_map(_owners(op))

    def _in_vain(self, op: Op) -> bool:
        """Whether rows of an empty op were lost where ranks were there: some came, or all are said to have been sent.

        One that was away may have sent none. Who was away itself has others' results, but no row sent meanwhile.
        """
        known, gone = self._known, self._known.membership.gone
        if op.say & Flag.SKIP and any(known.summed(op)):
            return True
        due = [rank for rank in _owners(op) if rank != known.rank and rank not in gone]
        nothing = op.outcome.missed == op.rows - op.own
        return nothing and known.records.all_published(due, op.label) == due

    def _error(self, op: Op) -> TransportError:
        known = self._known
        owners = _owners(op)
        if known.membership.gone.issuperset(owners):
            why = f"all rows belong to {spoken(owners)}, gone from the job: let all ranks make as many steps"
        else:
            why = (
                f"rows are lost, though smaller packets of {spoken(owners)} come. Look whether the path takes "
                f"IP packets of {known.row_bytes} bytes (if not, give all ranks a smaller TAILBOUND_MTU), and "
                "whether a device drops segmented bursts (ethtool -K INTERFACE tx-udp-segmentation off)"
            )
        return TransportError(
            f"rank {known.rank}: steps {self._since} to {self._last} have averaged nothing: {why}; `tailbound top` "
            "says between which ranks rows are lost"
        )


def _owners(op: Op) -> list[int]:
    """Who owns rows of ``op``."""
    return [rank for rank, rows in enumerate(op.place.placement.shares) if rows]
