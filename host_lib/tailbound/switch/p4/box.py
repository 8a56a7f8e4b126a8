"""Opens a P4 switch over interfaces of this network namespace, as a ``switch.box.Box``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tailbound.errors import ConfigError
from tailbound.kernel import ethtool, net
from tailbound.switch.box import Box, Port, check_ports
from tailbound.switch.job import ip_text, mac_bytes
from tailbound.switch.p4.compile import Sizes
from tailbound.switch.p4.process import THRIFT_PORT
from tailbound.switch.p4.switch import P4Switch
from tailbound.switch.p4.tools import COMPILER, SWITCH, runtime_command, tool
from tailbound.wire.address import is_ipv6

__all__ = ["open_p4"]


def open_p4(
    ports: Sequence[str],
    address: str,
    *,
    mac: str | None = None,
    stations: Mapping[str, str] | None = None,
    sizes: Sizes | None = None,
    thrift_port: int = THRIFT_PORT,
    folder: Path | None = None,
) -> Box[P4Switch]:
    """Compiles the program and runs it over ``ports``; closing the box ends it.

    Offloads of the ports are turned off, as bmv2 needs (``kernel.ethtool.whole_frames``); those of whatever else hands
    it frames, the other end of a veth, are not its business.

    Args:
        address: IPv4 address of the switch; it answers ARP for it once there is a job.
        mac: its Ethernet address; None: that of the first port.
        stations: Ethernet address -> port's name; what is sent to others is flooded.
        sizes: what the program is compiled for.
        thrift_port: where bmv2 takes commands.
        folder: an empty one for bmv2's files; it then outlives this process (``process.Process``).

    Raises:
        ConfigError: an invalid port, address or size.
        CapabilityError: p4c or bmv2 is missing.
        AttachError: the switch does not start.
    """
    check_ports(ports)
    if is_ipv6(ip_text(address)):
        raise ConfigError(
            f"address {address}: the P4 switch sums packets of IPv4; give it an IPv4 address, or run an XDP switch, "
            "without --p4"
        )
    numbers = {name: number for number, name in enumerate(ports)}
    for name in ports:
        net.index_of(name)
    own = net.mac_of(ports[0]) if mac is None else mac_bytes(mac)
    static = {mac_bytes(text): _number(numbers, name) for text, name in (stations or {}).items()}
    for needed in (COMPILER, SWITCH):  # before anything is changed
        tool(needed)
    runtime_command()
    for name in ports:
        try:
            ethtool.whole_frames(name)
        except OSError as error:
            raise ConfigError(
                f"port {name}: {error.strerror}; name interfaces whose offloads can be turned off"
            ) from error
    switch = P4Switch.start({number: name for name, number in numbers.items()}, sizes, thrift_port, folder)
    try:
        switch.connect(static, list(numbers.values()))
    except BaseException:
        switch.end()
        raise
    return Box(switch, [Port(name, number) for name, number in numbers.items()], address, own)


def _number(numbers: Mapping[str, int], name: str) -> int:
    if name not in numbers:
        raise ConfigError(f"{name} is no port of this switch; choose one of: {', '.join(numbers)}")
    return numbers[name]
