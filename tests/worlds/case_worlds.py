"""What a case of ``cases`` needs before its packet: in the world of the kernel, and in that of the udp datapath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
from kernel_world import PASS, TX, KernelWorld
from tailbound.datapath.tables import Tables
from tailbound.wire.schema import Verdict, op_slot
from udp_world import World

#: What the kernel does with a packet by its verdict; all others are dropped.
ACTIONS = {Verdict.CONTROL_PASSED: PASS, Verdict.REFLECTED: TX}


def _replay(world: KernelWorld | World, case: cases.Case, *, armed: bool) -> None:
    """All that a case has before its packet."""
    if armed:
        world.arm()
    if case.expect_results:
        world.store.expect_results[op_slot(case.expect_results[0])] = case.expect_results
    for packet in case.before:
        world.take(packet)
    if case.sealed:
        world.seal(*case.sealed)
    world.control(**case.control)


def prepare(world: KernelWorld, case: cases.Case, *, armed: bool = False) -> None:
    """Brings the kernel's world to right before the case's packet."""
    _replay(world, case, armed=armed)
    world.ring.drain()


def udp_before(
    case: cases.Case, *, armed: bool = False, ipv6: bool = False, make: Callable[[Any], Any] = Tables
) -> World:
    """The udp datapath right before the case's packet, with the events of what came before."""
    world = World(registered=case.registered, ipv6=ipv6, make=make)
    _replay(world, case, armed=armed)
    return world


def udp_after(case: cases.Case, *, armed: bool = False, ipv6: bool = False) -> World:
    """The udp datapath right after it."""
    world = udp_before(case, armed=armed, ipv6=ipv6)
    world.take(case.packet, case.source)
    return world
