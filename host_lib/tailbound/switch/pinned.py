"""A switch that outlives the process that made it: all of it pinned below /run/tailbound, one a network namespace.

A crash leaves at worst a folder without a file of settings; the next ``up`` or ``down`` removes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel import maps, net, pin, syscalls
from tailbound.kernel.switch import DEVICES, Sizes, Switch
from tailbound.switch.box import Box, Port, open_xdp
from tailbound.wire.schema import SWITCH_MAPS

#: Raised whenever the maps of this version would be read wrongly by another.
ABI = 2
_PROGRAM, _OUT = "program", "out"
_HELD = (*(m.name for m in SWITCH_MAPS), DEVICES)


def _key() -> str:
    return f"{pin.SWITCH}{os.stat('/proc/thread-self/ns/net').st_ino}"


def _folder() -> Path:
    return pin.bpffs() / _key()


def _file() -> Path:
    return pin.ROOT / f"{_key()}.json"


def _settings() -> dict[str, Any] | None:
    """What is up here; None if nothing is, or what is there is left over from something that did not finish."""
    return pin.read(_file()) if (_folder() / _PROGRAM).exists() else None


def up(ports: Sequence[str], address: str, **options: Any) -> Box[Switch]:
    """Makes a switch and pins it; see ``open_xdp``. What the box holds may be closed, the switch stays.

    Raises:
        AttachError: a switch is up here already, or a port refuses.
        CapabilityError, ConfigError: see ``open_xdp``.
    """
    there = _settings()
    if there is not None:
        names = ", ".join(port["name"] for port in there["ports"])
        raise AttachError(f"a switch is up already at {there['address']} on {names}: run `tailbound switch down` first")
    pin.mount()
    down()
    with contextlib.ExitStack() as opened:
        box = open_xdp(ports, address, **options)
        opened.callback(down)
        opened.callback(box.close)
        try:
            _pin(box)
        except OSError as error:
            raise pin.refused(f"pin below {_folder()}", error) from error
        opened.pop_all()
    return box


def _pin(box: Box[Switch]) -> None:
    folder = _folder()
    folder.mkdir(mode=0o700)
    fds = {name: box.switch.maps.fds[name] for name in _HELD}
    fds |= {_PROGRAM: box.switch.program, _OUT: box.switch.out}
    fds |= {f"{pin.PORT_LINK}{port.ifindex}": link for port, link in zip(box.ports, box.links, strict=True)}
    for name, fd in fds.items():
        syscalls.obj_pin(fd, str(folder / name))
    sizes = box.switch.sizes
    settings = {
        "abi": ABI,
        "address": box.address,
        "mac": box.mac.hex(),
        "ports": [{"name": port.name, "ifindex": port.ifindex} for port in box.ports],
        "sizes": {"width": sizes.width, "slots": sizes.slots, "ports": sizes.ports, "cpus": sizes.cpus},
    }
    pin.write(_file(), settings)


def find() -> Box[Switch]:
    """The switch that is up here, with its maps opened; closing it changes nothing.

    Raises:
        AttachError: none is, or it is another version's.
        CapabilityError: its pins may not be opened.
    """
    there = _settings()
    if there is None:
        raise AttachError(
            "no switch is up in this network namespace: run `tailbound switch up PORT... --address ADDRESS`"
        )
    if there.get("abi") != ABI:
        raise AttachError(
            "the switch was brought up by another version of Tailbound: run `tailbound switch down` and up"
        )
    sizes = Sizes(**there["sizes"])
    held = maps.Maps()
    programs: list[int] = []
    try:
        for name in _HELD:
            held.fds[name] = syscalls.obj_get(str(_folder() / name))
        programs += [syscalls.obj_get(str(_folder() / name)) for name in (_PROGRAM, _OUT)]
        for map_ in SWITCH_MAPS:
            if map_.mmap:
                held.map_array(map_, sizes.shapes[map_.name])
    except OSError as error:
        for fd in programs:
            os.close(fd)
        held.close()
        raise CapabilityError(f"the switch's pins may not be opened ({error.strerror}): run as root") from error
    ports = [Port(**port) for port in there["ports"]]
    return Box(Switch(sizes, held, *programs), ports, there["address"], bytes.fromhex(there["mac"]))


def down() -> bool:
    """Detaches and removes everything of the switch here, and of one that did not finish coming up or going down.

    Returns:
        Whether anything was there.

    Raises:
        CapabilityError: no privilege to.
    """
    return pin.clear(_folder(), _file())


def attached(port: Port) -> bool:
    """Whether the port is there and carries an XDP program."""
    with contextlib.suppress(Exception):
        return net.index_of(port.name) == port.ifindex and net.xdp_on(port.name) is not None
    return False
