"""How much of a frame each driver hands over in one piece, and what is said where that is nothing."""

from __future__ import annotations

import pytest

from tailbound.doctor.interfaces import NATIVE_DRIVERS
from tailbound.errors import AttachError
from tailbound.kernel import ethtool, linear, net
from tailbound.kernel.linear import linear_bytes, linear_of
from tailbound.transport.config import row_width


@pytest.mark.parametrize(
    ("driver", "mtu", "width"),
    [
        ("veth", 9000, 3392),
        ("mlx5_core", 3498, 3392),
        ("mlx5_core", 1500, 1408),
        ("ice", 9000, 2944),  # a frame of 3498 bytes would come in two pieces
        ("i40e", 3000, 2880),
        ("fsl_enetc", 1500, 1344),
        ("virtio_net", 9000, 3392),
        ("nobody_knows", 9000, 3392),
        (None, 9000, 3392),
    ],
)
def test_a_full_row_lies_in_one_piece(driver: str | None, mtu: int, width: int) -> None:
    found = linear_bytes(driver, mtu)
    assert row_width(0, mtu, linear=found) == width
    assert 14 + 20 + 8 + 64 + width <= found


def test_a_striding_queue_hands_over_nothing_at_large_mtus() -> None:
    assert linear_bytes("mlx5_core", 3499) == 0
    assert linear_bytes("mlx5_core", 9000, striding=False) == linear.PAGE


@pytest.mark.parametrize("flags", [{}, {"rx_striding_rq": True}])
def test_the_error_names_what_helps(flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "device_of", lambda name: net.Device("eno1", 5 if "." in name else 0))
    monkeypatch.setattr(net, "driver_of", lambda name: "mlx5_core")
    monkeypatch.setattr(net, "mtu_of", lambda name: 9000)
    monkeypatch.setattr(ethtool, "private_flags", lambda name: flags)
    with pytest.raises(AttachError, match=r"ip link set dev eno1 mtu 3498.*rx_striding_rq off.*udp"):
        linear_of("eno1")
    flags["rx_striding_rq"] = False
    assert linear_of("eno1") == linear.PAGE
    assert linear_of("eno1.5") == linear.PAGE - 4  # its tag


def test_an_interface_without_private_flags() -> None:
    assert ethtool.private_flags("lo") == {}
    assert linear_of("lo") == linear.PAGE


def test_drivers_of_the_table_have_native_xdp() -> None:
    later = {"idpf"}  # in Linux 6.18, which says so itself
    assert set(linear.DRIVERS) - later <= NATIVE_DRIVERS
