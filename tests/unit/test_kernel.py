"""What ``tailbound.kernel`` finds and refuses: the C library, the clock, an interface's device; events and packets."""

from __future__ import annotations

import mmap
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from tailbound.datapath.xdp import XdpDatapath
from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel import built, cache, core, events, net
from tailbound.kernel.compile import clang_path
from tailbound.kernel.events import _HEAD, _RECORD, EventRing
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


RECORD = 8 + _RECORD.size


def test_heads_and_records_are_no_older_than_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 0 from before it moved would put the consumer out of step for good. One that is being written waits."""
    made = EventRing.__new__(EventRing)
    made._their = bytearray(mmap.PAGESIZE * 3)
    made._mask = mmap.PAGESIZE - 1
    made._consumed, made._produced = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    shown: list[bytes] = []  # by each barrier

    def acquire() -> None:
        data = shown.pop(0)
        made._their[mmap.PAGESIZE : mmap.PAGESIZE + len(data)] = data

    monkeypatch.setattr(events, "_acquire", acquire)
    assert made.drain() == []
    heads = b"".join(_HEAD.pack(_RECORD.size | busy) + bytes(4 + _RECORD.size) for busy in (0, 0, 1 << 31))
    whole = b"".join(_HEAD.pack(_RECORD.size) + bytes(4) + _RECORD.pack(1, op, 9) for op in (5, 6))
    shown += [heads, whole]
    made._produced[0] = 3 * RECORD
    assert made.drain() == [(1, 5, 9), (1, 6, 9)]
    assert made._consumed[0] == 2 * RECORD
    assert not shown


def test_a_flood_of_control_packets_is_taken_in_helpings() -> None:
    """So that it leaves room for ops."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    with sockets[0] as taker, sockets[1] as sender:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        taker.bind(("127.0.0.1", 0))
        taker.setblocking(False)
        peers = np.zeros(2, DTYPES["tb_peer"])
        peers["address"] = words_of("127.0.0.1").address
        path = SimpleNamespace(socket=taker, store=SimpleNamespace(width=64, peers=peers), _strangers=0)
        sent = [bytes(HEADER_BYTES) + number.to_bytes(4, "big") for number in range(400)]
        for data in sent:
            sender.sendto(data, taker.getsockname())
        helpings = [XdpDatapath.control_packets(path) for _ in range(3)]
        assert [len(helping) for helping in helpings] == [256, 144, 0]
        assert [data for helping in helpings for data in helping] == sent
        peers["address"] = words_of("127.0.0.2").address  # of somebody else, which a helping counts as well
        for data in sent:
            sender.sendto(data, taker.getsockname())
        assert XdpDatapath.control_packets(path) == []
        assert len(taker.recv(100)) == HEADER_BYTES + 4
