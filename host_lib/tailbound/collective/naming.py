"""Names in the log who is late and which link loses, and when it is over. Called once a step, in the transport thread.

All ranks know of a late one what it says itself, so one of them warns, the lowest that is not late, and the late rank
itself; the others note the event at level INFO. Losses are seen by their receiver alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tailbound.collective.job import Job
from tailbound.transport.config import MS
from tailbound.transport.episodes import Episodes, Turn
from tailbound.transport.losses import Loss, Losses
from tailbound.transport.shares import late_limit
from tailbound.transport.steps import step_distance

#: Steps alike before a rank is called late, and before it is called in time again.
_LATE, _IN_TIME = 8, 8


class Naming:
    """What one rank says of the others, and of itself."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._late: Episodes[int] = Episodes(_LATE, _IN_TIME)
        self._losses = Losses()
        self._suspects: frozenset[int] = frozenset()

    def look(self, step: int, lateness: Mapping[int, int], pace: int, now: int) -> None:
        """Looks at everybody.

        Args:
            step: own next step.
            lateness: ns by rank, as told by each; the own one among them.
            pace: ns that an op takes as a rule.
            now: CLOCK_MONOTONIC, ns.
        """
        job = self._job
        suspects = job.contribution_suspicion.suspects | job.result_suspicion.suspects
        limit = late_limit(lateness.values(), pace)
        for rank, late in lateness.items():
            if rank not in suspects and rank not in job.gone:  # of these nothing new is known
                so = True if late > limit else False if 2 * late <= limit else None
                if turn := self._late.see(rank, so, now, step):
                    self._say_late(rank, turn, late, step)
        for rank in sorted(self._suspects - suspects - job.gone):
            job.emit("back", f"rank {rank} is waited for again (step {step})", level=logging.INFO, back=rank, step=step)
        self._suspects = suspects
        for loss in self._losses.observe(self._totals(), now):
            self._say_loss(loss, step)

    def _totals(self) -> dict[int, tuple[int, int]]:
        """Rows of every peer: expected, and lost on the way, those repaired later among them."""
        job = self._job
        expected, gaps = job.books.ledger.by_peer().T.tolist()
        repaired = job.repairs.came.sum(axis=0).tolist()
        return {peer: (expected[peer], gaps[peer] + repaired[peer]) for peer in job.peers}

    def _say_late(self, rank: int, turn: Turn, late: int, step: int) -> None:
        job, ms = self._job, round(late / MS, 1)
        who = "this rank" if rank == job.rank else f"rank {rank}"
        steps = step_distance(step, self._late.begun(rank))
        fields: dict[str, Any] = {"late": rank, "ms": ms, "step": step, "steps": steps}
        if turn == "over":
            text = f"{who} is in time again (step {step}, after {steps} steps)"
            job.emit("in_time", text, level=logging.INFO, **fields)
            return
        since = f"for {steps} steps now" if turn == "lasts" else "the others do not wait for it beyond their deadlines"
        text = (
            f"{who} is late: its gradients come {ms:g} ms after those of the others (step {step}); {since}. "
            "Look at its host: other processes, clock rate, data loading"
        )
        job.emit("late", text, level=logging.WARNING if self._speaks(rank) else logging.INFO, **fields)

    def _speaks(self, late: int) -> bool:
        """Whether this rank is the one that warns of ``late``."""
        job = self._job
        here = [r for r in (job.rank, *job.waited_for) if not self._late.running(r)]
        return late == job.rank or job.rank == min(here, default=-1)

    def _say_loss(self, loss: Loss, step: int) -> None:
        where = "to this rank" if loss.peer is None else f"from rank {loss.peer} to this one"
        fields: dict[str, Any] = {"peer": loss.peer, "share": loss.share, "others": loss.others, "step": step}
        if loss.turn == "over":
            text = f"the way {where} no longer loses packets (step {step})"
            self._job.emit("link_well", text, level=logging.INFO, **fields)
            return
        alike = "from all peers alike" if loss.peer is None else f"{loss.others:.2%} from the others"
        text = (
            f"{loss.share:.1%} of the packets are lost on the way {where} (step {step}), {alike}. "
            "Look at its cable, port and queues: ethtool -S, tc -s qdisc"
        )
        self._job.emit("link_loses", text, **fields)
