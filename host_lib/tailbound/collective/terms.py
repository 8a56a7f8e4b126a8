"""What the library decides about ops by (``host_lib/core/halves.c``), and the turns in which it does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tailbound.collective.repair import Path
from tailbound.datapath.protocol import Store
from tailbound.kernel.core import address
from tailbound.transport.config import Config
from tailbound.transport.deadline import Deadlines
from tailbound.transport.membership import Membership
from tailbound.transport.overtime import Overtime
from tailbound.wire.packets import record_of
from tailbound.wire.ranks import bitmap
from tailbound.wire.schema import TERMS


class Terms(record_of(TERMS)):  # type: ignore[misc]
    """``tb_terms`` of one rank.

    Args:
        config: settings.
        world: ranks, a switch included.
        cookie: of the job.
        store: of the datapath.
        overtime: what may be waited past deadlines.
        paths: what requests have taught, by rank.

    Attributes:
        heard: when a word of each rank was last read, ns; 0: never.
    """

    def __init__(
        self, config: Config, world: int, cookie: int, store: Store, overtime: Overtime, paths: Sequence[Path]
    ) -> None:
        memory: Any = paths
        self.heard = (ctypes.c_int64 * world)()
        self._kept = store, overtime, memory
        self._terms: object = None
        super().__init__(
            address(store.control), address(store.peer_states), address(store.ops), address(store.slots),
            address(store.presence), address(store.result_records), 0, ctypes.addressof(memory),
            ctypes.addressof(overtime), ctypes.addressof(self.heard), ctypes.addressof(overtime.open),
            stage_max=config.stage_max, insist=config.insist, floor=config.floor, cookie=cookie, rank=config.rank,
            ranks=config.ranks, world=world, sum_mask=store.sum_rows - 1, result_mask=store.result_rows - 1,
            repair=config.repair,
        )  # fmt: skip
        self.pointer = ctypes.addressof(self)

    def follow(self, members: Membership, deadlines: Deadlines, *, self_late: bool) -> bool:
        """Takes over what concerns all ops; returns whether it is another than before: all ops have news then."""
        terms = members.changes, self_late, deadlines.quiet, deadlines.start_max
        if terms == self._terms:
            return False
        self._terms = terms
        _, self.self_late, self.silence, self.start_max = terms
        self.live, self.owners = bitmap(members.live), bitmap(members.owners)
        self.gone, self.voters, self.suspects = bitmap(members.gone), bitmap(members.voters), bool(members.suspects)
        return True
