"""Which datapath a machine gets, why, and what to type for the better one: a pure function of the facts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tailbound.doctor.facts import Machine
from tailbound.doctor.interfaces import Interface
from tailbound.errors import ConfigError
from tailbound.kernel.attach import OURS
from tailbound.kernel.linear import remedy
from tailbound.kernel.load import WORKER
from tailbound.transport.config import row_width
from tailbound.wire.schema import ETHERNET_BYTES

#: What the udp datapath asks for: bursts of all peers fit.
_RECEIVE_BYTES = 16 << 20
#: mmap of frozen maps by file permission of their pins, and BPF links for XDP (Linux 5.19 has both).
LEAST_KERNEL = (5, 19)
#: MTU up to which drivers take an XDP program, where they have a limit of their own that is known; others say it when
#: the program is attached.
MTU_MOST = {"ena": 3498, "gve": 2032, "hv_netvsc": 3506, "igc": 1500, "ixgbe": 3050, "mana": 3506}
#: The same of drivers that had such a limit before a version of Linux (docs/nics.md).
MTU_MOST_BEFORE: dict[str, tuple[tuple[int, ...], int]] = {"i40e": ((6, 4), 3050), "ice": ((6, 3), 3046)}
#: For whom the verdict ``xdp`` does not hold.
ONE_RANK = (
    "xdp takes one rank an interface: a job with several ranks on this host (LOCAL_WORLD_SIZE above 1) takes udp; "
    "leave TAILBOUND_INTERFACE unset then, or let it name another interface for each rank"
)
#: Drivers that refuse a program unless there is a spare queue for sending for each for receiving.
QUEUE_FOR_QUEUE = frozenset({"bnxt_en", "ena", "gve"})
#: Drivers that refuse a program while the device joins packets, by LRO or by hardware GRO (docs/nics.md).
JOINS_NOTHING = {"gve": ("lro",), "hv_netvsc": ("lro",), "mlx5_core": ("lro", "rx-gro-hw")}
#: MTU up to which drivers stop the device from joining packets themselves, when a program is attached (docs/nics.md).
#: Above it ``bnxt_en`` keeps its aggregation rings. ``virtio_net`` tells the host, and its flag says "on" as before.
STOPS_JOINING = {"bnxt_en": 3500, "virtio_net": 65535}


@dataclass(frozen=True)
class Verdict:
    """A datapath and the words for it."""

    datapath: str  #: ``xdp`` or ``udp``
    interface: str | None  #: the interface that was judged
    reasons: tuple[str, ...]  #: why not the better one, or why this one
    commands: tuple[str, ...]  #: what to type, in this order, for the better one; empty: nothing, or nothing helps
    notes: tuple[str, ...]  #: what else is worth knowing
    trainer: str = ""  #: what the trainer's environment needs for ``xdp``
    judged: str = ""  #: how the interface was found; without one, what would tell it


def choose(
    machine: Machine,
    link: Interface | None,
    *,
    attached: bool = False,
    tailbound: str = "",
    options: str = "",
    judged: str = "",
) -> Verdict:
    """Judges one interface.

    Args:
        machine: what the machine has.
        link: the interface training would use; None where none is known.
        attached: Tailbound's maps of this interface are pinned, and this process may open them.
        tailbound: the command as this user would have to type it, if not just ``tailbound``.
        options: of ``tailbound attach``, as this user would have to give them.
        judged: how the interface was found; without one, what would tell it.
    """
    name = link.name if link else None
    trainer = f"TAILBOUND_INTERFACE={name}"
    if link and attached:
        why = f"`tailbound attach` has been done on {name}, and this user may open its maps"
        return Verdict("xdp", name, (why,), (), (*_notes(link, machine.cpus), ONE_RANK), trainer, judged)
    blocked = [*_interface_problems(link, judged, _version(machine)), *_kernel_problems(machine)]
    objects = machine.objects_ipv6 if link and link.ipv6 else machine.objects
    packages = [] if link and _width(link) in objects else _missing_packages(machine)
    powerless = _missing_privileges(machine, link)
    reasons = [*blocked, *(f"{what} is missing" for what, _ in packages), *powerless]
    if not reasons:
        why = f"native XDP on {name}, and this process may load and attach programs"
        return Verdict("xdp", name, (why,), (), (*_notes(link, machine.cpus), ONE_RANK), trainer, judged)
    commands = []
    if not blocked:
        sudo = "" if machine.effective_uid == 0 else "sudo "
        if packages:
            commands.append(f"{sudo}apt-get install --no-install-recommends {' '.join(p for _, p in packages)}")
        if powerless and machine.effective_uid != 0:
            commands.append(" ".join(filter(None, ("sudo", tailbound or "tailbound", "attach", name, options))))
    notes = (*_notes(link, machine.cpus), *_receive_room(machine), *((ONE_RANK,) if commands else ()))
    return Verdict("udp", name, tuple(reasons), tuple(commands), notes, trainer if commands else "", judged)


def _receive_room(machine: Machine) -> Sequence[str]:
    if machine.rmem_max is None or machine.rmem_max >= _RECEIVE_BYTES:
        return ()
    room = f"sockets may buffer only {machine.rmem_max >> 10} KiB, so that senders have to pause between bursts"
    return (f"{room}: sudo sysctl -w net.core.rmem_max={_RECEIVE_BYTES}",)


def _interface_problems(link: Interface | None, judged: str, version: tuple[int, ...]) -> list[str]:
    if link is None:
        return [judged or "no interface is known that leads to the peers: give one with --interface"]
    problems = []
    if not link.up:
        problems.append(f"{link.name} is down (ip link set {link.name} up)")
    if link.native_xdp is False:
        problems.append(
            f"driver {link.driver or 'unknown'} of {link.device} has no native XDP; generic mode is not used, "
            "since it may be handed super-frames"
        )
    if link.xdp_program is not None:
        problems.append(_occupied(link))
    if not link.linear:
        problems.append(remedy(link.device, link.device_mtu))
    most = _mtu_most(link.driver or "", version)
    if most and link.device_mtu > most:
        problems.append(
            f"driver {link.driver} of {link.device} takes XDP programs up to MTU {most}, not {link.device_mtu}: "
            f"ip link set dev {link.device} mtu {most} (on all ranks)"
        )
    if link.driver in QUEUE_FOR_QUEUE and link.tx_most is not None and link.tx_queues + link.rx_queues > link.tx_most:
        problems.append(
            f"driver {link.driver} of {link.device} needs a spare transmit queue for each of its "
            f"{link.rx_queues} receive queues: ethtool -L {link.device} combined {max(1, link.tx_most // 2)}"
        )
    if link.driver == "virtio_net" and link.gro_hw_fixed:
        problems.append(
            f"driver {link.driver} of {link.device} takes no program, since the host joins packets and this guest may "
            "not refuse (no CTRL_GUEST_OFFLOADS): that is set where the machine is made"
        )
    if refused := _refused(link):
        problems.append(
            f"driver {link.driver} of {link.device} takes no program while the device joins packets: "
            f"ethtool -K {link.device} {' '.join(f'{what} off' for what in refused)}"
        )
    return problems


def _mtu_most(driver: str, version: tuple[int, ...]) -> int:
    """MTU up to which a driver takes a program on this version of Linux; 0: no limit of its own is known."""
    since, most = MTU_MOST_BEFORE.get(driver, ((), 0))
    return most if version < since else MTU_MOST.get(driver, 0)


def _refused(link: Interface) -> list[str]:
    """Offloads that are on, with which the driver takes no program."""
    on = {"lro": link.lro, "rx-gro-hw": link.gro_hw}
    return [what for what in JOINS_NOTHING.get(link.driver or "", ()) if on[what]]


def _occupied(link: Interface) -> str:
    what = f"program {link.xdp_program} on {link.device}"
    if link.xdp_name in OURS:
        if link.xdp_name == WORKER and link.xdp_owner not in (None, link.name):
            return (
                f"{what} is Tailbound's own, attached for {link.xdp_owner}; a device takes one: use that interface if "
                f"it is one of {link.device}'s, or, once no job runs on it, `tailbound detach {link.xdp_owner}`"
            )
        if link.xdp_name == WORKER:
            return (
                f"{what} is Tailbound's own, of a job that runs, or attached for a group that this user is not in: "
                f"be in it, or `tailbound detach {link.name}` and attach again with --group"
            )
        return f"{what} is Tailbound's {link.xdp_name}: `{OURS[link.xdp_name].format(link.name)}` removes it"
    named = f" ({link.xdp_name})" if link.xdp_name else ""
    return f"{what}{named} is somebody else's, which Tailbound never replaces: ip link set dev {link.device} xdp off"


def _version(machine: Machine) -> tuple[int, ...]:
    """Of Linux, its first two numbers."""
    return tuple(int(n) for n in re.findall(r"\d+", machine.kernel)[:2])


def _kernel_problems(machine: Machine) -> list[str]:
    problems = []
    if _version(machine) < LEAST_KERNEL:
        problems.append(f"Linux {machine.kernel} is older than {LEAST_KERNEL[0]}.{LEAST_KERNEL[1]}")
    if not machine.btf:
        problems.append("the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)")
    return problems


def _width(link: Interface) -> int:
    """Codes of a row, if the job takes what the interface's MTU gives; 0: it holds none."""
    try:
        return row_width(0, link.mtu, linear=link.linear or None, ip=link.ip_bytes)
    except ConfigError:
        return 0


