"""Packets of somebody who has all but the key, and what a trainer may do with the keys. Rules: auth-1, auth-2."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

import bare_cases
import cases
from kernel_world import KernelWorld
from tailbound.kernel import syscalls
from tailbound.kernel.maps import put_key
from tailbound.wire.schema import PacketType, Verdict


def test_a_key_that_is_over_opens_nothing(make: Callable[..., KernelWorld]) -> None:
    """Two epochs later its place is another key's."""
    world = make()
    world.arm()
    recorded = cases.tagged(cases.contribution(1))
    assert world.take(recorded)[0] == Verdict.STORED
    assert world.take(cases.tagged(cases.contribution(2, seq=cases.SEQ + 1), 1))[0] == Verdict.STORED
    put_key(world.maps.fds["keys"], 2, cases.KEYS[0][::-1].copy())
    assert world.take(cases.tagged(cases.contribution(2))) == (Verdict.FORGED, 256)
    assert world.take(cases.tagged(cases.contribution(2), 1))[0] == Verdict.ADDED


def test_recorded_packets_do_not_say_that_their_rank_lives(make: Callable[..., KernelWorld]) -> None:
    """Rules: auth-5, kernel-12."""
    world = make()
    world.arm()
    op, state = cases.OP, world.store.peer_states
    recorded = [
        cases.tagged(cases.ready(contributed=op - 1, deadline=100 + i, lateness=i, incast=1 + i)) for i in (0, 1)
    ]
    world.take(recorded[0])
    noted = state[1].tolist()
    for i in range(4):
        world.take(recorded[i & 1])
        assert state[1].tolist() == noted
    world.take(cases.tagged(cases.ready(contributed=op, deadline=200, incast=9)))
    assert (state[1]["contributed"], state[1]["deadline"], state[1]["incast"]) == (op, 200, 9)
    assert state[1]["last_ns"] > noted[4]


def test_an_echo_counts_once_and_none_before_it(make: Callable[..., KernelWorld]) -> None:
    """Rules: auth-5, kernel-18."""
    world = make()
    state = world.store.peer_states
    world.take(cases.control_packet(PacketType.ECHO, struct.pack(">QQ", 2, 0), seq=7))
    noted = state[1].tolist()
    assert (state[1]["told"], state[1]["rtt_ns"] > 0) == (7, True)
    for sent in (2, 1, 1 << 63):
        world.take(cases.control_packet(PacketType.ECHO, struct.pack(">QQ", sent, 0), seq=8))
        assert state[1].tolist() == noted


def test_a_switch_has_no_key_and_nobody_else_lacks_it(make: Callable[..., KernelWorld]) -> None:
    """Rule: auth-7."""
    world = make()
    world.arm()
    assert bare_cases.wrong(world) == {}


def test_keys_cannot_be_read_back(make: Callable[..., KernelWorld]) -> None:
    world = make()
    world.arm()
    fd = world.maps.fds["keys"]
    with pytest.raises(PermissionError):
        syscalls.map_lookup(fd, struct.pack("=I", 0), cases.KEYS[0].nbytes)


@pytest.mark.needs("bpf", "clang", "libbpf")
def test_without_the_program_nothing_is_taken() -> None:
    """A job says that it has a key where that program is missing."""
    world = KernelWorld("clang")
    try:
        for data in (cases.contribution(1), cases.tagged(cases.contribution(1))):
            world.control(tagged=1)
            assert world.take(data) == (Verdict.INACTIVE, 256)
        world.control(tagged=0)
        assert world.take(cases.contribution(1))[0] == Verdict.STORED
    finally:
        world.close()
