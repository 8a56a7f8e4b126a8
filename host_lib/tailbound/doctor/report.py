"""Everything ``tailbound doctor`` says, as data; one function prints it as tables."""

from __future__ import annotations

import dataclasses
import grp
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailbound import __version__
from tailbound.datapath.store import memory, ring_rows
from tailbound.doctor import facts
from tailbound.doctor.interfaces import Interface, interface, interfaces, leads_to_peers
from tailbound.doctor.verdict import Verdict, choose
from tailbound.errors import AttachError, CapabilityError, ConfigError
from tailbound.kernel import pin
from tailbound.kernel.command import tailbound
from tailbound.kernel.linear import PAGE
from tailbound.transport.config import Config, row_width
from tailbound.wire.schema import HEADER_BYTES

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Memory", "Report", "examine", "show"]

MIB = 2**20
#: World size that memory is computed for unless another is given: any job fits what is attached for two.
WORKERS = 2


@dataclass(frozen=True)
class Memory:
    """Kernel memory of one worker: bounded, all of it allocated at attach."""

    ring_mib: float
    workers: int
    width: int  #: W in codes
    sum_rows: int
    result_rows: int
    bytes_by_map: dict[str, int]
    total_bytes: int


@dataclass(frozen=True)
class Report:
    """What ``tailbound doctor`` found."""

    version: str
    machine: facts.Machine
    interfaces: list[Interface]
    verdict: Verdict
    memory: Memory

    def to_json(self) -> str:
        """The whole report as indented JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def examine(name: str | None = None, *, ring_mib: float | None = None, workers: int = WORKERS) -> Report:
    """Looks at this machine; changes nothing.

    Args:
        name: interface to judge; None takes the one that leads to the peers, as a job does.
        ring_mib: result ring in MiB; None takes the default of a job.
        workers: smallest world size to come, for the memory; as for ``tailbound attach``.

    Raises:
        ConfigError: no such interface, an MTU too small for one row, or an invalid ring or world size.
    """
    chosen, why = leads_to_peers(name)
    link = interface(chosen) if chosen else None
    machine = facts.machine()
    return Report(
        version=__version__,
        machine=machine,
        interfaces=interfaces(),
        verdict=choose(
            machine,
            link,
            attached=link is not None and _attached(link.name),
            tailbound=tailbound(),
            options=_options(ring_mib, workers),
            judged=why,
            sharing=_sharing(name),
        ),
        memory=_memory(Config.ring_mib if ring_mib is None else ring_mib, workers, link, machine.cpus),
    )


def _sharing(name: str | None) -> int:
    """Ranks on this host that would share the interface, as ``datapath.select`` sees it: none where one is named."""
    if name or os.environ.get("TAILBOUND_INTERFACE"):
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _options(ring_mib: float | None, workers: int) -> str:
    """Options of ``tailbound attach`` for what was asked here, and for this user's group."""
    given = [] if ring_mib is None else [f"--ring {ring_mib:g}"]
    if workers != WORKERS:
        given.append(f"--workers {workers}")
    if os.getgid():
        try:
            given.append(f"--group {grp.getgrgid(os.getgid()).gr_name}")
        except KeyError:
            given.append(f"--group {os.getgid()}")
    return " ".join(given)


def _memory(ring_mib: float, workers: int, link: Interface | None, cpus: int) -> Memory:
    width = row_width(0, link.mtu, linear=link.linear or PAGE, ip=link.ip_bytes) if link else row_width(0, 1500)
    rows = ring_rows(ring_mib, width, workers)
    maps = memory(*rows, width, cpus)
    return Memory(ring_mib, workers, width, *rows, maps, sum(maps.values()))


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


