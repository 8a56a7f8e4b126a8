"""Everything ``tailbound doctor`` says, as data; one function prints it as tables."""

from __future__ import annotations

import grp
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tailbound.doctor import facts
from tailbound.doctor.interfaces import Interface, interface, leads_to_peers
from tailbound.doctor.verdict import Verdict, choose
from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.kernel import pin
from tailbound.kernel.linear import PAGE
from tailbound.transport.config import row_width


@dataclass(frozen=True)
class Report:
    """What ``tailbound doctor`` found."""

    machine: facts.Machine
    link: Interface | None
    verdict: Verdict


def examine(name: str | None = None) -> Report:
    """Looks at this machine; changes nothing.

    Args:
        name: interface to judge; None takes the one that leads to the peers, as a job does.

    Raises:
        ConfigError: no such interface.
    """
    chosen, why = leads_to_peers(name)
    link = interface(chosen) if chosen else None
    machine = facts.machine()
    verdict = choose(
        machine,
        link,
        attached=link is not None and _attached(link.name),
        tailbound=pin.tailbound(),
        options=_group_option(),
        judged=why,
    )
    return Report(machine, link, verdict)


def _group_option() -> str:
    """The option of ``tailbound attach`` for this user's group."""
    if not os.getgid():
        return ""
    try:
        return f"--group {grp.getgrgid(os.getgid()).gr_name}"
    except KeyError:
        return f"--group {os.getgid()}"


def _attached(name: str) -> bool:
    """Whether Tailbound's maps of an interface are pinned and this process may open them."""
    try:
        if pin.settings(name) is None:
            return False
        for fd in pin.open_pins(name, ("control",)).values():
            os.close(fd)
    except (AttachError, CapabilityError):
        return False
    return True


def show(report: Report) -> None:
    """Prints the report on standard output: the verdict, then the facts."""
    from rich.console import Console
    from rich.table import Table

    console, verdict = Console(), report.verdict
    lines = []
    if verdict.interface:
        lines.append(f"judged is {verdict.interface}: {verdict.judged}")
    lines += [f"because {line}" for line in verdict.reasons]
    if verdict.datapath != "xdp":
        lines.append("for xdp:" if verdict.commands else "for xdp: no command of ours helps, see above")
        lines += [f"  {line}" for line in verdict.commands]
    if verdict.trainer:
        lines.append(f"the trainer takes it with {verdict.trainer} in its environment")
    lines += [f"note: {line}" for line in verdict.notes]
    console.print(f"datapath: [bold]{verdict.datapath}[/bold]{f' on {verdict.interface}' * bool(verdict.interface)}")
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    table = Table("what", "here", title="What is known of each driver: docs/nics.md", title_justify="left")
    for what, here in [*_of_machine(report.machine), *(_of_interface(report.link) if report.link else ())]:
        table.add_row(what, _word(here))
    console.print(table)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _of_machine(machine: facts.Machine) -> Iterable[tuple[str, Any]]:
    capabilities = ", ".join(name for name, has in machine.capabilities.items() if has) or "none"
    rows = {
        "kernel": f"{machine.kernel} ({machine.architecture}, {machine.cpus} CPUs)",
        "BTF": machine.btf,
        "bpf(2)": machine.bpf_error or "allowed",
        "built ahead, codes a row": ", ".join(map(str, machine.objects)) or "none: programs are compiled here",
        "the same for IPv6": ", ".join(map(str, machine.objects_ipv6)) or "none",
        "C library of udp": machine.core or "missing: apt-get install gcc libc6-dev",
        "BCC": machine.bcc,
        "kernel headers": machine.headers,
        "clang, libbpf": f"{_word(machine.clang)}, {_word(machine.libbpf)}",
        "capabilities": f"{capabilities} (uid {machine.effective_uid})",
    }
    return rows.items()


def _of_interface(i: Interface) -> Iterable[tuple[str, Any]]:
    try:
        linear = i.linear or PAGE if i.native_xdp is not False else None
        width = row_width(0, i.mtu, linear=linear, ip=i.ip_bytes)
    except ConfigError:
        width = None
    rows = {
        "up": i.up,
        "driver": i.driver,
        "native XDP": i.native_xdp,
        "MTU": f"{i.mtu}, {_word(width)} codes a row",
        "queues rx/tx": f"{i.rx_queues}/{i.tx_queues}",
        "LRO, GRO-HW": f"{_word(i.lro)}, {_word(i.gro_hw)}",
        "XDP program": i.xdp_program,
    }
    return ((f"{i.name}: {what}", here) for what, here in rows.items())
