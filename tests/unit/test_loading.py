"""How a program comes to an interface: who compiles it, what a driver hands over in one piece, and its pins."""

from __future__ import annotations

import contextlib
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.kernel import compile as compiling
from tailbound.kernel import ethtool, linear, load, net, pin, syscalls
from tailbound.kernel.linear import linear_bytes, linear_of
from tailbound.transport.config import row_width


def test_signals_during_verification_are_no_refusal_unless_they_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """bpf(2), whose verifier a signal interrupts so often, then a descriptor."""
    interrupted = OSError(errno.EAGAIN, "interrupted")
    monkeypatch.setattr(syscalls, "_bpf", Mock(side_effect=[*[interrupted] * 9, (77, b"")]))
    assert syscalls.prog_load(bytes(16), name="x") == 77
    monkeypatch.setattr(syscalls, "_bpf", Mock(side_effect=interrupted))
    monkeypatch.setattr(syscalls, "_PATIENCE_S", 0.0)
    with pytest.raises(syscalls.VerifierError) as caught:
        syscalls.prog_load(bytes(16), name="x")
    assert caught.value.errno == errno.EAGAIN


@pytest.mark.parametrize(
    ("bcc", "headers", "clang", "libbpf", "found"),
    [
        (True, True, True, True, ["bcc", "clang"]),
        (True, False, True, True, ["clang"]),  # BCC without headers does not stand in front of a clang that works
        (False, False, True, True, ["clang"]),
        (True, False, True, False, "headers"),
        (False, True, True, False, "libbpf-dev"),
        (False, False, False, False, "neither"),
    ],
)
def test_candidates(
    bcc: bool, headers: bool, clang: bool, libbpf: bool, found: list[str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr(compiling, "bcc_path", lambda: Path("/bcc") if bcc else None)
    monkeypatch.setattr(compiling.headers, "running", lambda: None)
    monkeypatch.setattr(compiling.headers, "installed", lambda: Path("/headers") if headers else None)
    monkeypatch.setattr(compiling, "clang_path", lambda: "/clang" if clang else None)
    monkeypatch.setattr(compiling, "LIBBPF", Path("/" if libbpf else "/nowhere"))
    if isinstance(found, list):
        assert compiling.candidates() == found
        return
    with pytest.raises(CapabilityError, match=found):
        compiling.candidates()


@pytest.mark.parametrize(
    ("ways", "refused", "tried"),
    [
        (["bcc", "clang"], CapabilityError("bcc failed with 1\nand so on"), ["bcc", "clang"]),
        (["object", "clang"], CapabilityError("the kernel refused it"), ["object", "clang"]),
        (["object"], None, ["object"]),
        (["bcc", "clang"], load._Powerless("no"), ["bcc"]),
    ],
    ids=[
        "a compiler that fails is followed by the other", "an object comes first, and is followed by who is there",
        "an object needs no compiler", "no compiler makes up for missing privileges",
    ],
)  # fmt: skip
def test_what_a_program_comes_from(
    ways: list[str], refused: Exception | None, tried: list[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """``refused``: what becomes of the first of ``ways``."""
    found: list[str] = []

    def candidates() -> list[str]:
        if ways == ["object"]:
            raise CapabilityError("neither BCC nor clang")
        return ways[ways[0] == "object" :]

    def into_kernel(code: bytes, *_: Any) -> int:
        found.append(code.decode())
        if refused is not None and len(found) == 1:
            raise refused
        return 5

    monkeypatch.setattr(load.built, "find", lambda *_: b"object" if "object" in ways else None)
    monkeypatch.setattr(load, "candidates", candidates)
    monkeypatch.setattr(load, "compile_program", lambda *arguments: arguments[4].encode())
    monkeypatch.setattr(load.objects, "link", lambda code, *_: code)
    monkeypatch.setattr(load, "_into_kernel", into_kernel)
    with pytest.raises(load._Powerless) if len(tried) < len(ways) else contextlib.nullcontext():
        assert load.load("worker.bpf.c", load.WORKER, {}, (), {}, "auto") == 5
    assert found == tried
    said = f"by {ways[0]} cannot be had, trying clang: {str(refused).splitlines()[0]}\n"
    assert (said in caplog.text) == (len(tried) > 1)


def test_a_node_with_neither_is_told_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load.built, "FOLDER", tmp_path)
    with pytest.raises(CapabilityError, match="did not come with this installation as an object: install a wheel"):
        load.load("worker.bpf.c", load.WORKER, {"TB_WIDTH": 1408}, (), {}, "object")
    with pytest.raises(ConfigError, match="choose auto, object, bcc or clang"):
        load.load("worker.bpf.c", load.WORKER, {"TB_WIDTH": 1408}, (), {}, "gcc")


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"clang": 14}, "clang"),
        ({"clang": 14, "clang-16": 16, "clang-19": 19}, "clang-19"),
        ({"clang": 22, "clang-15": 15}, "clang-15"),  # one that is tried, before a newer one
        ({"clang": 13, "clang-13": 13}, None),  # the verifier refuses what it makes
        ({}, None),
    ],
)
def test_which_clang(there: dict[str, int], chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(compiling, "_major", there.__getitem__)
    assert compiling.clang_path.__wrapped__() == chosen


@pytest.mark.parametrize(
    ("driver", "mtu", "width"),
    [
        ("veth", 9000, 3392),
        ("mlx5_core", 1500, 1408),
        ("ice", 9000, 2944),  # a frame of 3498 bytes would come in two pieces
        ("i40e", 3000, 2880),
        ("fsl_enetc", 1500, 1344),
        (None, 9000, 3392),
    ],
)
def test_a_full_row_lies_in_one_piece(driver: str | None, mtu: int, width: int) -> None:
    found = linear_bytes(driver, mtu)
    assert row_width(0, mtu, linear=found) == width
    assert 14 + 20 + 8 + 64 + width <= found


@pytest.mark.parametrize("flags", [{}, {"rx_striding_rq": True}])
def test_a_striding_queue_hands_over_nothing_at_large_mtus_and_the_error_names_what_helps(
    flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert linear_of("lo") == linear.PAGE  # it has no such flags
    assert (linear_bytes("mlx5_core", 3498), linear_bytes("mlx5_core", 3499)) == (3520, 0)
    monkeypatch.setattr(net, "device_of", lambda name: net.Device("eno1", 5 if "." in name else 0))
    monkeypatch.setattr(net, "driver_of", lambda name: "mlx5_core")
    monkeypatch.setattr(net, "mtu_of", lambda name: 9000)
    monkeypatch.setattr(ethtool, "private_flags", lambda name: flags)
    with pytest.raises(AttachError, match=r"ip link set dev eno1 mtu 3498.*rx_striding_rq off.*udp"):
        linear_of("eno1")
    flags["rx_striding_rq"] = False
    assert linear_of("eno1") == linear.PAGE
    assert linear_of("eno1.5") == linear.PAGE - 4  # its tag


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of ``/run/tailbound``; this user may be anybody."""
    monkeypatch.setattr(pin, "ROOT", tmp_path / "tailbound")
    monkeypatch.setattr(pin.os, "chown", lambda *_: None)
    monkeypatch.setattr(pin.os, "chmod", lambda *_: None)
    pin.bpffs().mkdir(parents=True)
    return pin.ROOT


def test_maps_are_never_there_without_the_link_that_makes_them_move(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds all maps of a further program takes it for attached, and a crash may come after any pin."""
    pinned: list[str] = []
    monkeypatch.setattr(pin.syscalls, "obj_pin", lambda fd, path: pinned.append(Path(path).name))
    pin.add("eth0", "tb_fanout", {"fanout": 3, "fanout_peers": 4}, 5, 0)
    assert pinned == ["tb_fanout_link", "fanout", "fanout_peers"]


def test_two_first_attaches_mount_one_file_system(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One over the other would hide what is pinned in that."""
    mounted: list[str] = []

    def mount(*_: object) -> int:
        threading.Event().wait(0.2)  # the other one has time to see that nothing is mounted yet
        mounted.append("bpf")
        return 0

    monkeypatch.setattr(pin, "_libc", SimpleNamespace(mount=mount))
    monkeypatch.setattr(pin.os.path, "ismount", lambda _: bool(mounted))
    pin.bpffs().rmdir()
    root.rmdir()
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(pin.mount) for _ in range(2)]:
            done.result()
    assert mounted == ["bpf"]
    assert pin.bpffs().is_dir()


def test_a_sweep_leaves_what_it_cannot_see(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another mount namespace may have a file system of pins of its own; settings lie where all see them."""
    monkeypatch.setattr(pin.os.path, "ismount", lambda _: True)
    monkeypatch.setattr(pin, "_index_of", lambda link: 0 if link.parent == pin._pins("gone") else 7)
    for name in ("lives", "gone", "begun"):  # the last by an attach that broke off
        pin._pins(name).mkdir()
    for name in ("lives", "gone", "elsewhere"):
        pin._settings_file(name).write_text("{}")
    pin._begun(pin._settings_file("begun")).write_text("{}")
    (root / "begun-1.new").write_text("{}")  # of another network namespace
    assert pin.sweep() == sorted(pin._pins(name).name for name in ("begun", "gone"))
    left = {file.name for file in root.iterdir()} - {"bpf", "lock"}
    assert left == {pin._settings_file("lives").name, pin._settings_file("elsewhere").name, "begun-1.new"}
    assert [folder.name for folder in pin.bpffs().iterdir()] == [pin._pins("lives").name]
    assert pin.sweep() == []
