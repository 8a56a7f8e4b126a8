"""Objects and what carries them: placeholders for maps, frozen maps, the event ring across its end, verifier errors."""

from __future__ import annotations

import contextlib
import mmap
import struct

import pytest

import cases
from kernel_world import DEFINES
from tailbound.datapath.xdp import shapes
from tailbound.errors import CapabilityError
from tailbound.kernel import compile as compiling
from tailbound.kernel import load, maps, net, objects, syscalls
from tailbound.wire.schema import EVENT_RING_BYTES, WORKER_MAPS, Event, op_label


def worker(loader: str) -> bytes:
    return compiling.compile_program("worker.bpf.c", load.WORKER, DEFINES, load.WORKER_MAP_NAMES, loader)


def maps_in(code: bytes) -> set[int]:
    """Numbers of the maps that the code names."""
    found, at = set(), 0
    while at < len(code):
        opcode, registers, _, number = struct.unpack_from("=BBhi", code, at)
        if opcode == 0x18 and registers >> 4 == 1:
            found.add(number)
        at += 16 if opcode == 0x18 else 8
    return found


def test_placeholders(loader: str) -> None:
    """Every map of the schema is used, and linking puts in descriptors and constants and changes nothing else."""
    code = worker(loader)
    names = load.WORKER_MAP_NAMES
    of_tags = names.index("keys") + 1  # in the program for these alone
    assert maps_in(code) == set(range(1, len(names) + 1)) - {of_tags}
    fds = {name: 100 + i for i, name in enumerate(names)}
    linked = objects.link(code, names, fds, DEFINES)
    assert maps_in(linked) == set(fds.values()) - {fds["keys"]}
    changed = [i for i in range(0, len(code), 8) if code[i : i + 8] != linked[i : i + 8]]
    assert {code[i] for i in changed} == {0x18}
    constants = {struct.unpack_from("=I", linked, i + 4)[0] for i in changed if code[i : i + 4] != linked[i : i + 4]}
    given = {value for name, value in DEFINES.items() if name in objects.NUMBERS}
    assert constants == (given if loader == "clang" else set())
    with pytest.raises(ValueError, match="names map"):
        objects.link(code, names[:3], fds, DEFINES)
    if loader == "clang":
        with pytest.raises(ValueError, match="asks for TB_"):
            objects.link(code, names, fds)


def test_no_elf() -> None:
    with pytest.raises(ValueError, match="ELF"):
        objects.read_elf(b"no", "xdp", ())


def test_compiler_error_is_shown(loader: str) -> None:
    """What the compiler says reaches the user."""
    defines = {"TB_PORT": 1, "TB_RESULT_ROWS": 64}
    with pytest.raises(CapabilityError, match="TB_WIDTH"):
        compiling.compile_program("worker.bpf.c", load.WORKER, defines, load.WORKER_MAP_NAMES, loader)


def test_verifier_error_is_shown(make, loader: str) -> None:
    """A map that is too small for the width is refused by the verifier, and its log is in the error."""
    world = make()
    defines = DEFINES | {"TB_WIDTH": 1408}
    with pytest.raises(CapabilityError, match="invalid access to map value"):
        load.load("worker.bpf.c", load.WORKER, defines, load.WORKER_MAP_NAMES, world.maps.fds, loader)


def test_broken_program_is_refused() -> None:
    with pytest.raises(syscalls.VerifierError) as caught:
        syscalls.prog_load(bytes.fromhex("9500000000000000"), name="nothing")
    assert "R0 !read_ok" in caught.value.log


def test_event_ring_goes_round(make) -> None:
    """Three times round the ring, every event once and in order; then overflow: hints are lost, nothing else."""
    world = make()

    def heard(op: int) -> None:
        world.store.control["released"][0] = op - 1  # the host keeps up
        world.run(world.frame_of(cases.ready(op=op)))

    opened: list[int] = []
    ops = [op_label(10 + i // 256, i % 256) for i in range(8192)]
    for i, op in enumerate(ops):
        heard(op)
        if i % 1000 == 999 or i == len(ops) - 1:
            events = world.ring.drain()
            assert {kind for kind, _, _ in events} == {Event.OPENED}
            assert [ns for _, _, ns in events] == sorted(ns for _, _, ns in events)
            opened += [op for _, op, _ in events]
    assert opened == ops
    later = [op_label(100 + i // 256, i % 256) for i in range(4096)]
    for op in later:
        heard(op)
    kept = [op for _, op, _ in world.ring.drain()]
    assert kept == later[: len(kept)]
    assert EVENT_RING_BYTES // 24 - 1 <= len(kept) < len(later)
    heard(op_label(200, 0))
    assert [op for _, op, _ in world.ring.drain()] == [op_label(200, 0)]


@pytest.mark.needs("bpf")
def test_maps_lie_on_the_node_asked_for() -> None:
    """Those of an interface on a machine with several nodes: there is always a first one."""
    for node, flag in ((0, syscalls.F_NUMA_NODE), (-1, 0)):
        held = maps.create(WORKER_MAPS, shapes(256, 64, 64), events=True, node=node)
        try:
            for map_ in WORKER_MAPS:
                assert syscalls.map_info(held.fds[map_.name]).flags & syscalls.F_NUMA_NODE == flag
        finally:
            held.close()


def test_the_loopback_device_has_no_node() -> None:
    assert net.numa_node("lo") == net.numa_node("nowhere0") == -1


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
