"""``tailbound switch``: bring an XDP switch up and down, give it jobs, look at it; run a P4 switch."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from typing import Any

import click

from tailbound.errors import AttachError
from tailbound.switch.box import DEFAULT_SLOTS, Box
from tailbound.switch.job import DEFAULT_ROWS, JobSpec, parse_rank, parse_station
from tailbound.transport.config import DEFAULT_PORT
from tailbound.transport.rendezvous import new_cookie
from tailbound.wire.schema import HEADROOM


@click.group()
def switch() -> None:
    """Run an aggregating switch on the ports of this Linux box."""


@switch.command(context_settings={"show_default": True})
@click.argument("ports", metavar="PORT...", nargs=-1, required=True)
@click.option("--address", required=True, help="This box's IP address in the workers' network.")
@click.option("--mac", help="Ethernet address of --address; default: that of the first PORT.")
@click.option("--slots", type=click.IntRange(1), default=DEFAULT_SLOTS, help="Slots for the rows of all jobs.")
@click.option("--mtu", type=int, help="MTU of the path; default: the smallest of the ports.")
@click.option(
    "--loader",
    type=click.Choice(["auto", "object", "bcc", "clang"]),
    default="auto",
    help="Use prebuilt objects, or compile the programs with BCC or clang.",
)
def up(ports: tuple[str, ...], address: str, **options: Any) -> None:
    """Start an XDP switch on PORTs; it runs until `tailbound switch down`."""
    from tailbound.switch import pinned

    with _alone(), contextlib.closing(pinned.up(ports, address, **options)) as box:
        click.echo(f"switch {address} is up on {', '.join(ports)}: rows of {box.switch.width} codes")


def _alone() -> contextlib.AbstractContextManager[None]:
    """One command at a time changes a switch: two that look for room at once would find the same."""
    from tailbound.kernel import pin

    return pin.alone(folder=True)


@switch.command()
def down() -> None:
    """Stop the switch and remove its programs and maps, also after a crash."""
    from tailbound.switch import pinned

    with _alone():
        found = pinned.down()
    click.echo("the switch is down" if found else "no switch is up here")


@switch.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same data as JSON.")
def status(as_json: bool) -> None:
    """Show ports, jobs, slots and the verdicts of packets."""
    from tailbound.switch import pinned, report

    with contextlib.closing(pinned.find()) as box:
        found = report.examine(box, pinned.attached)
    click.echo(json.dumps(found) if as_json else "\n".join(report.lines(found)))


@switch.group()
def job() -> None:
    """Add and remove jobs."""


_JOB = (
    click.option(
        "--rank", "ranks", multiple=True, required=True, metavar="ADDRESS,MAC,PORT",
        help="A worker; repeat in rank order.",
    ),
    click.option(
        "--cookie", type=lambda text: int(text, 0), metavar="N", help="Cookie of the job; default: a random one."
    ),
    click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, help="UDP port of the job."),
    click.option(
        "--rows",
        type=int,
        help=f"Slots of the job, a power of two.  [default: {DEFAULT_ROWS}, or as many as a smaller switch has]",
    ),
    click.option("--headroom", type=int, default=HEADROOM, help="Room for growth, in quarter powers of two."),
)  # fmt: skip


def _of_a_job(command: Any) -> Any:
    """Options that say what a job is."""
    for option in reversed(_JOB):
        command = option(command)
    return command


def _add(box: Box[Any], ranks: Sequence[str], cookie: int | None, rows: int | None, **options: Any) -> None:
    """Takes a job in, and prints the variables of its workers."""
    wanted = min(DEFAULT_ROWS, 1 << box.switch.slots.bit_length() - 1) if rows is None else rows
    members = tuple(map(parse_rank, ranks))
    entry = box.add(JobSpec(members, new_cookie() if cookie is None else cookie, rows=wanted, **options))
    for name, value in box.environment(entry).items():
        click.echo(f"export {name}={value}")


@job.command(context_settings={"show_default": True})
@_of_a_job
def add(**options: Any) -> None:
    """Add a job and print the variables of its workers. A restarted job needs a new cookie."""
    from tailbound.switch import pinned

    with _alone(), contextlib.closing(pinned.find()) as box:
        _add(box, **options)


@job.command()
@click.argument("cookie", type=lambda text: int(text, 0))
def remove(cookie: int) -> None:
    """Remove a job."""
    from tailbound.switch import box, pinned

    with _alone(), contextlib.closing(pinned.find()) as found:
        there = box.remove(found, cookie)
    click.echo(f"job {cookie:#010x} is gone" if there else f"there is no job {cookie:#010x}")


@switch.command(context_settings={"show_default": True})
@click.argument("ports", metavar="PORT...", nargs=-1, required=True)
@click.option("--address", required=True, help="This box's IPv4 address in the workers' network.")
@click.option("--mac", help="Ethernet address of --address; default: that of the first PORT.")
@click.option("--slots", type=click.IntRange(1), default=4096, help="Slots for the job's rows.")
@click.option(
    "--station", "stations", multiple=True, metavar="MAC,PORT",
    help="Send frames for MAC out of PORT; frames for other addresses are flooded.",
)  # fmt: skip
@click.option("--thrift-port", type=click.IntRange(1, 65535), default=9090, help="bmv2's command port.")
@_of_a_job
def p4(
    ports: tuple[str, ...],
    address: str,
    mac: str | None,
    slots: int,
    stations: tuple[str, ...],
    thrift_port: int,
    **options: Any,
) -> None:
    """Run the P4 switch in bmv2 on PORTs for one job, until Ctrl-C (see p4/README.md)."""
    from tailbound.switch import report
    from tailbound.switch.p4.compile import Sizes
    from tailbound.switch.p4.switch import open_p4

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    static, sizes = dict(map(parse_station, stations)), Sizes(slots=slots)
    with contextlib.closing(
        open_p4(ports, address, mac=mac, stations=static, sizes=sizes, thrift_port=thrift_port)
    ) as box:
        _add(box, **options)
        click.echo(f"switch {address} runs on {', '.join(ports)}: rows of {box.switch.width} codes", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            status = box.switch.process.wait()
            raise AttachError(f"simple_switch has ended with status {status}: run it again")
        click.echo("\n".join(report.lines(report.examine(box))), err=True)
