"""Pinned maps: attaching is a short privileged step, training an unprivileged process that opens files (kernel-25).

An own bpffs under /run/tailbound (anybody may enter, nobody may list), one folder an interface and network namespace
(0710, root and a group, each its own), pins 0660 there, and a file of settings beside it. Links are pinned for root
alone: only root detaches. Programs keep the lock maps that nobody else needs alive by themselves.

A folder is ours if its settings, or a beginning of them, lie beside it: whatever else is on the bpffs is left alone.
One process at a time makes and removes pins, so that nobody takes for a remainder what another is just pinning.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import grp
import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tailbound.errors import AttachError, CapabilityError
from tailbound.kernel import compile as compile_
from tailbound.kernel import net, syscalls
from tailbound.kernel.maps import PROGRAMS
from tailbound.wire.schema import WORKER_MAPS

ROOT = Path("/run/tailbound")
#: Maps that a trainer writes and nobody reads (auth-2).
SECRET = tuple(m.name for m in WORKER_MAPS if m.secret)
#: Of pins, where it is not 0660: keys cannot be read back, and programs are put in by root alone.
_MODES = dict.fromkeys(SECRET, 0o220) | {PROGRAMS: 0o600}
_LINK = "link"
#: What names of folders begin with that are no interface's, but a switch's.
SWITCH = "switch@"
#: What the names of the links of a switch's ports begin with.
PORT_LINK = "link-"
#: What the names of further links end with.
_MORE_LINKS = "_link"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Receiver:
    """What a program is to receive.

    Attributes:
        interface: its name.
        port: UDP port of the job.
        width: W, codes of a full row; a multiple of 64.
        sum_rows, result_rows: rows of the rings; powers of two.
        ipv6: of which family of IP it takes packets.
    """

    interface: str
    port: int
    width: int = 1408
    sum_rows: int = 4096
    result_rows: int = 8192
    ipv6: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings(Receiver):
    """What was fixed at attach time."""

    prog_id: int
    vlan: int
    #: Of the sources of the program (``compile.signature``), which declare its maps, too: the host has to know what it
    #: does with a packet.
    signature: str
    #: Whether the program for jobs with a key was loaded, too.
    tagged: bool
    #: Of the interface at attach time.
    index: int


def bpffs() -> Path:
    """Where the file system of pins is mounted."""
    return ROOT / "bpf"


def _key(interface: str) -> str:
    return f"{interface}-{os.stat('/proc/thread-self/ns/net').st_ino}"


def _pins(interface: str) -> Path:
    return bpffs() / _key(interface).replace(".", ":")  # bpffs takes no dots, and names of interfaces no colons


def _settings_file(interface: str) -> Path:
    return ROOT / f"{_pins(interface).name}.json"


def _begun(file: Path) -> Path:
    """Where settings are written before anything is pinned; they get their name when all is."""
    return file.with_suffix(".new")


def read(file: Path) -> dict[str, Any] | None:
    """What ``write`` has written; None where nothing is there, or no such thing."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found


def write(file: Path, values: Mapping[str, Any]) -> None:
    """Writes settings for root alone, all at once."""
    begun = _begun(file)
    begun.write_text(json.dumps(values) + "\n")
    begun.chmod(0o600)
    os.replace(begun, file)


def refused(doing: str, error: OSError) -> CapabilityError:
    """Says that the system does not let this process do something, and what helps."""
    return CapabilityError(f"cannot {doing}: {error.strerror} (errno {error.errno}); run as root")


