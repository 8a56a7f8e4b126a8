"""Packets of somebody who has all but the key, and what a trainer may do with the keys. Rules: auth-1, auth-2."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

import cases
from bpf_calls import map_lookup
from kernel_world import KernelWorld
from tailbound.kernel.maps import put_key
from tailbound.wire.schema import Verdict


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


def test_keys_cannot_be_read_back(make: Callable[..., KernelWorld]) -> None:
    world = make()
    world.arm()
    fd = world.maps.fds["keys"]
    with pytest.raises(PermissionError):
        map_lookup(fd, struct.pack("=I", 0), cases.KEYS[0].nbytes)


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
