"""What ``tailbound.kernel`` finds and refuses: the C library, the clock, an interface's device; events and packets."""

from __future__ import annotations

import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel import built, cache, core, net
from tailbound.kernel.compile import clang_path
from tailbound.kernel.events import Source
from tailbound.wire.address import words_of
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import HEADER_BYTES


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation without a library, and an empty cache."""
    monkeypatch.setattr(built, "FOLDER", tmp_path / "objects")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("cc", ["gcc", pytest.param(clang_path() or "", marks=pytest.mark.needs("clang"))])
def test_sources_compile_without_a_warning(cc: str, tmp_path: Path) -> None:
    command = core.command(cc, tmp_path / "core.so", core.folders(), ["-Werror"])
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_is_named_with_its_words(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = nothing_kept / "cc"
    bad.write_text("#!/bin/sh\necho no such header >&2\nexit 3\n")
    bad.chmod(0o755)
    monkeypatch.setattr(core, "compiler", lambda: str(bad))
    with pytest.raises(CapabilityError, match=r"failed with 3(?s:.*)no such header"):
        core.find()


def test_a_full_disk_is_named_with_its_place(nothing_kept: Path) -> None:
    nothing_kept.joinpath("big.part").symlink_to("/dev/full")
    with pytest.raises(CapabilityError, match=r"big.bpf cannot be written .*No space left.*XDG_CACHE_HOME"):
        cache.get("big", lambda: b"1")


def test_a_wheel_has_it_and_only_of_these_sources(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built once as `make wheel` does, it needs no compiler; beside other sources it is not taken."""
    folder = nothing_kept / "objects"
    folder.mkdir()
    (folder / core.name()).write_bytes(core.compiled())
    monkeypatch.setattr(core, "compiler", lambda: None)
    path = core.find()
    assert path.parent == folder
    assert core.origin() == str(path)
    assert core.load(path).fast.tb_fence
    monkeypatch.setattr(core, "signature", lambda: "of other sources")
    assert core.origin() is None
    with pytest.raises(CapabilityError, match=r"no C compiler.*apt-get install gcc libc6-dev"):
        core.find()


def message(kind: str, *attributes: tuple[str, Any], **vlan: int) -> Any:
    """The kernel's message about a link of ``kind``, packed and read again."""
    data = [(f"IFLA_VLAN_{name.upper()}", value) for name, value in vlan.items()]
    info = [("IFLA_INFO_KIND", kind), *([("IFLA_INFO_DATA", {"attrs": data})] if data else [])]
    sent = ifinfmsg()
    sent["attrs"] = [*attributes, ("IFLA_LINKINFO", {"attrs": info})]
    sent.encode()
    found = ifinfmsg(sent.data)
    found.decode()
    return found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("eth0", ("eth0", 0)), ("veth1", ("veth1", 0)), ("eth0.5", ("eth0", 5)),
        ("moved", "another network namespace"), ("service", "service tags"), ("eth0.5.6", "tags in tags"),
    ],
)  # fmt: skip
def test_what_carries_the_frames_of_an_interface(
    monkeypatch: pytest.MonkeyPatch, name: str, found: tuple[str, int] | str
) -> None:
    """Its device and VLAN. One that cannot have a program says that ``udp`` does; eth0 has index 7, eth0.5 index 8."""
    links = {
        "eth0": ifinfmsg(),
        "eth0.5": message("vlan", ("IFLA_LINK", 7), id=5, protocol=0x8100),
        "eth0.5.6": message("vlan", ("IFLA_LINK", 8), id=6, protocol=0x8100),
        "service": message("vlan", ("IFLA_LINK", 7), id=9, protocol=0x88A8),
        "moved": message("vlan", ("IFLA_LINK", 7), ("IFLA_LINK_NETNSID", 0), id=5, protocol=0x8100),
        "veth1": message("veth", ("IFLA_LINK", 9)),
    }
    monkeypatch.setattr(net, "link_of", links.__getitem__)
    monkeypatch.setattr(socket, "if_indextoname", {7: "eth0", 8: "eth0.5"}.__getitem__)
    if isinstance(found, tuple):
        assert net.device_of(name) == found
        return
    with pytest.raises(AttachError, match=f"{found}.*udp datapath"):
        net.device_of(name)
    assert net.xdp_below(name) is None


def test_the_ring_is_read_up_to_what_is_being_written() -> None:
    """A record that was given up is none; one that wraps lies there twice. The position follows."""
    size, record = 96, struct.Struct("=IIIIQ")  # length, page, and tb_event: kind, op, ns
    data, positions = np.zeros(2 * size, np.uint8), np.zeros(2, np.uint64)
    at = positions.ctypes.data
    ring = Source(0, at, at + 8, data.ctypes.data, 63)
    assert ring.take() == []
    busy, discarded = 1 << 31, 1 << 30
    lengths = (16, 16 | discarded, 16 | busy)
    data[: 3 * 24] = bytearray(b"".join(record.pack(length, 0, 1, op, 9) for op, length in enumerate(lengths, 5)))
    positions[1] = 72
    assert (ring.take(), int(positions[0])) == ([(1, 5, 9)], 48)
    data[48:72] = bytearray(record.pack(16, 0, 4, 7, 8))
    assert (ring.take(), ring.take(), int(positions[0])) == ([(4, 7, 8)], [], 72)


def test_a_flood_of_control_packets_is_taken_in_helpings() -> None:
    """So that it leaves room for ops."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    with sockets[0] as taker, sockets[1] as sender:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        taker.bind(("127.0.0.1", 0))
        taker.setblocking(False)
        peers = np.zeros(2, DTYPES["tb_peer"])
        peers["address"] = words_of("127.0.0.1").address
        source = Source(socket=taker.fileno(), peers=peers.ctypes.data)
        sent = [bytes(HEADER_BYTES) + number.to_bytes(4, "big") for number in range(400)]
        for data in sent:
            sender.sendto(data, taker.getsockname())
        helpings = [source.words(128) for _ in range(3)]
        assert helpings == [sent[:256], sent[256:], []]
        peers["address"] = words_of("127.0.0.2").address  # of somebody else, which a helping counts as well
        for data in sent:
            sender.sendto(data, taker.getsockname())
        assert (source.words(128), source.strange, len(taker.recv(100))) == ([], 256, HEADER_BYTES + 4)
