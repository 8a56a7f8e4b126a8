"""Whether steps average anything: a job that does not ends with an error, not with gradients of zeros (clock-37)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.errors import TransportError
from tailbound.transport.rendezvous import spoken
from tailbound.transport.sequence import Sequence
from tailbound.transport.steps import step_distance, step_of
from tailbound.wire.schema import serial_distance


class Averages:
    """Looks at every op that is over.

    An op averages nothing if this rank got no row of it, or if a safeguard skipped it. These do not count: ops in which
    all abstain or this rank is behind, ops of a switch, which has a fallback, and those of a rank that has still to
    hear of an owner map, or that hears of no majority: it is cut off (clock-38).

    Args:
        known: of this rank.
        sequence: tells when a step has been launched.
        trying: whether a trial of the way of rows is under way, which may mend it or says more (``paths``).
    """

    def __init__(self, known: Speaker, sequence: Sequence, trying: Callable[[], bool]) -> None:
        self._known, self._sequence, self._trying = known, sequence, trying
        self._good: int | None = None  # the last step with an op that does not count
        self._since: int | None = None  # the first of the last steps in a row that averaged nothing ...
        self._last = 0  # ... and the last of them

    def check(self, op: Op, ops: Iterable[Op]) -> TransportError | None:
        """Takes an op that is over; the error with which the job ends after two steps that have averaged nothing.

        Args:
            op: its result is known.
            ops: all that are in flight.
        """
        step = op.place.step
        heard = self._heard(op)
        alone = not self._known.membership.quorum({self._known.rank, *heard})
        if alone or not (self._known.steps.in_step and _empty(op)) or self._misses_map(heard):
            self._good, self._since = step, None
            return None
        if step == self._good:
            return None
        if self._since is None or step_distance(step, self._last) > 1:
            self._since = step
        self._last = step
        launched = step_of(self._sequence.upcoming) != step
        over = launched and not any(o.launch and not o.delivered and o.place.step == step for o in ops)
        if not over or step == self._since or self._trying():
            return None
        return self._error(op, heard)

    def _heard(self, op: Op) -> list[int]:
        """Peers of which anything of ``op`` came, or a word since it was launched."""
        known, record = self._known, self._known.records.of(op.label)
        bitmap = record["heard"].tolist() if record is not None else [0] * 4
        return [p for p in sorted(known.peers) if bitmap[p >> 6] >> (p & 63) & 1 or known.heard(p) >= op.admitted]

    def _misses_map(self, heard: list[int]) -> bool:
        """Whether one of ``heard`` knows of a newer owner map: rows under it are refused here until it is told."""
        known, own = self._known.records.peer_states["map_known"], self._sequence.newest_map
        return any(serial_distance(int(known[p]), own) > 0 for p in heard)

    def _error(self, op: Op, heard: list[int]) -> TransportError:
        known = self._known
        owners = _owners(op)
        if known.membership.gone.issuperset(owners):
            why = f"all rows belong to {spoken(owners)}, gone from the job: let all ranks make as many steps"
        elif op.outcome.skipped or not set(owners).isdisjoint(heard):
            why = (
                f"rows are lost, though smaller packets of {spoken(heard)} come. Look whether the path takes "
                f"IP packets of {known.row_bytes} bytes (if not, give all ranks a smaller TAILBOUND_MTU), and "
                "whether a device drops segmented bursts (ethtool -K INTERFACE tx-udp-segmentation off)"
            )
        else:
            why = (
                f"all rows belong to {spoken(owners)}, of which nothing came, as it did of {spoken(heard)}: look at "
                "the hosts of those that own rows"
            )
        return TransportError(
            f"rank {known.rank}: steps {self._since} to {self._last} have averaged nothing: {why}; `tailbound top` "
            "says between which ranks rows are lost"
        )


def _owners(op: Op) -> list[int]:
    """Who owns rows of ``op``."""
    return [rank for rank, rows in enumerate(op.place.placement.shares) if rows]


def _empty(op: Op) -> bool:
    """Whether a rank in step has nothing of an op to which it could have contributed."""
    outcome = op.outcome
    nothing = outcome.skipped or outcome.failed_groups == op.place.layout.shape.groups
    return nothing and not (op.switched or op.silent or op.overtaken or outcome.void)