def _missing_packages(machine: Machine) -> list[tuple[str, str]]:
    """(what is missing, Debian package) for the compiler that lacks least: BCC with headers, clang with libbpf's."""
    if (machine.bcc and machine.headers) or (machine.clang and machine.libbpf):
        return []
    if machine.clang and not machine.bcc:
        return [("bpf/bpf_helpers.h for clang", "libbpf-dev")]
    missing = [] if machine.bcc else [("BCC", "python3-bpfcc")]
    if machine.headers is None:
        missing.append(("kernel headers for BCC", f"linux-headers-{_DEBIAN.get(machine.architecture, 'generic')}"))
    return missing


_DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}


def _missing_privileges(machine: Machine, link: Interface | None) -> list[str]:
    lacking = [n for n in ("CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN") if not machine.capabilities.get(n)]
    if machine.capabilities.get("CAP_SYS_ADMIN"):  # which stands for the first two
        lacking = [n for n in lacking if n == "CAP_NET_ADMIN"]
    if lacking:
        who = f"this process (uid {machine.effective_uid})"
        free = ", and nothing is attached yet" if link and link.xdp_program is None else ""
        return [f"{who} lacks {', '.join(lacking[:-1])}{' and ' if lacking[1:] else ''}{lacking[-1]}{free}"]
    if machine.bpf_error:
        return [f"the kernel refuses bpf(2) to this process ({machine.bpf_error}): a container without bpf?"]
    return []


