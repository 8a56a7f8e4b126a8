"""Where every packet went: two independent countings of one network, compared. Pure.

On one side what the senders handed to their kernels, the probes that kernels sent back, and what the cables doubled; on
the other what receivers made of packets (the ledger of verdicts), what the fault programs lost on purpose and what
queues and sockets dropped. After quiescence both sides are equal to the packet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Balance:
    """Packets; the left side is ``sent + reflected + duplicated``, the right side all the others."""

    sent: int
    reflected: int
    duplicated: int
    taken: int
    dropped: int
    lost_on_purpose: int
    lost_in_queues: int
    lost_in_sockets: int

    @property
    def difference(self) -> int:
        """Packets that nobody has accounted for (negative: packets that nobody has sent)."""
        left = self.sent + self.reflected + self.duplicated
        return left - self.taken - self.dropped - self.lost_on_purpose - self.lost_in_queues - self.lost_in_sockets

    @property
    def balanced(self) -> bool:
        """Whether both sides are equal."""
        return self.difference == 0

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain types."""
        return {**asdict(self), "difference": self.difference, "balanced": self.balanced}


def balance(
    stats: Iterable[Mapping[str, Any]],
    *,
    socket_drops: int = 0,
    lost_on_purpose: int = 0,
    duplicated: int = 0,
    lost_in_queues: int = 0,
) -> Balance:
    """The balance of a job.

    Args:
        stats: every rank's ``Communicator.stats()``, taken when nothing was in flight any more.
        socket_drops: packets for which a receiving socket of the ``udp`` datapath had no room.
        lost_on_purpose: packets of the job that fault programs dropped.
        duplicated: packets of the job that fault programs doubled.
        lost_in_queues: frames of the job's link that queues and rings dropped.
    """
    sent = reflected = taken = dropped = 0
    for one in stats:
        sent += sum(int(peer["packets"]) for peer in one["sent"].values())
        refused = sum(one["drops"].values())
        reflected += int(one["verdicts"].get("REFLECTED", 0))
        dropped += refused
        taken += sum(one["verdicts"].values()) - refused
    return Balance(sent, reflected, duplicated, taken, dropped, lost_on_purpose, lost_in_queues, socket_drops)
