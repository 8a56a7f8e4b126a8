"""Frames that do not lie in one piece: what is ours is counted and dropped however short the first piece is."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

import cases
import switch_cases
from kernel_world import DROP, HEADERS, PASS, KernelWorld
from switch_world import SwitchWorld
from tailbound.kernel import syscalls
from tailbound.kernel.frames import frame
from tailbound.wire.schema import HEADER_BYTES, UNKNOWN_SENDER, Verdict

#: Bytes of the first piece, from none at all to all headers.
SHORT = (0, 14, 34, HEADERS - 1, HEADERS, HEADERS + HEADER_BYTES - 1, HEADERS + HEADER_BYTES)


def in_pieces(program: int, data: bytes, linear: int) -> syscalls.RunResult:
    try:
        return syscalls.run_xdp(program, data, 1, linear)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("missing capability 'test runs of frames in pieces': needs Linux 6.18")


@pytest.fixture
def world(make) -> KernelWorld:
    return make()


@pytest.fixture
def switch(make_switch: Callable[..., SwitchWorld]) -> SwitchWorld:
    return make_switch()


def test_ours_is_counted_and_dropped(world: KernelWorld) -> None:
    """Rule: kernel-2."""
    data = world.frame_of(cases.contribution())
    for i, linear in enumerate(SHORT, 1):
        assert in_pieces(world.program, data, linear).action == DROP, linear
        assert world.counted() == {Verdict.NOT_LINEAR: i}, linear
        assert world.ledger()[UNKNOWN_SENDER, Verdict.NOT_LINEAR] == i, linear
    assert not world.store.sums.any()


def test_foreign_passes_untouched(world: KernelWorld) -> None:
    """Rule: kernel-1."""
    data = world.frame_of(cases.contribution(), port=cases.PORT + 1)
    for linear in SHORT:
        done = in_pieces(world.program, data, linear)
        assert (done.action, done.data) == (PASS, data), linear
    assert world.counted() == {}


def test_the_switch_counts_its_own(switch: SwitchWorld) -> None:
    packet, job = switch_cases.contribution(0), switch_cases.JOB
    data = frame(packet, switch_cases.ip_of(0), job.address, job.port, job.port)
    other = frame(packet, switch_cases.ip_of(0), job.address, job.port, job.port + 1)
    for i, linear in enumerate(SHORT, 1):
        assert in_pieces(switch.switch.program, data, linear).action == DROP, linear
        assert in_pieces(switch.switch.program, other, linear).action == PASS, linear
        assert switch.counted() == {Verdict.NOT_LINEAR: i}, linear
