"""``tailbound lab``: run a command in a cluster of network namespaces."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console

from tailbound.errors import ConfigError, TailboundError
from tailbound.settings.kinds import parse_rate
from tailbound.transport.config import DEFAULT_PORT
from tailbound_lab.lab import owner
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.launch import launch
from tailbound_lab.lab.spec import (
    DEFAULT_MTU,
    LabSpec,
    parse_background,
    parse_burst,
    parse_probability,
    parse_size,
    parse_straggler,
)

F = TypeVar("F", bound=Callable[..., Any])


def _parsed(option: str, metavar: str, parser: Callable[[str], Any], text: str, default: str | None = None) -> Any:
    """An option read by one of the parsers of ``spec``; their ConfigErrors become usage errors."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parser(value)
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return click.option(option, metavar=metavar, callback=callback, default=default, help=text)


def _probability(option: str, text: str) -> Any:
    return _parsed(f"--{option}", "P", functools.partial(parse_probability, option=option), text, default="0")


def spec_options(command: F) -> F:
    """The options that describe a lab, for every command that builds one (see ``spec_from_options``)."""
    options = (
        click.option("--workers", "-n", type=int, default=4, show_default=True, help="Workers, one namespace each."),
        _parsed("--rate", "RATE", parse_rate, "Rate of every worker's links, each way: 1gbit, 500mbit."),
        _parsed("--queue", "SIZE", parse_size, "Bytes that wait before a worker's link at most, with --rate: 64KiB."),
        click.option("--ecn", is_flag=True, help="Packets are marked (CE) when a quarter of --queue waits."),
        _probability("loss", "Independent losses, on the way from worker to worker."),
        _parsed("--burst-loss", "P[:LEN]", parse_burst, "Losses in bursts of LEN packets on average (default 5)."),
        _probability("duplicate", "UDP packets that arrive twice."),
        _probability("corrupt", "Packets in which one bit is flipped."),
        _probability("reorder", "UDP packets that pass others or are passed."),
        _parsed(
            "--background",
            "RATE:ON:OFF",
            parse_background,
            "Foreign bursts towards every worker: at RATE for ON ms, every OFF ms on average.",
        ),
        _parsed(
            "--straggler",
            "RANK:MS[:EVERY]",
            parse_straggler,
            "Stop RANK for MS, every EVERY ms on average (default 4 x MS); EVERY 'step': it sleeps by itself.",
        ),
        click.option("--ipv6", is_flag=True, help="Workers have IPv6 on the data link, and no IPv4."),
        click.option("--wire", is_flag=True, help="Packets of wire size on both links, as XDP forces."),
        click.option("--switch", is_flag=True, help="The switch sums gradients (TAILBOUND_SWITCH); implies --wire."),
        click.option("--seed", type=int, default=1, show_default=True, help="Of losses, stops and the background."),
        click.option("--mtu", type=int, default=DEFAULT_MTU, show_default=True, help="Of every interface, in bytes."),
        click.option("--port", type=int, default=DEFAULT_PORT, show_default=True, help="UDP port of the job."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def spec_from_options(options: dict[str, Any]) -> LabSpec:
    """A LabSpec from the values of ``spec_options``, which are taken out of ``options``.

    Raises:
        ConfigError: they do not fit together.
    """
    names = (
        "workers", "rate", "loss", "duplicate", "corrupt", "reorder", "background", "straggler", "wire", "switch",
        "seed", "mtu", "port", "queue", "ecn", "ipv6",
    )  # fmt: skip
    values = {name: options.pop(name) for name in names}
    return LabSpec(burst=options.pop("burst_loss"), **values)


@click.group()
def lab() -> None:
    """Clusters out of network namespaces, on this machine and joined to nothing else."""


@lab.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@spec_options
@click.option("--keep-going", is_flag=True, help="Let the other ranks run when one fails.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], keep_going: bool, **options: Any) -> None:
    """Build a cluster, run COMMAND in every worker, remove the cluster.

    COMMAND finds the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, ...), TAILBOUND_INTERFACE
    and TAILBOUND_PORT. Gloo is told to use the second link. The exit status is that of the rank that
    failed first, or 0.
    """
    err = Console(stderr=True)
    try:
        spec = spec_from_options(options)
        with Cluster(spec) as cluster:
            outcome = launch(cluster, command, err=err, keep_going=keep_going)
            if spec.has_faults:
                err.print(f"cables: {cluster.fault_counts()}", highlight=False, markup=False)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except TailboundError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(outcome.status)


@lab.command()
def clean() -> None:
    """Remove what labs left behind whose owner was killed."""
    removed = 0
    for found in owner.owned():
        if found.alive:
            click.echo(f"{found.prefix}: in use by process {found.pid}, left alone")
            continue
        killed = owner.remove_all(found.namespaces)
        click.echo(f"{found.prefix}: removed {len(found.namespaces)} namespaces, ended {len(killed)} processes")
        removed += 1
    if not removed:
        click.echo("nothing to remove")
