"""A P4 switch that outlives the process that started it: one a network namespace, its files below /run/tailbound.

bmv2 goes on by itself. A file beside its own says where it takes commands and what has been put into it, and is written
anew whenever a job comes or goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel import pin
from tailbound.kernel.switch import Entry, Member
from tailbound.switch.box import Box, Port
from tailbound.switch.p4.box import open_p4
from tailbound.switch.p4.compile import Sizes
from tailbound.switch.p4.process import THRIFT_PORT, Process
from tailbound.switch.p4.runtime import Runtime
from tailbound.switch.p4.switch import Held, P4Switch


def _folder() -> Path:
    return pin.ROOT / f"p4-{os.stat('/proc/thread-self/ns/net').st_ino}"


def _file() -> Path:
    return _folder() / "switch.json"


def _read() -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(_file().read_text())
    except (OSError, ValueError):
        return None
    return found


def is_up() -> bool:
    """Whether a P4 switch was brought up here and not down again; it may have ended by itself."""
    return _read() is not None


def up(ports: Sequence[str], address: str, *, thrift_port: int = THRIFT_PORT, **options: Any) -> Box[P4Switch]:
    """Starts a switch that goes on without this process; see ``open_p4``. Closing the box changes nothing.

    Raises:
        AttachError: a P4 switch is up here already, or it does not start.
        CapabilityError, ConfigError: see ``open_p4``; or its files may not be written.
    """
    there = _read()
    if there is not None:
        names = ", ".join(name for name, _ in there["ports"])
        raise AttachError(
            f"a P4 switch is up already at {there['address']} on {names}: run `tailbound switch down` first"
        )
    try:
        shutil.rmtree(_folder(), ignore_errors=True)
        _folder().mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise CapabilityError(f"cannot make {_folder()} ({error.strerror}): run as root") from error
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
    there = _read()
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
    there = _read()
    if there is not None:
        Process(there["pid"], there["born"]).end()
    try:
        if not _folder().exists():
            return False
        shutil.rmtree(_folder())
    except OSError as error:
        raise CapabilityError(f"cannot remove {_folder()} ({error.strerror}): run as root") from error
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
        temporary = _file().with_suffix(".new")
        temporary.write_text(json.dumps(fixed | {"held": _plain(box.switch.held)}) + "\n")
        os.replace(temporary, _file())

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
