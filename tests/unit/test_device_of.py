"""What carries the frames of an interface: rtnetlink's answers, as the kernel gives them for VLANs."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from tailbound.errors import AttachError
from tailbound.kernel import net


def message(kind: str, *attributes: tuple[str, Any], **data: Any) -> Any:
    """The kernel's message about a link of ``kind``, packed and read again."""
    info: list[Any] = [("IFLA_INFO_KIND", kind)]
    if data:
        info.append(("IFLA_INFO_DATA", {"attrs": [(f"IFLA_VLAN_{name.upper()}", data[name]) for name in data]}))
    sent = ifinfmsg()
    sent["attrs"] = [*attributes, ("IFLA_LINKINFO", {"attrs": info})]
    sent.encode()
    found = ifinfmsg(sent.data)
    found.decode()
    return found


def vlan(number: int, *more: tuple[str, Any], below: int = 7, protocol: int = 0x8100) -> Any:
    """The message about an interface of VLAN ``number`` on the device with index ``below``."""
    return message("vlan", ("IFLA_LINK", below), *more, id=number, protocol=protocol)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What there is; eth0 has index 7, eth0.5 index 8."""
    found = {
        "eth0": ifinfmsg(),
        "eth0.5": vlan(5),
        "eth0.5.6": vlan(6, below=8),
        "service": vlan(9, protocol=0x88A8),
        "moved": vlan(5, ("IFLA_LINK_NETNSID", 0)),
        "veth1": message("veth", ("IFLA_LINK", 9)),
    }
    monkeypatch.setattr(net, "link_of", found.__getitem__)
    monkeypatch.setattr(socket, "if_indextoname", {7: "eth0", 8: "eth0.5"}.__getitem__)
    return found


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(("name", "device"), [("eth0", ("eth0", 0)), ("veth1", ("veth1", 0)), ("eth0.5", ("eth0", 5))])
def test_found(name: str, device: tuple[str, int]) -> None:
    assert net.device_of(name) == device


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(
    ("name", "says"),
    [("moved", "another network namespace"), ("service", "service tags"), ("eth0.5.6", "tags in tags")],
)
def test_refused(name: str, says: str) -> None:
    """It cannot have a program, and says that ``udp`` does."""
    with pytest.raises(AttachError, match=f"{says}.*udp datapath"):
        net.device_of(name)
    assert net.xdp_below(name) is None
