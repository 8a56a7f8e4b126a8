"""What the tests here lean on: a world that begins anew is as new; and what such worlds cannot show, frozen maps."""

from __future__ import annotations

import contextlib
import mmap
import random

import numpy as np
import pytest

import cases
import switch_cases
from kernel_world import KernelWorld
from switch_cases import Step, contribution
from switch_world import SwitchWorld
from tailbound.datapath.xdp import shapes
from tailbound.kernel import maps, syscalls
from tailbound.kernel.pin import SECRET
from tailbound.wire.schema import WORKER_MAPS, op_label


def content(held: maps.Maps) -> dict[str, bytes]:
    """Every array whole, those too that are not mapped into memory."""
    found = {name: array.tobytes() for name, array in held.arrays.items()}
    for name in held.fds.keys() - found.keys() - {maps.EVENTS, maps.PROGRAMS, *SECRET}:  # keys cannot be read
        fd = held.fds[name]
        info = syscalls.map_info(fd)
        values = [syscalls.map_lookup(fd, key.to_bytes(4, "little"), info.value_size) for key in range(info.entries)]
        found[name] = b"".join(values)
    return found


def test_a_world_begins_as_new(loader: str, make) -> None:
    used: KernelWorld = make(ranks=256)
    packets = [case.packet for case in cases.CASES] + [p for case in cases.CASES for p in case.before]
    for packet in random.Random(1).sample(packets, len(packets)):
        used.run(used.frame_of(packet))
    for op in range(100):
        used.run(used.frame_of(cases.ready(op=op_label(10, op))))
    used.sealer.seal(cases.OP, 3, 5)
    used.store.expect[7] = (cases.OP, 1, 1)
    assert {"slots", "sums", "results", "presence", "ops", "ledger"} <= {
        name for name, array in used.maps.arrays.items() if array.view(np.uint8).any()
    }
    used.begin(3, {2})
    new = KernelWorld(loader)
    try:
        new.begin(3, {2})
        ours, theirs = content(used.maps), content(new.maps)
        assert ours.keys() == {map_.name for map_ in WORKER_MAPS} - set(SECRET)
        assert [name for name in ours if ours[name] != theirs[name]] == []
        assert used.ring.drain() == new.ring.drain() == []
    finally:
        new.close()


def test_a_switch_begins_as_new(loader: str, make_switch) -> None:
    used: SwitchWorld = make_switch((switch_cases.JOB, switch_cases.OTHER))
    for case in switch_cases.CASES:
        for step in case.steps:
            used.feed(step)
    assert used.slots().view(np.uint8).any()
    new = SwitchWorld(loader)
    try:
        new.begin((switch_cases.OTHER,))
        for _ in range(2):  # with other jobs than before, and with the same
            used.begin((switch_cases.OTHER,))
            mapped = [{name: array.tobytes() for name, array in one.switch.maps.arrays.items()} for one in (used, new)]
            assert mapped[0] == mapped[1]
            assert list(used.switch.entries()) == [0]
            used.run(used.frame_of(Step(contribution(0, job=switch_cases.OTHER), None, job=switch_cases.OTHER)))
            assert used.slots().view(np.uint8).any()
    finally:
        new.close()


@pytest.mark.needs("bpf")
def test_a_host_cannot_write_what_only_the_program_writes() -> None:
    """As made for a job: such maps are mapped read-only, and refuse another mapping and the system call."""
    sizes = {"width": cases.WIDTH, "sum_rows": cases.SUM_ROWS, "result_rows": cases.RESULT_ROWS}
    with contextlib.closing(maps.create(WORKER_MAPS, shapes(**sizes), events=False)) as made:
        for map_ in WORKER_MAPS:
            if not map_.mmap:
                continue
            fd, array = made.fds[map_.name], made.arrays[map_.name]
            assert array.flags.writeable == (map_.writer != "program"), map_.name
            value = bytes(syscalls.map_info(fd).value_size)
            if map_.writer == "program":
                with pytest.raises(PermissionError):
                    syscalls.map_update(fd, bytes(4), value)
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
            else:
                syscalls.map_update(fd, bytes(4), value)
            del array
