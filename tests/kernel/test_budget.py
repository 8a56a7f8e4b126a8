"""What the verifier looks at, of the million instructions that it allows: kernels differ, and so do compilers."""

from __future__ import annotations

import os

import pytest

import cases
from kernel_world import KernelWorld
from loaders import both_loaders
from switch_world import SwitchWorld
from tailbound.kernel import load, syscalls
from tailbound.transport.config import WIDTH_MOST

#: Of a million. Linux 6.1 looked at 1.35 times as many as 6.18 does (docs/xdp.md).
MOST = 300_000
#: The same for a program that few jobs need, with a key or on a VLAN: two forms of each frame, or a tag's hash.
MOST_OF_FEW = 450_000
#: Rows of a switch lie in a page.
WIDTH_OF_PAGE = 3392


@both_loaders
@pytest.mark.parametrize("width", [1408, WIDTH_MOST])
def test_worker(make, width: int) -> None:
    world: KernelWorld = make(width=width)
    assert 0 < syscalls.prog_info(world.program).verified_insns <= MOST


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1344, 8832])
def test_worker_of_ipv6(make, width: int) -> None:
    found = syscalls.prog_info(make(ipv6=True, width=width).program).verified_insns
    assert 0 < found <= MOST_OF_FEW


@both_loaders
@pytest.mark.parametrize("width", [1408, WIDTH_MOST])
def test_worker_with_tags(make, loader: str, width: int) -> None:
    world: KernelWorld = make(width=width)
    defines = {"TB_PORT": cases.PORT, "TB_WIDTH": width, "TB_RESULT_ROWS": cases.RESULT_ROWS, "TB_VLAN": 0}
    program = load.load("tagged.bpf.c", load.TAGGED, defines, load.WORKER_MAP_NAMES, world.maps.fds, loader)
    found = syscalls.prog_info(program).verified_insns
    os.close(program)
    assert 0 < found <= MOST_OF_FEW


@both_loaders
@pytest.mark.parametrize("ipv6", [False, True])
def test_switch(make_switch, ipv6: bool) -> None:
    """Over IPv6 with UDP's checksum."""
    world: SwitchWorld = make_switch(width=WIDTH_OF_PAGE, ipv6=ipv6)
    assert 0 < syscalls.prog_info(world.switch.program).verified_insns <= MOST
