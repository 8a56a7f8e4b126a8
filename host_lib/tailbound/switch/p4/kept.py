"""Opens a P4 switch, and keeps one that outlives its process: one a network namespace, files below /run/tailbound.

bmv2 goes on by itself. A file beside its own says where it takes commands and what has been put into it, and is written
anew whenever a job comes or goes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailbound.errors import AttachError, ConfigError
from tailbound.kernel import ethtool, net, pin
from tailbound.kernel.switch import Entry, Member
from tailbound.switch.box import Box, Port, check_ports
from tailbound.switch.job import ip_text, mac_bytes
from tailbound.switch.p4.compile import Sizes
from tailbound.switch.p4.process import THRIFT_PORT, Process
from tailbound.switch.p4.runtime import Runtime
from tailbound.switch.p4.switch import Held, P4Switch
from tailbound.switch.p4.tools import COMPILER, SWITCH, runtime_command, tool
from tailbound.wire.address import is_ipv6


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


def _folder() -> Path:
    return pin.ROOT / f"p4-{os.stat('/proc/thread-self/ns/net').st_ino}"


def _file() -> Path:
    return _folder() / "switch.json"


def is_up() -> bool:
    """Whether a P4 switch was brought up here and not down again; it may have ended by itself."""
    return pin.read(_file()) is not None


def up(ports: Sequence[str], address: str, *, thrift_port: int = THRIFT_PORT, **options: Any) -> Box[P4Switch]:
    """Starts a switch that goes on without this process; see ``open_p4``. Closing the box changes nothing.

    Raises:
        AttachError: a P4 switch is up here already, or it does not start.
        CapabilityError, ConfigError: see ``open_p4``; or its files may not be written.
    """
    there = pin.read(_file())
    if there is not None:
        names = ", ".join(name for name, _ in there["ports"])
        raise AttachError(
            f"a P4 switch is up already at {there['address']} on {names}: run `tailbound switch down` first"
        )
    try:
        shutil.rmtree(_folder(), ignore_errors=True)
        _folder().mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise pin.refused(f"make {_folder()}", error) from error
    with contextlib.ExitStack() as opened:
        opened.callback(shutil.rmtree, _folder(), ignore_errors=True)
        box = open_p4(ports, address, thrift_port=thrift_port, folder=_folder(), **options)
        opened.callback(box.switch.end)
        _keep(box, thrift_port)
        opened.pop_all()
    return box


def find() -> Box[P4Switch]:
    """The switch that is up here; closing it changes nothing.

    Raises:
        AttachError: none is, or it has ended or does not answer.
        CapabilityError: ``simple_switch_CLI`` is missing.
    """
    there = pin.read(_file())
    if there is None:
        raise AttachError(
            "no switch is up in this network namespace: run `tailbound switch up --p4 PORT... --address ADDRESS`"
        )
    process = Process(there["pid"], there["born"])
    if not process.alive():
        raise AttachError(
            f"the P4 switch (process {process.pid}) has ended: run `tailbound switch down` and up; {_folder()}/log "
            "may say why"
        )
    runtime = Runtime(there["thrift_port"])
    switch = P4Switch(runtime, Sizes(**there["sizes"]), process, _held(there["held"]))
    ports = [Port(name, number) for name, number in there["ports"]]
    box = Box(switch, ports, there["address"], bytes.fromhex(there["mac"]))
    _keep(box, there["thrift_port"])
    return box


def down() -> bool:
    """Ends the switch here and removes its files.

    Returns:
        Whether anything was there.

    Raises:
        CapabilityError: no privilege to.
    """
    there = pin.read(_file())
    if there is not None:
        Process(there["pid"], there["born"]).end()
    try:
        if not _folder().exists():
            return False
        shutil.rmtree(_folder())
    except OSError as error:
        raise pin.refused(f"remove {_folder()}", error) from error
    return True


def _keep(box: Box[P4Switch], thrift_port: int) -> None:
    """Writes the file now, and whenever a job comes or goes."""
    fixed = {
        "pid": box.switch.process.pid,
        "born": box.switch.process.born,
        "thrift_port": thrift_port,
        "sizes": asdict(box.switch.sizes),
        "address": box.address,
        "mac": box.mac.hex(),
        "ports": [(port.name, port.ifindex) for port in box.ports],
    }

    def write() -> None:
        pin.write(_file(), fixed | {"held": _plain(box.switch.held)})

    box.switch.changed = write
    write()


def _plain(held: Held) -> dict[str, Any]:
    def entry(one: Entry) -> dict[str, Any]:
        members = [m and {"address": m.address, "mac": m.mac.hex(), "ifindex": m.ifindex} for m in one.members]
        return vars(one) | {"mac": one.mac.hex(), "members": members}

    return {
        "entries": {place: entry(one) for place, one in held.entries.items()},
        "undo": held.undo,
        "shared": [[*name, commands] for name, commands in held.shared.items()],
    }


def _held(plain: dict[str, Any]) -> Held:
    def entry(one: dict[str, Any]) -> Entry:
        members = tuple(m and Member(m["address"], bytes.fromhex(m["mac"]), m["ifindex"]) for m in one["members"])
        return Entry(**one | {"mac": bytes.fromhex(one["mac"]), "members": members})

    return Held(
        {int(place): entry(one) for place, one in plain["entries"].items()},
        {int(place): commands for place, commands in plain["undo"].items()},
        {(address, port): commands for address, port, commands in plain["shared"]},
    )
