"""How much of a frame a driver hands to an XDP program in one piece, the linear part: only there can it be summed.

Larger frames come in pieces, and the program drops those of ours as NOT_LINEAR. No interface of the kernel tells the
length of the linear part, so this is what the drivers' sources say (pages of 4 KiB); of these only veth has been tried.
A driver that takes no program at such an MTU says so when the program is attached.
"""

from __future__ import annotations

from tailbound.errors import AttachError
from tailbound.kernel import ethtool, net

#: What a page holds beside the kernel's headroom (256 bytes) and its ``skb_shared_info`` (320): veth, and what is taken
#: for granted of drivers that are not named here.
PAGE = 4096 - 256 - 320
#: Bytes of a frame, Ethernet header included, where a driver's buffers are not such a page.
DRIVERS = {
    "fsl_enetc": 2048 - 256 - 320,  # half pages
    "fsl_enetc_vf": 2048 - 256 - 320,
    "i40e": 3072,
    "ice": 3072,
    "idpf": 3072,  # up to 3456, as the MTU needs
    "igb": 3072,
    "igc": 3072,
    "ixgbe": 3072,
    "ixgbevf": 3072,
    "virtio_net": PAGE - 12,  # its own header is in front
}
#: MTU of mlx5 up to which frames of a striding queue are linear; above it the linear part is empty.
_MLX5_MTU = PAGE - 22
#: Of a VLAN.
_TAG_BYTES = 4
#: Private flag of mlx5.
STRIDING = "rx_striding_rq"


def linear_bytes(driver: str | None, mtu: int, *, striding: bool = True) -> int:
    """Bytes of a frame, Ethernet header included, that ``driver`` hands over in one piece at an MTU; 0: none.

    Args:
        driver: its name; None or one that is not known: a page.
        striding: for mlx5, whether its private flag ``rx_striding_rq`` is on.
    """
    if driver == "mlx5_core" and striding and mtu > _MLX5_MTU:
        return 0
    return DRIVERS.get(driver or "", PAGE)


def linear_of(interface: str) -> int:
    """``linear_bytes`` of an interface as it is now, less the tag of its VLAN if it has one.

    Raises:
        ConfigError: no such interface.
        AttachError: the driver hands over nothing in one piece, and the message says what changes that; or its device
            cannot have a program.
    """
    device, vlan = net.device_of(interface)
    driver, mtu = net.driver_of(device), net.mtu_of(device)
    striding = driver == "mlx5_core" and ethtool.private_flags(device).get(STRIDING, True)
    found = linear_bytes(driver, mtu, striding=striding)
    if not found:
        raise AttachError(remedy(device, mtu))
    return found - (_TAG_BYTES if vlan else 0)


def remedy(interface: str, mtu: int) -> str:
    """What to do where mlx5 hands over frames without a linear part."""
    return (
        f"mlx5_core of {interface} hands over frames without a linear part at MTU {mtu}, and no row could be summed: "
        f"`ip link set dev {interface} mtu {_MLX5_MTU}` on all ranks, or `ethtool --set-priv-flags {interface} "
        f"{STRIDING} off`, or use the udp datapath"
    )
