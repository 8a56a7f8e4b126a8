"""``tailbound bench``: verbs only; each benchmark is a module of its own with a ``run``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailbound.errors import ConfigError
from tailbound.settings.kinds import parse_rate
from tailbound_lab.bench.channel import GLOO, QUANTISED
from tailbound_lab.bench.table import show
from tailbound_lab.bench.train_plan import SCENARIOS, VARIANTS
from tailbound_lab.lab.cli import spec_from_options, spec_options
from tailbound_lab.lab.spec import parse_probability, parse_size

if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
else:
    _IntegerType = click.ParamType  # generic in new versions of click only


class _Size(_IntegerType):
    """Bytes, written ``25MiB``, ``64KiB`` or ``1000000``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()

_JSON = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this file, too."
)
_QUICK = click.option("--quick", is_flag=True, help="Fewer repetitions.")
_VS = click.option(
    "--vs", type=click.Choice([GLOO, QUANTISED, "none"]), multiple=True, default=(GLOO,),
    help="Who takes turns with Tailbound, one or more; quantised: our codes over TCP.",
    callback=lambda context, option, names: [name for name in names if name != "none"],
)  # fmt: skip
_IN_LAB = "auto", "xdp", "udp"


def _datapath(*more: str) -> Any:
    return click.option(
        "--datapath", type=click.Choice([*_IN_LAB, *more]), default="auto",
        help="How we receive" + ("; switch: the lab's switch sums." if more else "."),
    )  # fmt: skip


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure the kernel path, the codec, whole all-reduces, whole trainings."""


@bench.command()
@click.option("--loader", type=click.Choice(["bcc", "clang", "both"]), default="both", help="Which build to measure.")
@click.option(
    "--rows", type=click.Choice([str(1 << n) for n in range(6, 17)]), default="64",
    help="Rows of the rings, a power of two; a job has thousands.",
)  # fmt: skip
@_QUICK
@_JSON
def kernel(loader: str, rows: str, quick: bool, json_file: Path | None) -> None:
    """Nanoseconds a packet costs in the kernel (BPF_PROG_TEST_RUN, op and rank rotated)."""
    from tailbound_lab.bench.kernel import run

    loaders = ("bcc", "clang") if loader == "both" else (loader,)
    show("Kernel path", run(json_file, loaders=loaders, quick=quick, rows=int(rows)))


@bench.command()
@_QUICK
@_JSON
def codec(quick: bool, json_file: Path | None) -> None:
    """Milliseconds that encoding, averaging and decoding take."""
    from tailbound_lab.bench.codec import run

    show("Codec", run(json_file, quick=quick))


@bench.command()
@spec_options
@click.option("--size", "sizes", type=SIZE, multiple=True, default=("25MiB", "1MiB"), help="Bytes of float32.")
@click.option("--iters", type=click.IntRange(1), default=50, help="All-reduces of each size.")
@_datapath("switch")
@_JSON
@_VS
def allreduce(vs: list[str], **options: Any) -> None:
    """All-reduces of worker processes in a lab, in turn with Gloo's or with our codes over TCP."""
    from tailbound_lab.bench.allreduce import run

    spec = spec_from_options(options)
    run(spec, vs=vs, **options)


@bench.command()
@click.option("--workers", "-n", type=click.IntRange(2), default=4, help="Workers, one namespace each.")
@click.option("--size", type=SIZE, default="25MiB", help="Bytes of float32.")
@click.option("--rate", default="1gbit", help="Of every link, each way, where no packets are lost.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, help="How long to measure in each environment.")
@click.option(
    "--env", "envs", multiple=True, help="Only these; all by default.", show_default=False,
    type=click.Choice(["calm", "tail1.5", "tail3", "stopped", "late", "loss0.1", "loss1", "burst1"]),
)  # fmt: skip
@_VS
@click.option("--seed", type=int, default=1, help="Of losses and bursts.")
@_datapath()
@_JSON
def tail(rate: str, envs: tuple[str, ...], json_file: Path | None, **settings: Any) -> None:
    """The slowest all-reduces under foreign traffic, loss and a rank that is late or stands still."""
    from tailbound_lab.bench.tail import ENVS, run

    settings["vs"] = (GLOO, *settings["vs"])  # bursts are as long as its tail says
    run(rate=parse_rate(rate), envs=envs or ENVS, json_file=json_file, **settings)


@bench.command()
@click.option(
    "--scenario", "scenarios", type=click.Choice(list(SCENARIOS)), multiple=True, default=("accuracy",),
    help="One or more of these.",
)  # fmt: skip
@click.option("--workers", "-n", type=click.IntRange(2), help="Workers, one namespace each  [default: 4]")
@click.option("--rate", metavar="RATE", help="Of every link, each way; 'none': no limit  [default: the scenario's]")
@click.option("--loss", "losses", metavar="P", multiple=True, help="Packets lost, one or more of these.")
@click.option("--tail", "tails", type=float, multiple=True, help="P99/P50 of Gloo by foreign bursts, one or more.")
@click.option("--seeds", type=click.IntRange(1), help="How many; each has data, weights and losses of its own.")
@click.option("--steps", type=click.IntRange(1), help="Of every variant.")
@click.option(
    "--variants", "--variant", type=click.Choice(VARIANTS), multiple=True,
    help="Only these; more than one allowed.", show_default=False,
)  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Train on CUDA devices.  [default: cpu]")
@_datapath()
@click.option("--option", "options", metavar="NAME=VALUE", multiple=True, help="Of tailbound.torch.register.")
@_QUICK
@_JSON
def train(
    scenarios: tuple[str, ...], rate: str | None, losses: tuple[str, ...], tails: tuple[float, ...],
    seeds: int | None, variants: tuple[str, ...], datapath: str, options: tuple[str, ...], json_file: Path | None,
    **changes: Any,
) -> None:  # fmt: skip
    """The same training with Gloo, fp16, PowerSGD, our codes over TCP and Tailbound, in turn."""
    from tailbound_lab.bench.train import run
    from tailbound_lab.bench.train_plan import parse_options, plan

    try:
        chosen = plan(
            scenarios,
            rate=None if rate is None else 0 if rate == "none" else parse_rate(rate),
            losses=tuple(parse_probability(loss, "loss") for loss in losses) or None,
            seeds=None if seeds is None else tuple(range(1, 1 + seeds)),
            variants=variants or None,
            tails=tails or None,
            **changes,
        )
        given = parse_options(options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    run(chosen, datapath=datapath, options=given, json_file=json_file)
