"""This rank's own hold: it is alive but between steps, and the others wait for it (clock-16)."""

from __future__ import annotations

from tailbound.collective.announce import hold
from tailbound.collective.heartbeat import Heartbeat
from tailbound.collective.job import Job
from tailbound.transport.membership import HOLD_EVERY
from tailbound.wire.schema import HEADER_BYTES


class Holding:
    """Says that this rank holds, again and again, until it is computing.

    A hold ends with the next whole step that is launched: a rank that begins to compute when the others' clocks start
    again would miss their deadlines by what a step computes, and stay behind by it for many steps.

    Attributes:
        again: when to say it again, ns; 0: this rank does not hold.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.again = 0
        self._ends = 0  # it is computing again: holds until it has launched a step, or until then
        peers = [job.sender.peers[rank] for rank in job.peers]
        self._heartbeat = Heartbeat(job.sender.sockets[0], peers, HEADER_BYTES, HOLD_EVERY)
        self._heartbeat.warm_up()

    def begin(self) -> None:
        """This rank is between steps from now on."""
        self.again, self._ends = self._say(self._job.now(), over=False), 0

    def resume(self) -> None:
        """This rank computes again."""
        if self.again:
            self._ends = self._job.now() + self._job.deadlines.start_max

    def launched(self, now: int) -> None:
        """The last op of a step has been launched."""
        if self._ends:
            self._end(now)

    def turn(self, now: int) -> int:
        """Says what is due; returns when to look again, ns (0: this rank does not hold)."""
        if self.again:
            if 0 < self._ends <= now:
                self._end(now)
            elif now >= self.again:
                self.again = self._say(now, over=False)
        return self.again

    def stop(self) -> None:
        """Says no more, and enters what the heartbeat has sent in the books."""
        self._heartbeat.stop()
        for peer, count in zip(self._job.peers, self._heartbeat.repeated(), strict=True):
            self._job.sender.took(peer, count, count * HEADER_BYTES, count)

    def _end(self, now: int) -> None:
        self.again = self._ends = 0
        self._say(now, over=True)

    def _say(self, now: int, *, over: bool) -> int:
        if over:
            self.stop()
        said = hold(self._job, self._job.sequence.upcoming, over=over)
        if not over:
            self._heartbeat.said(said, now)
        return now + HOLD_EVERY
