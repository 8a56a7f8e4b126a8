"""A peer of which nothing comes from the first step on: an error after some patience, not a suspicion for ever.

Who has taken part and falls silent is suspected, and the others go on without it. Who has not taken part in a single op
has ended before its first step, or its packets are dropped: the others would train alone, and nobody would know.
"""

from __future__ import annotations

from tailbound.collective.job import Job
from tailbound.errors import TransportError
from tailbound.wire.schema import serial_distance

#: ns between two looks.
_EVERY = 1_000_000_000


class Unheard:
    """Peers that have not named an op yet.

    Args:
        patience: ns from the first op on.
    """

    def __init__(self, job: Job, patience: int) -> None:
        self._job, self._patience = job, patience
        # contributions to a switch are seen by nobody else
        self._left = set(job.peers) if job.switch is None else set()
        self._first = job.sequence.next_label
        self._since = self._again = 0

    def look(self, now: int) -> TransportError | None:
        """The error, once patience is over; to be called now and then."""
        if not self._left or now < self._again:
            return None
        self._again = now + _EVERY
        if not self._since and self._job.sequence.next_label != self._first:
            self._since = now
        self._left = {p for p in self._left if not self._heard(p)} - self._job.membership.gone
        if not self._left or not self._since or now < self._since + self._patience:
            return None
        who = ", ".join(map(str, sorted(self._left)))
        self._left = set()
        return TransportError(
            f"rank {self._job.rank}: nothing has come from rank {who} since the first step, for "
            f"{self._patience / 1e9:g} s: has it ended before its first step? Look at its log; where it needs "
            "longer, raise timeout= (TAILBOUND_TIMEOUT)"
        )

    def _heard(self, peer: int) -> bool:
        state = self._job.records.peer_states[peer]
        return bool(state["cookie"] == self._job.cookie and serial_distance(int(state["newest"]), self._first) >= 0)
