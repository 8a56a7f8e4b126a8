"""Which datapath a machine gets, why, and what to type for the better one: a pure function of the facts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tailbound.doctor.facts import Machine
from tailbound.doctor.interfaces import Interface

__all__ = ["Verdict", "choose"]

#: What the udp datapath asks for: bursts of all peers fit.
_RECEIVE_BYTES = 16 << 20
#: mmap of frozen maps by file permission of their pins, and BPF links for XDP (Linux 5.19 has both).
LEAST_KERNEL = (5, 19)


@dataclass(frozen=True)
class Verdict:
    """A datapath and the words for it."""

    datapath: str  #: ``xdp`` or ``udp``
    interface: str | None  #: the interface that was judged
    reasons: tuple[str, ...]  #: why not the better one, or why this one
    commands: tuple[str, ...]  #: what to type, in this order, for the better one; empty: nothing, or nothing helps
    notes: tuple[str, ...]  #: what else is worth knowing


def choose(machine: Machine, link: Interface | None, *, attached: bool = False, tailbound: str = "") -> Verdict:
    """Judges one interface.

    Args:
        machine: what the machine has.
        link: the interface training would use; None where there is none.
        attached: Tailbound's maps of this interface are pinned, and this process may open them.
        tailbound: the command as this user would have to type it, if not just ``tailbound``.
    """
    name = link.name if link else None
    if link and attached:
        why = f"`tailbound attach` has been done on {name}, and this user may open its maps"
        return Verdict("xdp", name, (why,), (), tuple(_notes(link)))
    blocked = [*_interface_problems(link), *_kernel_problems(machine)]
    packages = _missing_packages(machine)
    powerless = _missing_privileges(machine)
    reasons = [*blocked, *(f"{what} is missing" for what, _ in packages), *powerless]
    if not reasons:
        why = f"native XDP on {name}, and this process may load and attach programs"
        return Verdict("xdp", name, (why,), (), tuple(_notes(link)))
    commands = []
    if not blocked:
        sudo = "" if machine.effective_uid == 0 else "sudo "
        if packages:
            commands.append(f"{sudo}apt-get install --no-install-recommends {' '.join(p for _, p in packages)}")
        if powerless and machine.effective_uid != 0:
            commands.append(f"sudo {tailbound or 'tailbound'} attach {name}")
    return Verdict("udp", name, tuple(reasons), tuple(commands), (*_notes(link), *_receive_room(machine)))


def _receive_room(machine: Machine) -> Sequence[str]:
    if machine.rmem_max is None or machine.rmem_max >= _RECEIVE_BYTES:
        return ()
    room = f"sockets may buffer only {machine.rmem_max >> 10} KiB, so that senders have to pause between bursts"
    return (f"{room}: sudo sysctl -w net.core.rmem_max={_RECEIVE_BYTES}",)


def _interface_problems(link: Interface | None) -> list[str]:
    if link is None:
        return ["there is no network interface besides loopback: give one with --interface"]
    problems = []
    if not link.up:
        problems.append(f"{link.name} is down (ip link set {link.name} up)")
    if link.native_xdp is False:
        problems.append(
            f"driver {link.driver or 'unknown'} of {link.name} has no native XDP; generic mode is not used, "
            "since it may be handed super-frames"
        )
    if link.xdp_program is not None:
        problems.append(
            f"XDP program {link.xdp_program} is on {link.name} already, and no maps of it that this user may open: "
            "if Tailbound attached it, be in the group it was attached for"
        )
    return problems


def _kernel_problems(machine: Machine) -> list[str]:
    problems = []
    numbers = [int(n) for n in re.findall(r"\d+", machine.kernel)[:2]]
    if tuple(numbers) < LEAST_KERNEL:
        problems.append(f"Linux {machine.kernel} is older than {LEAST_KERNEL[0]}.{LEAST_KERNEL[1]}")
    if not machine.btf:
        problems.append("the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)")
    return problems


def _missing_packages(machine: Machine) -> list[tuple[str, str]]:
    """(what is missing, Debian package) for the loader that ``auto`` takes: BCC, else clang with libbpf's headers."""
    missing = []
    if machine.bcc is None:
        if machine.clang:
            return [] if machine.libbpf else [("bpf/bpf_helpers.h for clang", "libbpf-dev")]
        missing.append(("BCC", "python3-bpfcc"))
    if machine.headers is None:
        missing.append(("kernel headers for BCC", f"linux-headers-{_DEBIAN.get(machine.architecture, 'generic')}"))
    return missing


_DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}


def _missing_privileges(machine: Machine) -> list[str]:
    lacking = [n for n in ("CAP_BPF", "CAP_NET_ADMIN") if not machine.capabilities.get(n)]
    if machine.capabilities.get("CAP_SYS_ADMIN") and lacking == ["CAP_BPF"]:
        lacking = []
    if lacking:
        who = f"this process (uid {machine.effective_uid})"
        return [f"{who} lacks {' and '.join(lacking)}, and nothing is attached yet"]
    if machine.bpf_error:
        return [f"the kernel refuses bpf(2) to this process ({machine.bpf_error}): a container without bpf?"]
    return []


def _notes(link: Interface | None) -> Sequence[str]:
    notes: list[str] = []
    if link is None:
        return notes
    if link.lro:
        notes.append(f"large receive offload joins packets: ethtool -K {link.name} lro off")
    if link.rx_queues > 1 and link.hashes_udp_ports is False:
        notes.append(f"one queue gets all of a peer's packets: ethtool -N {link.name} rx-flow-hash udp4 sdfn")
    if link.native_xdp is None:
        notes.append(f"whether driver {link.driver or 'unknown'} has native XDP is not known: attaching will tell")
    return notes
