"""Chooses and opens the datapath of a rank: ``xdp`` where it can be had, else ``udp``, and says why."""

from __future__ import annotations

import contextlib
import logging
import os

from tailbound.datapath.protocol import Datapath, ring_rows
from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.kernel import pin
from tailbound.kernel.linear import linear_of
from tailbound.kernel.net import Interface, interface, interface_towards
from tailbound.transport.config import DEFAULT_PORT, PORTS, Config, row_width
from tailbound.wire.address import family_name, ip_bytes, is_ipv6, is_loopback

log = logging.getLogger("tailbound")
NAMES = ("auto", "xdp", "udp")


def open_datapath(name: str, interface_name: str | None, config: Config, towards: str = "", only: int = 0) -> Datapath:
    """Opens a datapath of the switch's family, if there is one; peers reach it at its ``endpoint``.

    Args:
        name: ``auto``: ``xdp`` on an interface that is named, or that ``tailbound attach`` has been run for; where it
            cannot be had on the former, ``udp``, with a warning. Ranks that share a host and name none take ``udp``.
            ``xdp``, ``udp``: that one.
        interface_name: the interface; None: the one that leads to the other ranks.
        config: port, width and rings.
        towards: name or address of a host that the others are reached like; empty: ``MASTER_ADDR``.
        only: the one UDP port that will do, since the others know it; 0: see ``config.port``.

    Raises:
        ConfigError: a name or interface that is not there, or no port that is free.
        CapabilityError, AttachError: ``xdp`` was asked for by name and cannot be had, or Tailbound's program is on the
            interface and this rank may not use it.
    """
    path = _choose(name, interface_name, config, towards, only)
    address = path.endpoint[0]
    if config.switch is not None and is_ipv6(config.switch.address) != is_ipv6(address):
        path.close()
        raise ConfigError(
            f"the switch at {config.switch.address} sums packets of {family_name(config.switch.address)}, and this "
            f"rank talks over {family_name(address)} ({address}): give the interface, MASTER_ADDR and a program that "
            "is attached the switch's family, or train without the switch"
        )
    return path


def _choose(name: str, interface_name: str | None, config: Config, towards: str, only: int) -> Datapath:
    if name not in NAMES:
        raise ConfigError(f"datapath {name!r}: choose one of {', '.join(NAMES)}")
    found = interface(interface_name, towards) if interface_name else interface_towards(towards)
    if found is None:
        if name == "xdp":
            raise ConfigError(
                "datapath 'xdp' needs an interface, and the way to MASTER_ADDR does not leave this host: pass "
                "interface= or set TAILBOUND_INTERFACE"
            )
        return _udp(found, config, only)
    if name == "auto" and not interface_name and (ranks := int(os.environ.get("LOCAL_WORLD_SIZE") or 1)) > 1:
        log.info("%d ranks on this host share %s: udp, since xdp takes one rank an interface", ranks, found.name)
        name = "udp"
    if name != "udp":
        from tailbound.datapath.xdp import XdpDatapath

        if pin.settings(found.name) is not None:
            # Whoever attached it wants it used: what stands in its way is told, and nothing is done instead.
            return XdpDatapath.open(found.name, config.ranks, found.address)
        if interface_name or name == "xdp":
            try:
                ip = ip_bytes(found.address)
                width = row_width(config.width, _mtu(found, config), linear=linear_of(found.name), ip=ip)
                rows, port = ring_rows(config.ring(width), width, config.ranks), config.port or DEFAULT_PORT
                asked = pin.Receiver(found.name, port, width, *rows, is_ipv6(found.address))
                return XdpDatapath.attach(asked, keyed=config.keyed, address=found.address)
            except (CapabilityError, AttachError) as error:
                if name == "xdp" or XdpDatapath.is_ours(found.name):
                    raise
                log.warning("rank %d: no xdp datapath on %s, using udp: %s", config.rank, found.name, error)
    return _udp(found, config, only)


def _udp(found: Interface | None, config: Config, only: int) -> Datapath:
    from tailbound.datapath.udp import UdpDatapath

    address = found.address if found else "127.0.0.1"
    mtu = _mtu(found, config) if found and not is_loopback(address) else config.mtu or None
    width = row_width(config.width, mtu, ip=ip_bytes(address))
    ports = [only] if only else _ports(config, found)
    return UdpDatapath(address, ports, width, *ring_rows(config.ring(width), width, config.ranks))


def _mtu(found: Interface, config: Config) -> int:
    """Of the path, in bytes."""
    return min(found.mtu, config.mtu or found.mtu)


def _ports(config: Config, found: Interface | None) -> list[int]:
    """UDP ports that may be taken, by preference; 0: any.

    A switch sends results to the job's port on every rank, so that there must be exactly this one.
    """
    if config.switch is not None and found is not None and not is_loopback(found.address):
        return [config.switch.port or config.port or DEFAULT_PORT]
    if not config.port:
        return [0]
    not_ours = 0  # a program that is attached takes what comes to its port before any socket does
    with contextlib.suppress(AttachError, CapabilityError):
        if found is not None and (settings := pin.settings(found.name)) is not None:
            not_ours = settings.port
    return [port for port in range(config.port, min(config.port + PORTS, 65536)) if port != not_ours]