def show(report: Report, *, maps: bool = False) -> None:
    """Prints the report on standard output: the verdict, then the facts; ``maps``: the memory of each map, too."""
    from rich.console import Console

    console = Console()
    verdict, memory = report.verdict, report.memory
    where = f" on {verdict.interface}" if verdict.interface else ""
    console.print(f"datapath: [bold]{verdict.datapath}[/bold]{where}")
    if verdict.interface:
        console.print(f"  judged is {verdict.interface}: {verdict.judged}", markup=False, soft_wrap=True)
    for line in verdict.reasons:
        console.print(f"  because {line}", markup=False, soft_wrap=True)
    if verdict.datapath != "xdp":
        console.print("  for xdp:" if verdict.commands else "  for xdp: no command of ours helps, see above")
        for line in verdict.commands:
            console.print(f"    {line}", markup=False, soft_wrap=True)
    if verdict.trainer:
        console.print(f"  the trainer takes it with {verdict.trainer} in its environment", markup=False, soft_wrap=True)
    for line in verdict.notes:
        console.print(f"  note: {line}", markup=False, soft_wrap=True)
    kept = memory.result_rows // memory.workers * (HEADER_BYTES + memory.width)  # collective.buffers
    console.print(
        f"memory: {memory.total_bytes / MIB:.1f} MiB in the kernel for a ring of {memory.ring_mib:g} MiB and "
        f"{memory.workers} workers or more (all of it at attach); in the process at most {kept / MIB:.1f} for repairs",
        soft_wrap=True,
    )
    tables = [_machine_table(report.machine), _interface_table(report)]
    for table in (*tables, _memory_table(memory)) if maps else tables:
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _machine_table(machine: facts.Machine) -> Table:
    table = _table("Machine", "what", "here")
    capabilities = ", ".join(name for name, has in machine.capabilities.items() if has) or "none"
    rows = {
        "kernel": f"{machine.kernel} ({machine.architecture}, {machine.cpus} CPUs)",
        "BTF": machine.btf,
        "BPF JIT": machine.jit,
        "bpf(2)": machine.bpf_error or "allowed",
        "built ahead, codes a row": ", ".join(map(str, machine.objects)) or "none: programs are compiled here",
        "the same for IPv6": ", ".join(map(str, machine.objects_ipv6)) or "none",
        "BCC": f"{machine.bcc_version} in {machine.bcc}" if machine.bcc else None,
        "kernel headers": machine.headers,
        "clang, libbpf": f"{_word(machine.clang)}, {_word(machine.libbpf)}",
        "capabilities": f"{capabilities} (uid {machine.effective_uid})",
        "BPF file system": machine.bpffs,
    }
    for what, here in rows.items():
        table.add_row(what, _word(here))
    return table


def _interface_table(report: Report) -> Table:
    columns = (
        "name",
        "up",
        "driver",
        "native XDP",
        "MTU",
        "codes a row",
        "queues rx/tx",
        "LRO",
        "GRO-HW",
        "XDP program",
    )
    table = _table("Interfaces; what is known of each driver: docs/nics.md", *columns)
    for i in report.interfaces:
        try:
            linear = i.linear or PAGE if i.native_xdp is not False else None
            width = str(row_width(0, i.mtu, linear=linear, ip=i.ip_bytes))
        except ConfigError:
            width = "-"
        queues = f"{i.rx_queues}/{i.tx_queues}"
        cells = (i.up, i.driver, i.native_xdp, i.mtu, width, queues, i.lro, i.gro_hw, i.xdp_program)
        table.add_row(i.name, *map(_word, cells), style="bold" if i.name == report.verdict.interface else None)
    return table


def _memory_table(memory: Memory) -> Table:
    title = (
        f"Kernel memory of one worker: ring {memory.ring_mib:g} MiB, {memory.workers} workers, "
        f"{memory.sum_rows} sum rows, {memory.result_rows} result rows of {memory.width} codes"
    )
    table = _table(title, "map", "KiB")
    table.columns[1].justify = "right"
    for name, size in memory.bytes_by_map.items():
        table.add_row(name, f"{size / 1024:.0f}")
    table.add_section()
    table.add_row("all, and no more later", f"{memory.total_bytes / 1024:.0f}", style="bold")
    return table