def _notes(link: Interface | None, cpus: int) -> Sequence[str]:
    notes: list[str] = []
    if link is None:
        return notes
    refused = _refused(link)
    joins = link.device_mtu > STOPS_JOINING.get(link.driver or "", 0)
    if joins and link.lro and "lro" not in refused:
        notes.append(f"large receive offload joins packets: ethtool -K {link.device} lro off")
    if joins and link.gro_hw and "rx-gro-hw" not in refused:
        notes.append(f"the device joins packets (hardware GRO): ethtool -K {link.device} rx-gro-hw off")
    if link.vlan_stripping:
        notes.append(
            "tags of VLANs are taken off before the program sees a frame, so that a VLAN's packets to the job's port "
            f"look like the job's own: ethtool -K {link.device} rxvlan off"
        )
    if link.mtu + ETHERNET_BYTES > link.linear > 0:
        notes.append(
            f"{link.driver or 'the driver'} hands over {link.linear} bytes of a frame in one piece, so that rows do "
            f"not fill MTU {link.mtu}"
        )
    if link.rx_queues == 1 and cpus > 1 and (link.rx_most or 0) > 1:
        most = min(cpus, link.rx_most or 1)
        notes.append(
            f"one queue, and so one core, takes in all packets: ethtool -L {link.device} combined {most} (or rx {most})"
        )
    if link.rx_queues > 1 and link.hashes_udp_ports is False:
        flow = "udp6" if link.ipv6 else "udp4"
        notes.append(f"one queue gets all of a peer's packets: ethtool -N {link.device} rx-flow-hash {flow} sdfn")
    if link.native_xdp is None:
        notes.append(f"whether driver {link.driver or 'unknown'} has native XDP is not known: attaching will tell")
    return notes
