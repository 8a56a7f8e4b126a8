"""Objects that are built ahead: one for all ports and sizes of rings, of these sources only, without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

import cases
from generate import objects
from kernel_world import KernelWorld
from switch_world import SwitchWorld
from tailbound.errors import CapabilityError
from tailbound.kernel import built, load
from tailbound.kernel import compile as compiling
from tailbound.wire.schema import Verdict

pytestmark = pytest.mark.needs("bpf", "clang", "libbpf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` puts into a wheel, for rows of the tables of cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(built, "WIDTHS", {cases.WIDTH: 0})
        patch.setattr(built, "WIDTHS_IPV6", {cases.WIDTH: 0})
        patch.setattr(built, "FANOUT_COPIES", (16,))
        out = tmp_path_factory.mktemp("objects")
        assert {path.name for path in objects.build(out)} == {
            f"worker-{cases.WIDTH}.bpf.o", f"tagged-{cases.WIDTH}.bpf.o", f"switch-{cases.WIDTH}.bpf.o",
            f"switch_out-{cases.WIDTH}.bpf.o",
            f"worker-ipv6-{cases.WIDTH}.bpf.o", f"tagged-ipv6-{cases.WIDTH}.bpf.o",
            f"switch-ipv6-{cases.WIDTH}.bpf.o", f"switch_out-ipv6-{cases.WIDTH}.bpf.o",
            "fanout-16.bpf.o", "fanout-ipv6-16.bpf.o", "faults.bpf.o",
        }  # fmt: skip
    return out


@pytest.fixture
def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with these objects and without any compiler."""
    monkeypatch.setattr(built, "FOLDER", folder)
    monkeypatch.setattr(built, "WIDTHS", {cases.WIDTH: 0})
    monkeypatch.setattr(built, "WIDTHS_IPV6", {cases.WIDTH: 0})
    monkeypatch.setattr(compiling, "bcc_path", lambda: None)
    monkeypatch.setattr(compiling, "clang_path", lambda: None)


@pytest.mark.parametrize("rows", [64, 256])
def test_one_object_for_every_ring(node: None, rows: int) -> None:
    """What a worker of this size takes and refuses is what a compiled one does: the ring's end is where it was told."""
    world = KernelWorld("auto", result_rows=rows)
    try:
        result = cases.result(seq=cases.RESULT_BASE + rows - 1)
        assert world.take(result)[0] == Verdict.RESULT_TAKEN
        assert world.take(cases.result(seq=cases.RESULT_BASE + rows))[0] == Verdict.FUTURE_RESULT
    finally:
        world.close()
    assert built.widths() == (cases.WIDTH,)


def test_an_object_is_for_one_family_and_takes_packets_of_its_port_alone(node: None) -> None:
    for ipv6 in (False, True):
        world = KernelWorld("object", ipv6=ipv6)
        try:
            world.run(world.frame_of(cases.contribution(), port=cases.PORT + 1))
            assert world.counted() == {}
            assert world.take(cases.contribution()) == (Verdict.STORED, 1)
        finally:
            world.close()
        assert built.widths(ipv6=ipv6) == (cases.WIDTH,)


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_switch(node: None, ipv6: bool) -> None:
    world = SwitchWorld("object", ipv6=ipv6)
    try:
        assert world.switch.program >= 0
        assert world.switch.out >= 0
    finally:
        world.close()


def test_other_widths_are_refused_by_name(node: None) -> None:
    with pytest.raises(CapabilityError, match=rf"rows of 1408 codes did not come .* for rows of {cases.WIDTH} codes"):
        load.load_worker({}, load.receiver_defines(1, 1408, 64), "object")
    with pytest.raises(CapabilityError, match="neither BCC nor clang"):
        load.load_worker({}, load.receiver_defines(1, 1408, 64))


def test_objects_of_other_sources_are_not_taken(node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "signature", lambda: "another")
    assert built.widths() == ()
    assert built.find("worker.bpf.c", "xdp", {"TB_WIDTH": cases.WIDTH}, load.WORKER_MAP_NAMES) is None


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
