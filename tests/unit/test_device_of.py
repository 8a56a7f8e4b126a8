"""What carries the frames of an interface: rtnetlink's answers, as the kernel gives them for VLANs."""

from __future__ import annotations

import socket
import struct

import pytest

from tailbound.errors import AttachError
from tailbound.kernel import interfaces
from tailbound.kernel.rtnetlink import attribute, attributes

LINK, LINKINFO, LINK_NETNSID, INFO_KIND, INFO_DATA, VLAN_ID, VLAN_PROTOCOL = 5, 18, 37, 1, 2, 1, 5


def vlan(number: int, below: int = 7, protocol: int = 0x8100, elsewhere: bool = False) -> dict[int, bytes]:
    """Attributes of an interface of VLAN ``number`` on the device with index ``below``."""
    data = attribute(VLAN_ID, struct.pack("=H", number)) + attribute(VLAN_PROTOCOL, struct.pack("!H", protocol))
    info = attribute(INFO_KIND, b"vlan\0") + attribute(INFO_DATA, data)
    other = attribute(LINK_NETNSID, struct.pack("=i", 0)) if elsewhere else b""
    return attributes(attribute(LINK, struct.pack("=I", below)) + attribute(LINKINFO, info) + other)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, bytes]]:
    """What there is; eth0 has index 7, eth0.5 index 8."""
    found: dict[str, dict[int, bytes]] = {
        "eth0": {},
        "eth0.5": vlan(5),
        "eth0.5.6": vlan(6, below=8),
        "service": vlan(9, protocol=0x88A8),
        "moved": vlan(5, elsewhere=True),
        "veth1": attributes(
            attribute(LINK, struct.pack("=I", 9)) + attribute(LINKINFO, attribute(INFO_KIND, b"veth\0"))
        ),
    }
    monkeypatch.setattr(interfaces, "_attributes_of", found.__getitem__)
    monkeypatch.setattr(socket, "if_indextoname", {7: "eth0", 8: "eth0.5"}.__getitem__)
    return found


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(("name", "device"), [("eth0", ("eth0", 0)), ("veth1", ("veth1", 0)), ("eth0.5", ("eth0", 5))])
def test_found(name: str, device: tuple[str, int]) -> None:
    assert interfaces.device_of(name) == device


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(
    ("name", "says"),
    [("moved", "another network namespace"), ("service", "service tags"), ("eth0.5.6", "tags in tags")],
)
def test_refused(name: str, says: str) -> None:
    """It cannot have a program, and says that ``udp`` does."""
    with pytest.raises(AttachError, match=f"{says}.*udp datapath"):
        interfaces.device_of(name)
    assert interfaces.xdp_below(name) is None
