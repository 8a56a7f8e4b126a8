"""The command line: verbs only, no logic.

Every verb imports what it needs when it runs, so that ``tailbound --help`` is quick. Errors of ``tailbound.errors``
become one line and an exit status: 2 what was asked for cannot be right (``ConfigError``, as click's own usage errors),
1 it cannot be had here. Ctrl-C becomes 130. A verb that runs a command (``lab run``) ends with that command's status.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import click

from tailbound import __version__
from tailbound.errors import CapabilityError, ConfigError, TailboundError
from tailbound.transport.config import DEFAULT_PORT, Config

__all__ = ["cli", "main"]


#: Verbs of the second package, `tailbound-lab`: name -> (module, attribute, help).
LABORATORY = {
    "bench": ("tailbound_lab.bench.cli", "bench", "Measure the kernel path, the codec, whole all-reduces."),
    "demo": ("tailbound_lab.cli", "demo", "Train a real model over a lossy network, beside Gloo."),
    "lab": ("tailbound_lab.lab.cli", "lab", "Build a cluster of network namespaces and run a command in it."),
    "simulate": ("tailbound_lab.simulate.cli", "simulate", "Run the engine of many ranks in a simulated network."),
}


class _Verbs(click.Group):
    """A group that knows some verbs as ``name: (module, attribute, help)`` and imports them when they are called."""

    def __init__(self, *args: Any, late: Mapping[str, tuple[str, str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.late = dict(late or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.late])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.late:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = self.late[cmd_name]
        if cmd_name in LABORATORY and find_spec("tailbound_lab") is None:
            raise CapabilityError(
                f"`tailbound {cmd_name}` is in the package tailbound-lab: "
                "pip install './host_lib/tailbound_lab[demo]' in a checkout of the same version"
            )
        return cast(click.Command, getattr(import_module(module), attribute))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        words = {name: help_text for name, (_, _, help_text) in self.late.items()}
        words |= {name: command.get_short_help_str(90) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(words.items()))


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    late={
        **LABORATORY,
        "metrics": ("tailbound.metrics.host", "metrics", "Serve the metrics of all ranks on this host to Prometheus."),
        "switch": ("tailbound.switch.cli", "switch", "Run an aggregating switch on the ports of this Linux box."),
        "top": ("tailbound.top", "top", "Show the ranks on this host live: pace, deadlines, late and lost rows."),
    },
)
@click.version_option(__version__, "-V", "--version", prog_name="tailbound", message="%(prog)s %(version)s")
def cli() -> None:
    """All-reduce in bounded time: gradients summed inside the kernel."""


@cli.command()
@click.argument("interface", metavar="IFACE")
@click.option("--replace", is_flag=True, help="Replace the attached program, also one of another version.")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, help="UDP port of the job.")
@click.option("--ipv6", is_flag=True, help="Serve jobs over IPv6 although IFACE has an IPv4 address.")
@click.option("--mtu", type=int, help="MTU of the path; default: the MTU of IFACE.")
@click.option("--ring", "ring_mib", type=float, default=Config.ring_mib, metavar="MIB", help="Size of the result ring.")
@click.option("--workers", type=int, default=2, help="Smallest world size: more workers need less memory for sums.")
@click.option("--group", metavar="GROUP", help="Group that may train; default: root only.")
@click.option(
    "--loader",
    type=click.Choice(["auto", "object", "bcc", "clang"]),
    default="auto",
    help="Use a prebuilt object, or compile the program with BCC or clang.",
)
def attach(interface: str, **options: Any) -> None:
    """Attach the XDP program to IFACE, for training without privileges."""
    from tailbound.datapath.xdp import attach

    click.echo(attach(interface, **options))


@cli.command()
@click.argument("interface", metavar="IFACE")
@click.option("--force", is_flag=True, help="Detach under a running job; its rank ends with an error.")
def detach(interface: str, force: bool) -> None:
    """Detach the XDP program from IFACE and remove its maps, also after a crash."""
    from tailbound.datapath.xdp import detach

    done = detach(interface, force=force)
    click.echo(f"detached from {interface}" if done else f"nothing of Tailbound's is on {interface}")


@cli.command()
@click.option("--interface", metavar="IFACE", help="Interface to check; default: the one that a job would use.")
@click.option("--warm", is_flag=True, help="Only compile the code that the first job would compile.")
def doctor(interface: str | None, warm: bool) -> None:
    """Show the datapath of this machine, the reason, and the command for a better one."""
    if warm:
        from tailbound.prepare import Preparation

        click.echo("compiling for this machine, up to a minute: the C library; the codec by numba")
        begun = time.monotonic()
        with Preparation() as preparation:
            preparation.wait()
        click.echo(f"compiled, or found compiled, in {time.monotonic() - begun:.0f} s")
        return
    from tailbound.doctor.report import examine, show

    show(examine(interface))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    if arguments is None and sys.argv[1:2] and sys.argv[1] in LABORATORY and find_spec("tailbound_lab"):
        import_module("tailbound_lab.cli").enter_user_namespace(sys.argv[1:])
    try:
        status = cli.main(
            args=None if arguments is None else list(arguments), prog_name="tailbound", standalone_mode=False
        )
    except click.Abort:  # click's name for Ctrl-C
        return 128 + signal.SIGINT
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except TailboundError as error:
        click.secho(f"error: {error}", fg="red", err=True)
        return 2 if isinstance(error, ConfigError) else 1
    return status if isinstance(status, int) else 0
