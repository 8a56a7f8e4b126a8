"""The udp datapath before a case of ``cases``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
from udp_world import Tables, World


def udp_before(
    case: cases.Case, *, armed: bool = False, ipv6: bool = False, make: Callable[[Any], Any] = Tables
) -> World:
    """Right before the case's packet."""
    world = World(registered=case.registered, ipv6=ipv6, make=make)
    world.prepare(case, armed=armed)
    return world
