"""Whether rows go to the job's switch, or from rank to rank while it is silent. Pure, with the time passed in.

A switch that restarts, or that nobody reaches, sends nothing: every op then lasts until its deadline and brings
nothing. After a few such ops the ranks agree on an owner map without the switch, and try it again after a rest, which
doubles each time that this was too early. So a switch that is gone for good costs a few ops in ever more minutes.
"""

from __future__ import annotations

from tailbound.transport.config import MS

#: ns until the switch is tried again: at first, and at most.
REST, LONGEST_REST = 5_000 * MS, 320_000 * MS


class Fallback:
    """One rank's wish.

    Args:
        after: ops running without any result that are enough.
    """

    def __init__(self, after: int) -> None:
        self._after = after
        self._rest = REST
        self._left: int | None = None  # when the switch was left; None: rows go there
        self._tried: int | None = None
        self._before = 0

    @property
    def switched(self) -> bool:
        """Whether rows should go to the switch."""
        return self._left is None

    def observe(self, silent_ops: int, switched: bool, now: int) -> bool:
        """Takes the silent ops running, and whether the map in force names the switch; returns ``switched``."""
        self._before = min(self._before, silent_ops)
        if self._left is not None:
            if now - self._left >= self._rest:
                self._left, self._tried, self._before = None, now, silent_ops
        elif switched and silent_ops - self._before >= self._after:
            early = self._tried is not None and now - self._tried < self._rest
            self._rest = min(LONGEST_REST, 2 * self._rest) if early else REST
            self._left = now
        return self.switched
