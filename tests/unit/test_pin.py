"""Pins: in which order they are made, and whose are left alone. The kernel's part is a folder of plain files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tailbound.errors import AttachError
from tailbound.kernel import net, pin

FOUND = pin.Settings(*("eth0", 7400, 1408, 64, 64), prog_id=12, vlan=0, signature="", tagged=False, ipv6=False, index=8)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of ``/run/tailbound``; this user may be anybody."""
    monkeypatch.setattr(pin, "ROOT", tmp_path / "tailbound")
    monkeypatch.setattr(pin.os, "chown", lambda *_: None)
    monkeypatch.setattr(pin.os, "chmod", lambda *_: None)
    pin.bpffs().mkdir(parents=True)
    return pin.ROOT


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the pins that are made."""
    made: list[str] = []
    monkeypatch.setattr(pin.syscalls, "obj_pin", lambda fd, path: made.append(Path(path).name))
    return made


def test_maps_are_never_there_without_the_link_that_makes_them_move(root: Path, pinned: list[str]) -> None:
    """Who finds all maps of a further program takes it for attached, and a crash may come after any pin."""
    pin.add("eth0", "tb_fanout", {"fanout": 3, "fanout_peers": 4}, 5, 0)
    assert pinned == ["tb_fanout_link", "fanout", "fanout_peers"]


def test_pins_of_a_device_that_has_another_name_now_are_no_leftovers(
    root: Path, pinned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter((7, 9, 0, 8))
    monkeypatch.setattr(net, "device_of", lambda name: net.Device(name, 0))
    monkeypatch.setattr(net, "index_of", lambda _: 8)
    monkeypatch.setattr(pin, "_index_of", lambda _: next(places))

    def name_of(index: int) -> str:
        if index != 7:
            raise OSError("no such device")
        return "lan0"

    monkeypatch.setattr(pin.socket, "if_indextoname", name_of)
    pin._pins("eth0").mkdir()
    with pytest.raises(AttachError, match="on lan0 now: run `tailbound detach eth0` once no job uses it"):
        pin._pin(FOUND, {"control": 3}, 4, 0)
    with pytest.raises(AttachError, match="on a device of another network namespace now"):
        pin._pin(FOUND, {"control": 3}, 4, 0)
    assert pin._pins("eth0").is_dir()
    assert pinned == []
    for _ in ("its device is gone", "it is on this one"):
        pinned.clear()
        pin._pin(FOUND, {"control": 3}, 4, 0)
        assert pinned == ["control", "link"]
        assert pin._settings_file("eth0").exists()


def test_two_first_attaches_mount_one_file_system(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One over the other would hide what is pinned in that."""
    mounted: list[str] = []

    class Libc:
        @staticmethod
        def mount(*_: object) -> int:
            threading.Event().wait(0.2)  # the other one has time to see that nothing is mounted yet
            mounted.append("bpf")
            return 0

    monkeypatch.setattr(pin, "_libc", Libc)
    monkeypatch.setattr(pin.os.path, "ismount", lambda _: bool(mounted))
    pin.bpffs().rmdir()
    root.rmdir()
    both = [threading.Thread(target=pin.mount) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
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
