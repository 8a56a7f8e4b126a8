"""Everything one rank notes of its ops beside averaging them, in one place: ledger, limits, rotation, latencies."""

from __future__ import annotations

from tailbound.transport.ledger import Ledger, Window
from tailbound.transport.rotation import Rotation
from tailbound.transport.safeguard import Limits, Safeguard


class Books:
    """State only; ``collective.accounting`` fills it."""

    def __init__(self, ranks: int, limits: Limits, rotate: bool | str, world: int | None = None) -> None:
        self.ledger = Ledger(world or ranks)
        #: judges contributions to the own rows; its verdict binds all ranks
        self.contributions = Safeguard(limits, ranks)
        #: judges the results of others; its verdict is this rank's alone, so it only warns
        self.results = Safeguard(limits, ranks)
        self.rotation = Rotation(rotate)
        #: bytes of one rank's contributions to this one, in the last op
        self.flow_bytes = 0
        #: ns from launch to the end of decode
        self.latency = Window()
