"""What a case of ``cases`` needs before its packet: in the world of the kernel, and in that of the udp datapath."""

from __future__ import annotations

import cases
from kernel_world import PASS, TX, KernelWorld
from tailbound.wire.schema import Verdict, op_slot
from udp_world import World

#: What the kernel does with a packet by its verdict; all others are dropped.
ACTIONS = {Verdict.CONTROL_PASSED: PASS, Verdict.REFLECTED: TX}


def prepare(world: KernelWorld, case: cases.Case, *, armed: bool = False) -> None:
    if armed:
        world.arm()
    for slot, (op, exponent) in case.expect.items():
        world.store.expect[slot] = (op, exponent, 1)
    if case.expect_results:
        world.store.expect_results[op_slot(case.expect_results[0])] = case.expect_results
    for packet in case.before:
        world.take(packet)
    if case.sealed:
        world.sealer.seal(*case.sealed)
    for slot, (op, exponent) in case.told.items():
        world.store.expect[slot] = (op, exponent, 1)
    world.control(**case.control)
    world.ring.drain()


def udp_after(case: cases.Case, *, armed: bool = False, ipv6: bool = False) -> World:
    """The udp datapath after the same."""
    world = World(registered=case.registered, ipv6=ipv6)
    if armed:
        world.arm()
    for slot, (op, exponent) in case.expect.items():
        world.store.expect[slot] = (op, exponent, 1)
    if case.expect_results:
        world.store.expect_results[op_slot(case.expect_results[0])] = case.expect_results
    for packet in case.before:
        world.take(packet)
    if case.sealed:
        world.tables.seal(*case.sealed)
    for slot, (op, exponent) in case.told.items():
        world.store.expect[slot] = (op, exponent, 1)
    world.control(**case.control)
    world.take(case.packet, case.source)
    return world
