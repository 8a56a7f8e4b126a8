"""Chooses and opens the datapath of a rank: ``xdp`` where it can be had, else ``udp``, and says why."""

from __future__ import annotations

import logging
import os

from tailbound.datapath.protocol import Datapath
from tailbound.datapath.sizes import ring_rows
from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.transport.config import Config, row_width
from tailbound.transport.interface import default_address, interface, mtu_of

log = logging.getLogger("tailbound")
NAMES = ("auto", "xdp", "udp")


def open_datapath(name: str, interface_name: str | None, config: Config) -> tuple[Datapath, tuple[str, int]]:
    """Opens a datapath.

    Returns:
        The datapath and the (IPv4 address, UDP port) at which peers reach it.

    Raises:
        ConfigError: a name or interface that is not there.
        CapabilityError, AttachError: ``xdp`` was asked for by name and cannot be had.
    """
    if name not in NAMES:
        raise ConfigError(f"datapath {name!r}: choose one of {', '.join(NAMES)}")
    if name == "xdp" and not interface_name:
        raise ConfigError("datapath 'xdp' needs an interface: pass interface= or set TAILBOUND_INTERFACE")
    if name != "udp" and interface_name:
        try:
            return _xdp(interface_name, config)
        except (CapabilityError, AttachError) as error:
            if name == "xdp":
                raise
            log.warning("rank %d: no xdp datapath on %s, using udp: %s", config.rank, interface_name, error)
    return _udp(interface_name, config)


def _xdp(name: str, config: Config) -> tuple[Datapath, tuple[str, int]]:
    from tailbound.datapath.xdp import XdpDatapath

    found = interface(name)
    width = row_width(config.width, found.mtu, xdp=True)
    if XdpDatapath.is_attached(name):
        path = XdpDatapath.open(name)
    else:
        sum_rows, result_rows = ring_rows(config.ring_mib, width, config.ranks)
        path = XdpDatapath.attach(name, config.port, width, sum_rows, result_rows)
    return path, (found.address, path.endpoint[1])


def _udp(name: str | None, config: Config) -> tuple[Datapath, tuple[str, int]]:
    from tailbound.datapath.udp import UdpDatapath

    if name:
        found = interface(name)
        address, width = found.address, row_width(config.width, found.mtu)
    else:
        address = default_address()
        width = row_width(config.width, mtu_of(address))
    sum_rows, result_rows = ring_rows(config.ring_mib, width, config.ranks)
    # several ranks on a host share its address: each takes a port of its own, which the greeting tells the others
    port = config.port + int(os.environ.get("LOCAL_RANK", "0")) if config.port else 0
    port = 0 if address.startswith("127.") else port
    if port > 65535:
        raise ConfigError(f"port {config.port} and this local rank make {port}: choose a smaller TAILBOUND_PORT")
    path = UdpDatapath(address, port, None, width, sum_rows, result_rows)
    return path, path.endpoint