@contextlib.contextmanager
def alone(*, folder: bool = False) -> Iterator[None]:
    """Keeps other processes from making and removing pins meanwhile.

    Args:
        folder: by another lock, that of the folder itself: for whoever does more, and takes the first one within it.

    Raises:
        CapabilityError: no privilege to.
    """
    try:
        ROOT.mkdir(mode=0o711, parents=True, exist_ok=True)
        what, flags = (ROOT, os.O_DIRECTORY) if folder else (ROOT / "lock", os.O_RDWR | os.O_CREAT)
        fd = os.open(what, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise refused(f"lock {ROOT}", error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def mount() -> None:
    """Makes the folders and mounts the bpffs, unless that is done.

    Raises:
        CapabilityError: no privilege to, or what this process mounts would end with it.
    """
    try:
        with alone():  # two at once would mount one file system over the other, and hide the pins in that
            _mount()
    except OSError as error:
        raise refused(f"mount a BPF file system on {bpffs()}", error) from error


def _mount() -> None:
    bpffs().mkdir(mode=0o711, exist_ok=True)
    target = os.fsencode(bpffs())
    if not os.path.ismount(target):
        if _libc.mount(b"tailbound", target, b"bpf", 0, b"mode=0711") < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if not _outlives_us(bpffs()):
            _libc.umount(target)
            raise CapabilityError(
                f"{bpffs()} is not mounted on this host, and what this process mounts is seen in its own mount "
                "namespace alone (`ip netns exec`, a container, PrivateTmp=), and gone with it. Outside of that: "
                f"`sudo mkdir -p {bpffs()} && sudo mount -t bpf tailbound {bpffs()} -o mode=0711`, or enable "
                "run-tailbound-bpf.mount; then try again"
            )
    for path in (ROOT, bpffs()):
        os.chown(path, 0, 0)
        os.chmod(path, 0o711)  # noqa: S103 - what is in it says who may open it


def _outlives_us(path: Path) -> bool:
    """Whether what this process has mounted there stays when it ends.

    A mount namespace that was made for a command ends with it. That is one that an ancestor does not share: what is
    mounted has to be seen by that one. Who may not be looked at, as the first process, is taken to share it.
    """
    own, pid = os.stat("/proc/thread-self/ns/mnt").st_ino, os.getppid()
    try:
        while pid > 0:
            if os.stat(f"/proc/{pid}/ns/mnt").st_ino != own:
                return os.stat(f"/proc/{pid}/root{path}").st_dev == os.stat(path).st_dev
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except PermissionError:
        return True
    except OSError:
        return False  # not there
    return True


def group_of(interface: str) -> str | None:
    """For whom ``interface`` was attached and pinned, in words; None: it was not."""
    try:
        group = os.stat(_pins(interface)).st_gid
    except OSError:
        return None
    return f"group {_name(group)}" if group else "root"


def settings(interface: str) -> Settings | None:
    """What is pinned for ``interface``; None if nothing is, or what is there is left over and no longer attached.

    Raises:
        ConfigError: no such interface.
        AttachError: pinned by another version of Tailbound, for another VLAN, or for an interface of this name that is
            gone.
        CapabilityError: pinned for a group that this process is not in.
    """
    there = net.xdp_below(interface)
    try:
        values = json.loads(_settings_file(interface).read_text())
    except PermissionError as error:
        if there is None:
            return None
        raise CapabilityError(
            f"an XDP program is on {interface}, and this user may not open its maps: {_hidden(interface)}. Or train "
            "over sockets: TAILBOUND_DATAPATH=udp"
        ) from error
    except (OSError, ValueError):
        return None
    if there is None or there.prog_id != values.get("prog_id"):
        return None
    if values.keys() != {each.name for each in fields(Settings)} or values["signature"] != compile_.signature():
        raise AttachError(
            f"{interface} was attached by another version of Tailbound, whose program may not know this one's packets: "
            f"run `tailbound attach {interface} --replace` with this one, between two jobs"
        )
    found = Settings(**values)
    if found.vlan != (vlan := net.device_of(interface).vlan):
        raise AttachError(
            f"{interface} was attached as an interface of VLAN {found.vlan}, and is one of {vlan or 'none'} now: run "
            f"`tailbound attach {interface} --replace`"
        )
    if found.index != net.index_of(interface):
        raise AttachError(
            f"{interface} was attached, but an interface of this name was removed and made again since then: run "
            f"`tailbound attach {interface} --replace`"
        )
    return found


def owner(interface: str, prog_id: int) -> str | None:
    """The interface for which a program was attached and pinned in this network namespace; None: none, as far as known.

    Several share a device where there are VLANs. It may have another name by now, but pins keep the one of then. An
    interface whose settings this user may not read is taken for that.
    """
    names = [interface, *(name for _, name in socket.if_nameindex())]  # who may not list the folder knows these
    for file in (*map(_settings_file, names), *sorted(ROOT.glob(_settings_file("*").name))):
        with contextlib.suppress(OSError, ValueError, KeyError):
            values = json.loads(file.read_text())
            if values["prog_id"] == prog_id:
                return str(values["interface"])
    own = _settings_file(interface)
    return interface if os.path.exists(own) and not os.access(own, os.R_OK) else None


def _hidden(interface: str) -> str:
    """For whom ``interface`` was attached, and what to type."""
    group = group_of(interface) or "another user"
    if group.startswith("group "):
        name = group.removeprefix("group ")
        return f"it was attached for the {group}. To join it: sudo usermod -aG {name} $USER, and log in again"
    own = _name(os.getgid())
    again = f"sudo {tailbound()} attach {interface} --replace --group {own}"
    return f"it was attached for {group} alone. To attach it for the group {own}: {again}"


def _name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def tailbound() -> str:
    """How to call this very installation; sudo's PATH knows no virtual environment."""
    own = Path(sys.prefix, "bin", "tailbound")
    return str(own) if own.exists() else shutil.which("tailbound") or f"{sys.executable} -m tailbound"


def pin(found: Settings, fds: Mapping[str, int], link: int, group: int) -> None:
    """Pins maps and link, readable by ``group``, in the place of whatever was pinned there; after ``mount``.

    Raises:
        AttachError: see ``refuse_elsewhere``.
        CapabilityError: no privilege to.
    """
    with alone():
        _pin(found, fds, link, group)


def _pin(found: Settings, fds: Mapping[str, int], link: int, group: int) -> None:
    folder, file = _pins(found.interface), _settings_file(found.interface)
    refuse_elsewhere(found.interface)
    clear(folder, file)
    begun = _begun(file)
    try:
        begun.write_text(json.dumps(asdict(found)) + "\n")
        os.chown(begun, 0, group)
        os.chmod(begun, 0o640)
        folder.mkdir(mode=0o710)
        os.chown(folder, 0, group)
        _pin_maps(folder, fds, group)
        _pin_link(folder / _LINK, link)
        os.replace(begun, file)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        begun.unlink(missing_ok=True)
        raise refused(f"pin below {folder}", error) from error


def refuse_elsewhere(interface: str) -> None:
    """Keeps an attach from taking the program off a device that had this name before: a job may run on it.

    Raises:
        ConfigError: no such interface.
        AttachError: what is pinned for ``interface`` is on another device than its own.
    """
    there = _index_of(_pins(interface) / _LINK)
    if there in (0, net.index_of(net.device_of(interface).name)):
        return
    try:
        where = socket.if_indextoname(there)
    except OSError:
        where = "a device of another network namespace"
    raise AttachError(
        f"what was attached for {interface} is on {where} now: run `tailbound detach {interface}` once no job uses it, "
        "then attach again"
    )


def add(interface: str, program: str, fds: Mapping[str, int], link: int, group: int) -> None:
    """Pins maps and link of a further program, ``program``, beside what ``pin`` has pinned; they go with that.

    The link comes first: maps without a program, all that a crash would leave, would deceive who opens them.

    Raises:
        CapabilityError: no privilege to, or nothing is pinned there.
    """
    folder, name = _pins(interface), program + _MORE_LINKS
    try:
        _pin_link(folder / name, link)
        _pin_maps(folder, fds, group)
    except OSError as error:
        for left in (*fds, name):
            (folder / left).unlink(missing_ok=True)
        raise refused(f"pin below {folder}", error) from error


def _pin_maps(folder: Path, fds: Mapping[str, int], group: int) -> None:
    """For the group."""
    for name, fd in fds.items():
        path = folder / name
        syscalls.obj_pin(fd, str(path))
        os.chown(path, 0, group)
        os.chmod(path, _MODES.get(name, 0o660))


def _pin_link(path: Path, link: int) -> None:
    """For root."""
    syscalls.obj_pin(link, str(path))
    os.chmod(path, 0o600)


def open_pins(interface: str, names: tuple[str, ...]) -> dict[str, int]:
    """Descriptors of the pinned maps ``names``.

    Raises:
        AttachError: nothing is pinned.
        CapabilityError: the files may not be opened.
    """
    fds: dict[str, int] = {}
    try:
        for name in names:
            fds[name] = syscalls.obj_get(str(_pins(interface) / name), syscalls.F_WRONLY if name in SECRET else 0)
    except OSError as error:
        for fd in fds.values():
            os.close(fd)
        if isinstance(error, FileNotFoundError):
            raise AttachError(f"nothing is pinned for {interface}: run `sudo tailbound attach {interface}`") from error
        raise CapabilityError(
            f"pins of {interface} may not be opened ({error.strerror}): attach with --group and be in that group "
            "(pinned maps need Linux 5.19 for unprivileged users)"
        ) from error
    return fds


def identity(interface: str) -> tuple[int, int] | None:
    """Which pins there are, another value after each attach; None: none."""
    try:
        found = os.stat(_pins(interface))
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_as_asked(asked: Receiver, group: int) -> bool:
    """Whether this version's program is attached and pinned as ``asked``, for the group of this id."""
    try:
        found = settings(asked.interface)
        same = found is not None and asdict(asked).items() <= asdict(found).items()
        return same and os.stat(_pins(asked.interface)).st_gid == group
    except (AttachError, OSError):
        return False


def remove(interface: str) -> bool:
    """Detaches and removes all pins of ``interface``, also the remains of an attach that did not finish.

    Returns:
        Whether anything was there.

    Raises:
        CapabilityError: no privilege to.
    """
    if not ROOT.is_dir():
        return False
    with alone():
        return clear(_pins(interface), _settings_file(interface))


def clear(folder: Path, file: Path) -> bool:
    """Detaches and removes the pins in ``folder`` and the settings, finished or only begun, in ``file``.

    Returns:
        Whether anything was there.

    Raises:
        CapabilityError: no privilege to.
    """
    try:
        found = folder.is_dir() or file.exists()
        if folder.is_dir():
            for link in (*folder.glob(f"*{_MORE_LINKS}"), *folder.glob(f"{PORT_LINK}*"), folder / _LINK):
                detach(link)
            shutil.rmtree(folder)
        file.unlink(missing_ok=True)
        _begun(file).unlink(missing_ok=True)
    except OSError as error:
        raise refused(f"remove {folder}", error) from error
    return found


def detach(link: Path) -> None:
    """Takes the program off, so that it is gone when this returns; nothing to do where interface or pin are gone."""
    if not link.exists():
        return
    fd = syscalls.obj_get(str(link))
    try:
        syscalls.link_detach(fd)
    except OSError as error:
        if error.errno != errno.ENOLINK:  # its interface is gone already
            raise
    finally:
        os.close(fd)
    link.unlink()


def _index_of(link: Path) -> int:
    """Index of the device of a pinned link; 0: it has none any more, or is missing."""
    try:
        fd = syscalls.obj_get(str(link))
    except OSError:
        return 0
    try:
        return int(struct.unpack_from("=I", syscalls.link_info(fd), 16)[0])
    finally:
        os.close(fd)


def _left_over(name: str) -> bool:
    """Whether nobody needs these pins any more.

    ``ROOT`` may be shared with mount namespaces that have file systems of pins of their own. What is pinned there
    cannot be seen from here, and is left alone.
    """
    folder, finished = bpffs() / name, (ROOT / f"{name}.json").exists()
    if folder.is_dir():
        return not (finished and _index_of(folder / _LINK))
    return name.endswith(_key("")) and not finished


def _portless(folder: Path) -> bool:
    """Whether a switch has lost all its ports, with their network namespace as a rule; not while it comes up."""
    links = list(folder.glob(f"{PORT_LINK}*"))
    return bool(links) and not any(map(_index_of, links))


def sweep() -> list[str]:
    """Removes pins whose device or namespace is gone, and what an attach that did not finish has left.

    A switch's, too, when all its ports are gone.

    Returns:
        Their names.

    Raises:
        CapabilityError: no privilege to.
    """
    if not os.path.ismount(bpffs()):
        return []
    with alone():
        names = {f.stem for end in ("json", "new") for f in ROOT.glob(f"*.{end}") if not f.name.startswith(SWITCH)}
        gone = sorted(name for name in names if _left_over(name))
        gone += sorted(folder.name for folder in bpffs().glob(f"{SWITCH}*") if _portless(folder))
        for name in gone:
            clear(bpffs() / name, ROOT / f"{name}.json")
    return gone
