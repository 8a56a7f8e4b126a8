"""Objects and what carries them: maps, verifier and its budget, order of writes, and objects that are built ahead."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cases
from generate import objects as wheel
from kernel_world import DEFINES, KernelWorld
from loaders import both_loaders
from switch_world import SwitchWorld
from tailbound.datapath.xdp import shapes
from tailbound.errors import CapabilityError
from tailbound.kernel import built, load, maps, syscalls
from tailbound.kernel import compile as compiling
from tailbound.kernel.compile import compile_program
from tailbound.transport.config import WIDTH_MOST
from tailbound.wire.schema import EVENT_RING_BYTES, WORKER_MAPS, Event, Verdict, op_label


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


def test_event_ring_goes_round(make) -> None:
    """Three times round the ring, every event once and in order; then overflow: hints are lost, nothing else."""
    world = make()

    def opened(step: int, count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Events of so many ops from a step on, as they should be and as they are."""
        ops = [op_label(step + i // 256, i % 256) for i in range(count)]
        for op in ops:
            world.control(released=op - 1)  # the host keeps up
            world.run(world.frame_of(cases.ready(op=op)))
        events = world.events()
        assert [ns for _, _, ns in events] == sorted(ns for _, _, ns in events)
        return [(Event.OPENED, op) for op in ops], [(kind, op) for kind, op, _ in events]

    for lap in range(8):
        wanted, found = opened(10 + 4 * lap, 1024)
        assert found == wanted
    wanted, kept = opened(100, 4096)
    assert kept == wanted[: len(kept)]
    assert EVENT_RING_BYTES // 24 - 1 <= len(kept) < len(wanted)
    wanted, found = opened(200, 1)
    assert found == wanted


@pytest.mark.needs("bpf")
def test_maps_lie_on_the_node_asked_for() -> None:
    """Those of an interface on a machine with several nodes: there is always a first one."""
    for node, flag in ((0, syscalls.F_NUMA_NODE), (-1, 0)):
        with contextlib.closing(maps.create(WORKER_MAPS, shapes(256, 64, 64), events=True, node=node)) as held:
            for map_ in WORKER_MAPS:
                assert syscalls.map_info(held.fds[map_.name]).flags & syscalls.F_NUMA_NODE == flag


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


# -- what the verifier looks at, of a million: kernels differ, and so do compilers -------------------------------------


#: Of a million. Linux 6.1 looked at 1.35 times as many as 6.18 does (docs/xdp.md).
MOST = 300_000
#: The same for a program that few jobs need, with a key or on a VLAN: two forms of each frame, or a tag's hash.
MOST_OF_FEW = 450_000
#: Rows of a switch lie in a page.
WIDTH_OF_PAGE = 3392


thorough = pytest.mark.thorough


@both_loaders
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"width": 1408}, MOST),
        ({"width": WIDTH_MOST}, MOST),
        ({"width": 1408, "vlan": 5}, MOST_OF_FEW),
        ({"width": WIDTH_MOST, "vlan": 5}, MOST_OF_FEW),
        pytest.param({"width": 1344, "ipv6": True}, MOST_OF_FEW, marks=thorough),
        pytest.param({"width": 8832, "ipv6": True}, MOST_OF_FEW, marks=thorough),
    ],
    ids=str,
)
def test_worker(make, options: dict[str, Any], most: int) -> None:
    assert 0 < syscalls.prog_info(make(**options).program).verified_insns <= most


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


# -- words that are read without a lock are published in order: only arm64 would show it otherwise ---------------------


_CALL, _EXIT, _LOAD_64, _ATOMIC_64, _EXCHANGE = 0x85, 0x95, 0x18, 0xDB, 0xE1
_LOCK, _UNLOCK = 93, 94
_AND_NUMBER, _ADD_REGISTER, _LOAD_WORD, _MOVE = 0x57, 0x0F, 0x79, 0xBF
_JUMP, _JUMP_32, _ALWAYS = 5, 6, 0x05


def instructions(loader: str) -> list[tuple[int, int, int, int]]:
    """(opcode, registers, offset, immediate) of the instructions_of's instructions."""
    code = compile_program("worker.bpf.c", load.WORKER, DEFINES, load.WORKER_MAP_NAMES, loader, "xdp")
    return list(struct.iter_unpack("=BBhi", code))


def instructions_of(loader: str) -> list[tuple[int, int, int]]:
    """The same without registers."""
    return [(op, off, imm) for op, _, off, imm in instructions(loader)]


def walk(code: list[tuple[int, int, int]]) -> dict[int, set[bool]]:
    """Exchanges, and whether a lock was held there: on every path from the beginning."""
    found: dict[int, set[bool]] = {}
    seen: set[tuple[int, bool]] = set()
    todo = [(0, False)]
    while todo:
        at, held = todo.pop()
        if (at, held) in seen:
            continue
        seen.add((at, held))
        op, _, imm = code[at]
        assert op != _EXIT or not held
        if op == _ATOMIC_64 and imm == _EXCHANGE:
            found.setdefault(at, set()).add(held)
        if op == _CALL and imm in (_LOCK, _UNLOCK):
            assert held == (imm == _UNLOCK)
            held = imm == _LOCK
        todo += [(to, held) for to in following(code, at)]
    return found


