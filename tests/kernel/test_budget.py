"""What the verifier looks at, of the million instructions that it allows: kernels differ, and so do compilers."""

from __future__ import annotations

import pytest

from kernel_world import KernelWorld
from switch_world import SwitchWorld
from tailbound.kernel import syscalls
from tailbound.transport.config import WIDTH_MOST

#: Of a million.
MOST = 300_000
#: Rows of a switch lie in a page.
WIDTH_OF_PAGE = 3392


@pytest.mark.parametrize("width", [1408, WIDTH_MOST])
def test_worker(make, width: int) -> None:
    world: KernelWorld = make(width=width)
    assert 0 < syscalls.prog_info(world.program).verified_insns <= MOST


@pytest.mark.parametrize("width", [1408, WIDTH_OF_PAGE])
def test_switch(make_switch, width: int) -> None:
    world: SwitchWorld = make_switch(width=width)
    assert 0 < syscalls.prog_info(world.switch.program).verified_insns <= MOST
