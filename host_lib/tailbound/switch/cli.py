"""``tailbound switch``: bring a switch up and down, give it jobs, look at it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import click

from tailbound.errors import AttachError, ConfigError
from tailbound.switch.box import DEFAULT_SLOTS, Box
from tailbound.switch.job import DEFAULT_HEADROOM, DEFAULT_ROWS, JobSpec, parse_rank, parse_station
from tailbound.transport.config import DEFAULT_PORT
from tailbound.transport.rendezvous import new_cookie


@click.group()
def switch() -> None:
    """Run an aggregating switch on the ports of this Linux box."""


@switch.command(context_settings={"show_default": True})
@click.argument("ports", metavar="PORT...", nargs=-1, required=True)
@click.option("--address", required=True, help="This box's IP address in the workers' network.")
@click.option("--mac", help="Ethernet address of --address; default: that of the first PORT.")
@click.option(
    "--slots", type=click.IntRange(1), help=f"Slots for the rows of all jobs.  [default: {DEFAULT_SLOTS}; P4: 4096]"
)
@click.option("--mtu", type=int, help="MTU of the path; default: the smallest of the ports.")
@click.option(
    "--loader",
    type=click.Choice(["auto", "object", "bcc", "clang"]),
    help="Use prebuilt objects, or compile the programs with BCC or clang.  [default: auto]",
)
@click.option("--p4", is_flag=True, help="Run the P4 switch in bmv2 (see p4/README.md), without --mtu and --loader.")
@click.option(
    "--station", "stations", multiple=True, metavar="MAC,PORT",
    help="P4: send frames for MAC out of PORT; frames for other addresses are flooded.",
)  # fmt: skip
@click.option("--thrift-port", type=click.IntRange(1, 65535), help="P4: bmv2's command port.  [default: 9090]")
def up(ports: tuple[str, ...], address: str, p4: bool, **options: Any) -> None:
    """Start a switch on PORTs, by XDP or bmv2; it runs until `tailbound switch down`."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    not_here = given.keys() & ({"mtu", "loader"} if p4 else {"stations", "thrift_port"})
    if not_here:
        names = ", ".join(f"--{name.replace('_', '-').replace('stations', 'station')}" for name in sorted(not_here))
        raise ConfigError(f"{names}: for {'an XDP switch' if p4 else 'a P4 switch (--p4)'} only, run it without")
    with _alone():
        box = _up_p4(ports, address, **given) if p4 else _up_xdp(ports, address, **given)
    click.echo(f"switch {address} is up on {', '.join(ports)}: rows of {box.switch.width} codes")
    box.close()


def _up_xdp(ports: Sequence[str], address: str, **given: Any) -> Box[Any]:
    from tailbound.switch import pinned
    from tailbound.switch.p4 import kept

    if kept.is_up():
        raise AttachError("a P4 switch is up in this network namespace: run `tailbound switch down` first")
    return pinned.up(ports, address, **given)


def _up_p4(
    ports: Sequence[str], address: str, slots: int | None = None, stations: Sequence[str] = (), **given: Any
) -> Box[Any]:
    from tailbound.switch import pinned
    from tailbound.switch.p4 import kept
    from tailbound.switch.p4.compile import Sizes

    if pinned.is_up():
        raise AttachError("an XDP switch is up in this network namespace: run `tailbound switch down` first")
    sizes = Sizes() if slots is None else Sizes(slots=slots)
    return kept.up(ports, address, sizes=sizes, stations=dict(map(parse_station, stations)), **given)


def _alone() -> contextlib.AbstractContextManager[None]:
    """One command at a time changes a switch: two that look for room at once would find the same."""
    from tailbound.kernel import pin

    return pin.alone(folder=True)


def _find() -> Box[Any]:
    """The switch that is up here, of whatever kind."""
    from tailbound.switch import pinned
    from tailbound.switch.p4 import kept

    return kept.find() if kept.is_up() else pinned.find()


@switch.command()
def down() -> None:
    """Stop the switch and remove its programs and maps, also after a crash."""
    from tailbound.switch import pinned
    from tailbound.switch.p4 import kept

    with _alone():
        found = [kept.down(), pinned.down()]
    click.echo("the switch is down" if any(found) else "no switch is up here")


@switch.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same data as JSON.")
def status(as_json: bool) -> None:
    """Show ports, jobs, slots and the verdicts of packets."""
    from tailbound.switch import pinned, report

    box = _find()
    try:
        found = report.examine(box, pinned.attached if box.switch.form == "mean" else lambda _: True)
    finally:
        box.close()
    click.echo(json.dumps(found) if as_json else "\n".join(report.lines(found)))


@switch.group()
def job() -> None:
    """Add and remove jobs."""


@job.command(context_settings={"show_default": True})
@click.option(
    "--rank", "ranks", multiple=True, required=True, metavar="ADDRESS,MAC,PORT", help="A worker; repeat in rank order."
)
@click.option("--cookie", type=lambda text: int(text, 0), metavar="N", help="Cookie of the job; default: a random one.")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, help="UDP port of the job.")
@click.option(
    "--rows",
    type=int,
    help=f"Slots of the job, a power of two.  [default: {DEFAULT_ROWS}, or as many as a smaller switch has]",
)
@click.option("--headroom", type=int, default=DEFAULT_HEADROOM, help="Room for growth, in quarter powers of two.")
def add(ranks: tuple[str, ...], cookie: int | None, rows: int | None, **options: Any) -> None:
    """Add a job and print the variables of its workers. A restarted job needs a new cookie."""
    members = tuple(map(parse_rank, ranks))
    with _alone(), contextlib.closing(_find()) as box:
        wanted = min(DEFAULT_ROWS, 1 << box.switch.slots.bit_length() - 1) if rows is None else rows
        entry = box.add(JobSpec(members, new_cookie() if cookie is None else cookie, rows=wanted, **options))
    for name, value in box.environment(entry).items():
        click.echo(f"export {name}={value}")


@job.command()
@click.argument("cookie", type=lambda text: int(text, 0))
def remove(cookie: int) -> None:
    """Remove a job."""
    with _alone(), contextlib.closing(_find()) as box:
        there = box.remove(cookie)
    click.echo(f"job {cookie:#010x} is gone" if there else f"there is no job {cookie:#010x}")
