"""``tailbound switch``: bring a switch up and down, give it jobs, look at it."""

from __future__ import annotations

import json
from typing import Any

import click

from tailbound.switch.box import DEFAULT_SLOTS, environment
from tailbound.switch.job import DEFAULT_HEADROOM, DEFAULT_ROWS, JobSpec, parse_rank
from tailbound.transport.config import DEFAULT_PORT
from tailbound.transport.rendezvous import new_cookie

__all__ = ["switch"]


@click.group()
def switch() -> None:
    """Sum gradients on the ports of this Linux box."""


@switch.command(context_settings={"show_default": True})
@click.argument("ports", metavar="PORT...", nargs=-1, required=True)
@click.option(
    "--address", required=True, help="IPv4 address that workers send to; this box's own, on the same network."
)
@click.option("--mac", help="Ethernet address of that address; without it, that of the first PORT.")
@click.option("--slots", type=click.IntRange(1), default=DEFAULT_SLOTS, help="Rows summed at once, of all jobs.")
@click.option("--mtu", type=int, help="MTU of the path; without it, the smallest of the ports.")
@click.option(
    "--loader", type=click.Choice(["auto", "bcc", "clang"]), default="auto", help="What compiles the program."
)
def up(ports: tuple[str, ...], address: str, **options: Any) -> None:
    """Load the XDP program onto PORTs; it stays until `tailbound switch down`."""
    from tailbound.switch import pinned

    box = pinned.up(ports, address, **options)
    click.echo(f"switch {address} is up on {', '.join(ports)}: rows of {box.switch.sizes.width} codes")
    box.close()


@switch.command()
def down() -> None:
    """Remove the program from all ports, after a crash too."""
    from tailbound.switch import pinned

    click.echo("the switch is down" if pinned.down() else "no switch is up here")


@switch.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same data as JSON.")
def status(as_json: bool) -> None:
    """Show ports, jobs, slots and what became of packets."""
    from tailbound.switch import pinned, report

    box = pinned.find()
    try:
        found = report.examine(box, pinned.attached)
    finally:
        box.close()
    click.echo(json.dumps(found) if as_json else "\n".join(report.lines(found)))


@switch.group()
def job() -> None:
    """Give the switch jobs."""


@job.command(context_settings={"show_default": True})
@click.option(
    "--rank", "ranks", multiple=True, required=True, metavar="ADDRESS,MAC,PORT", help="A worker, in the order of ranks."
)
@click.option(
    "--cookie", type=lambda text: int(text, 0), metavar="N", help="The job's cookie; without it, a random one."
)
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, help="UDP port of the job.")
@click.option("--rows", type=int, default=DEFAULT_ROWS, help="Its slots, a power of two.")
@click.option("--base", type=int, help="Its first slot; without it, wherever there is room.")
@click.option("--headroom", type=int, default=DEFAULT_HEADROOM, help="Room for growth, in quarter powers of two.")
def add(ranks: tuple[str, ...], cookie: int | None, **options: Any) -> None:
    """Take a job in, and print what its workers need to know of it. A job that starts again needs a new cookie."""
    from tailbound.switch import pinned

    spec = JobSpec(tuple(map(parse_rank, ranks)), new_cookie() if cookie is None else cookie, **options)
    box = pinned.find()
    try:
        entry = box.add(spec)
    finally:
        box.close()
    for name, value in environment(entry).items():
        click.echo(f"export {name}={value}")


@job.command()
@click.argument("cookie", type=lambda text: int(text, 0))
def remove(cookie: int) -> None:
    """Take a job out."""
    from tailbound.switch import pinned

    box = pinned.find()
    try:
        there = box.remove(cookie)
    finally:
        box.close()
    click.echo(f"job {cookie:#010x} is gone" if there else f"there is no job {cookie:#010x}")