@both_loaders
def test_published_under_a_lock(loader: str) -> None:
    """Tags of op records (opened in two places) and presence of results; the latter under the row's lock.

    Rules: kernel-17, kernel-20.
    """
    found = walk(instructions_of(loader))
    assert len(found) >= 3
    assert all(held == {True} for held in found.values())


def following(code: list[tuple[int, int, int]], at: int) -> Iterator[int]:
    """Where it may go on after ``at``."""
    op, off, _ = code[at]
    if op == _EXIT:
        return
    if op & 7 in (_JUMP, _JUMP_32) and op != _CALL:
        yield at + 1 + off
        if op == _ALWAYS:
            return
    yield at + (2 if op == _LOAD_64 else 1)


@both_loaders
def test_records_are_read_by_their_tag(loader: str) -> None:
    """Where a record's tag is read without its lock, a zero that depends on it is part of the record's address.

    So no processor reads the rest of the record before the tag. No compiler makes a zero in this way by itself. Packets
    with news and those that come too late look at a record: two places.
    """
    code, found = instructions(loader), 0
    for at, (op, registers, _, number) in enumerate(code):
        if op != _AND_NUMBER or number:
            continue
        zero = registers & 15
        source = code[at - 1][1] >> 4 if code[at - 1][0] == _MOVE and code[at - 1][1] & 15 == zero else zero
        made = next(i for i in reversed(code[:at]) if i[1] & 15 == source and i[0] in (_LOAD_WORD, _MOVE))
        added = any(i[0] == _ADD_REGISTER and i[1] >> 4 == zero for i in code[at + 1 : at + 4])
        found += made[0] == _LOAD_WORD and made[2] == 0 and added  # the first word of the record
    assert found >= 2


# -- objects that are built ahead: one for all ports and sizes of rings, of these sources only -------------------------


built_ahead = pytest.mark.needs("bpf", "clang", "libbpf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` puts into a wheel, for rows of the tables of cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(built, "WIDTHS", {cases.WIDTH: 0})
        patch.setattr(built, "WIDTHS_IPV6", {cases.WIDTH: 0})
        out = tmp_path_factory.mktemp("objects")
        programs = ("worker", "tagged", "switch", "switch_out")
        names = {f"{name}{family}-{cases.WIDTH}.bpf.o" for name in programs for family in ("", "-ipv6")}
        names |= {"fanout.bpf.o", "fanout-ipv6.bpf.o", "faults.bpf.o"}
        assert {path.name for path in wheel.build(out)} == names
    return out


@pytest.fixture
def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with these objects and without any compiler."""
    monkeypatch.setattr(built, "FOLDER", folder)
    monkeypatch.setattr(built, "WIDTHS", {cases.WIDTH: 0})
    monkeypatch.setattr(built, "WIDTHS_IPV6", {cases.WIDTH: 0})
    monkeypatch.setattr(compiling, "bcc_path", lambda: None)
    monkeypatch.setattr(compiling, "clang_path", lambda: None)


@built_ahead
@pytest.mark.parametrize(("by", "rows", "ipv6"), [("auto", 64, False), ("object", 256, False), ("object", 64, True)])
def test_one_object_for_every_port_and_ring(node: None, by: str, rows: int, ipv6: bool) -> None:
    """A worker takes and refuses what a compiled one does: by its port, and up to the end of its ring."""
    end = cases.RESULT_BASE + rows
    with contextlib.closing(KernelWorld(by, result_rows=rows, ipv6=ipv6)) as world:
        world.run(world.frame_of(cases.contribution(), port=cases.PORT + 1))
        assert world.counted() == {}
        verdicts = [world.take(cases.result(seq=seq))[0] for seq in (end - 1, end)]
        assert verdicts == [Verdict.RESULT_TAKEN, Verdict.FUTURE_RESULT]
    with contextlib.closing(SwitchWorld("object", ipv6=ipv6)) as switch:
        assert min(switch.switch.program, switch.switch.out) >= 0
    assert built.widths(ipv6=ipv6) == (cases.WIDTH,)


@built_ahead
def test_other_widths_are_refused_by_name(node: None) -> None:
    with pytest.raises(CapabilityError, match=rf"rows of 1408 codes did not come .* for rows of {cases.WIDTH} codes"):
        load.load_worker({}, load.receiver_defines(1, 1408, 64), "object")
    with pytest.raises(CapabilityError, match="neither BCC nor clang"):
        load.load_worker({}, load.receiver_defines(1, 1408, 64))


@built_ahead
def test_objects_of_other_sources_are_not_taken(node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "signature", lambda: "another")
    assert built.widths() == ()
    assert built.find("worker.bpf.c", "xdp", {"TB_WIDTH": cases.WIDTH}, load.WORKER_MAP_NAMES) is None


@built_ahead
def test_torn_objects_are_not_taken(node: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, an object is left alone, or its instructions are whole."""
    name, defines = f"worker-{cases.WIDTH}.bpf.o", {"TB_WIDTH": cases.WIDTH}
    data = (folder / name).read_bytes()
    whole = built.find("worker.bpf.c", "xdp", defines, load.WORKER_MAP_NAMES)
    assert whole is not None
    monkeypatch.setattr(built, "FOLDER", tmp_path)
    for length in (*range(0, 128, 7), *range(128, len(data), 997), len(data) - 1):
        (tmp_path / name).write_bytes(data[:length])
        assert built.find("worker.bpf.c", "xdp", defines, load.WORKER_MAP_NAMES) in (None, whole)
