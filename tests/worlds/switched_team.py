"""Teams of communicators whose rows a reference switch averages, over udp on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from reference_switch import ReferenceSwitch, Rules
from support import MemoryStore, Team, assembled
from tailbound.codec.scale import headroom_of
from tailbound.collective.communicator import Communicator
from tailbound.settings.table import switch_of
from tailbound.transport.config import Config

COOKIE = 0x5317C4ED


@contextmanager
def switched_team(
    ranks: int,
    settings: dict[str, Any],
    *,
    form: str = "mean",
    rows: int = 8192,
    trouble: Callable[[int, bytes, bool], int] | None = None,
    cookie: int = COOKIE,
    headroom: int | None = None,
) -> Iterator[tuple[Team, ReferenceSwitch]]:
    """A job of ``ranks`` and its switch."""
    store = MemoryStore()
    with ReferenceSwitch(trouble) as switch:
        environment = {
            "TAILBOUND_SWITCH": switch.address,
            "TAILBOUND_SWITCH_ROWS": str(rows),
            "TAILBOUND_SWITCH_FORM": form,
        }
        where = switch_of(None, environment)

        def maker(rank: int) -> Callable[[], Communicator]:
            config = Config(rank=rank, ranks=ranks, switch=where, **settings)
            return lambda: Communicator(store, config, datapath="udp")

        with assembled([maker(rank) for rank in range(ranks)], cookie) as whole:
            rules = Rules(cookie, ranks, headroom or headroom_of(ranks), rows, form)
            switch.register(rules, [(g.address, g.port) for g in whole[0].greetings])
            yield whole, switch
