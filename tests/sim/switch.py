"""A switch that sums, at the end of a link of its own: the reference of the tests, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from reference_switch import Rules
from tailbound_lab.simulate.fabric import Burst, Fabric


class SimSwitch:
    """``reference_switch.Rules`` on a ``Fabric``.

    Attributes:
        trouble: (rank, packet, whether it is a result) -> how often it passes.
        down: it neither takes nor sends anything.
    """

    def __init__(self, fabric: Fabric, rules: Rules) -> None:
        self._fabric, self.rules = fabric, rules
        self.trouble: Callable[[int, bytes, bool], int] = lambda rank, data, result: 1
        self.down = False

    def restart(self) -> None:
        """Forgets all slots, as a switch does whose program is loaded anew."""
        self.rules.slots.clear()

    def take(self, burst: Burst) -> None:
        """Takes what has arrived, and sends what follows from it; it looks at nothing but the packets."""
        ranks, sender = self.rules.ranks, burst.source
        copies = [data for data in burst.packets() for _ in range(self.trouble(sender, data, False))]
        for data in copies if not self.down else []:
            _, out, everybody = self.rules.take(data)
            for rank in range(ranks) if everybody else [sender]:
                for _ in range(self.trouble(rank, out, True) if out else 0):
                    self._fabric.send(Burst(ranks, rank, out, len(out)))
