"""``tailbound bench``: verbs only; each benchmark is a module of its own with a ``run``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tailbound.errors import ConfigError
from tailbound_lab.bench.rivals import RIVALS
from tailbound_lab.bench.table import show
from tailbound_lab.bench.train_plan import SCENARIOS, TAILED, VARIANTS
from tailbound_lab.bench.turns import UNPACED
from tailbound_lab.lab.cli import spec_from_options, spec_options
from tailbound_lab.lab.spec import parse_size

__all__ = ["SIZE", "bench"]


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


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure the kernel path, the codec, whole all-reduces, whole trainings."""


@bench.command()
@click.option("--loader", type=click.Choice(["bcc", "clang", "both"]), default="both", help="Which build to measure.")
@click.option(
    "--rows",
    type=click.Choice([str(1 << n) for n in range(6, 17)]),
    default="64",
    help="Rows of the rings, a power of two; a job has thousands.",
)
@_QUICK
@_JSON
def kernel(loader: str, rows: str, quick: bool, json_file: Path | None) -> None:
    """Nanoseconds a packet costs in the kernel (BPF_PROG_TEST_RUN, op and rank rotated)."""
    from tailbound_lab.bench.kernel import run

    loaders = ("bcc", "clang") if loader == "both" else (loader,)
    show("Kernel path", run(json_file, loaders=loaders, quick=quick, rows=int(rows)))


@bench.command()
@click.option("--threads", type=click.IntRange(1), default=1, help="Threads of a rank, in turn with one thread.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where the bucket lies.")
@_QUICK
@_JSON
def codec(threads: int, device: str, quick: bool, json_file: Path | None) -> None:
    """Milliseconds that encoding, averaging and decoding take, by one thread and by more, or on a CUDA device."""
    if device == "cpu":
        from tailbound_lab.bench.codec import run

        show("Codec", run(json_file, threads, quick=quick))
        return
    from tailbound_lab.bench.device import run as run_on_device

    show("Codec of a bucket on a CUDA device", run_on_device(json_file, quick=quick))


@bench.command()
@click.option("--ranks", type=click.IntRange(2), default=4, help="Of a job in one process.")
@click.option("--steps", type=click.IntRange(1), default=200, help="Of training.")
@click.option("--seed", "seeds", type=click.IntRange(0), multiple=True, default=(0,), help="One or more of these.")
@click.option("--fine-steps", type=click.IntRange(1), default=20, help="First steps with 16 bits, in one of the ways.")
@_JSON
def tensors(ranks: int, steps: int, seeds: tuple[int, ...], fine_steps: int, json_file: Path | None) -> None:
    """Error of every tensor while a small GPT is trained, with exponents of tensors and without."""
    how = import_module("tailbound_lab.simulate.tensors")  # it builds on benchmarks, which must not import it
    rows = how.run(json_file, how.ways(fine_steps), ranks=ranks, steps=steps, seeds=seeds)
    show("Error of the mean, worst tensor / all", how.table(rows))


@bench.command("bytes")
@click.option("--ranks", type=click.IntRange(2), default=4, help="Of a job in one process.")
@_JSON
def bytes_(ranks: int, json_file: Path | None) -> None:
    """Bytes that a rank sends for an all-reduce, by bits of codes, counted in a simulated network."""
    how = import_module("tailbound_lab.simulate.bytes_sent")
    show("Bytes of a rank and op, headers included", how.table(how.run(json_file, ranks=ranks)))


@bench.command()
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="The picture; default beside the JSON.")
@_QUICK
@_JSON
def error(quick: bool, json_file: Path | None, plot: Path | None) -> None:
    """Error of the mean: beside other quantisers, and of transpose, parameter server and ring under loss."""
    from tailbound_lab.bench.error import losses_table, published_table, quantisers_table, run

    rows = run(json_file, quick=quick, plot=plot)
    show("NMSE of the mean, nothing lost, measured here", quantisers_table(rows))
    show("What papers report (not the same data)", published_table(rows))
    show("NMSE of the mean under loss, 4 ranks, 8 bits", losses_table(rows))


@bench.command()
@click.option("--workers", "-n", type=click.IntRange(2), multiple=True, default=(2, 4, 8), help="One or more of these.")
@click.option("--size", type=SIZE, default="25MiB", help="Bytes of float32 whose results are sent.")
@_QUICK
@_JSON
def fanout(workers: tuple[int, ...], size: int, quick: bool, json_file: Path | None) -> None:
    """System calls and CPU time that results cost their sender, one by one and cloned by the kernel."""
    from tailbound_lab.bench.fanout import run

    show("Fan-out of results", run(json_file, workers=workers, size=size, quick=quick))


@bench.command()
@spec_options
@click.option("--size", "sizes", type=SIZE, multiple=True, default=("25MiB", "1MiB"), help="Bytes of float32.")
@click.option("--iters", type=click.IntRange(1), default=50, help="All-reduces of each size.")
@click.option(
    "--vs", type=click.Choice(["gloo", UNPACED, *RIVALS, "transpose", "none"]), multiple=True, default=("gloo",),
    help="Whom to measure in turn, one or more; unpaced: Tailbound with nothing that slows its senders down.",
)  # fmt: skip
@click.option("--known", is_flag=True, help="Ranks are told --rate; a virtual link calls itself faster.")
@click.option(
    "--datapath", type=click.Choice(["auto", "xdp", "udp", "switch"]), default="auto",
    help="How we receive; switch: the lab's switch sums.",
)  # fmt: skip
@click.option(
    "--per-host", type=click.IntRange(1), default=1,
    help="Ranks in every worker; with more than one they share buckets, in turn with ranks that do not.",
)  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="The picture; default beside the JSON.")
@_JSON
def allreduce(sizes: tuple[int, ...], json_file: Path | None, **options: Any) -> None:
    """All-reduces of worker processes in a lab, interleaved with Gloo's and those of others."""
    from tailbound_lab.bench.allreduce import run

    ours = {name: options.pop(name) for name in ("iters", "vs", "datapath", "per_host", "known", "plot")}
    ours["vs"] = tuple(name for name in ours["vs"] if name != "none")
    run(spec_from_options(options), sizes=sizes, json_file=json_file, **ours)


@bench.command()
@spec_options
@click.option("--size", "sizes", type=SIZE, multiple=True, default=("1MiB", "25MiB"), help="Bytes of float32.")
@click.option("--iters", type=click.IntRange(1), default=30, help="All-reduces of each size, with stamps and without.")
@click.option("--datapath", type=click.Choice(["auto", "xdp", "udp"]), default="auto", help="How we receive.")
@_JSON
def profile(sizes: tuple[int, ...], iters: int, datapath: str, json_file: Path | None, **lab: Any) -> None:
    """What an all-reduce spends its time on: codec, system calls, XDP program, interpreter, waiting."""
    from tailbound_lab.bench.profile import run

    run(spec_from_options(lab), sizes=sizes, iters=iters, datapath=datapath, json_file=json_file)


@bench.command()
@click.option("--workers", "-n", type=click.IntRange(2), default=4, help="Workers, one namespace each.")
@click.option("--size", type=SIZE, default="25MiB", help="Bytes of float32.")
@click.option("--rate", default="1gbit", help="Of every link, each way, where no packets are lost.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, help="How long to measure in each environment.")
@click.option(
    "--env", "envs", type=click.Choice(["calm", "tail1.5", "tail3", "stopped", "loss0.1", "loss1"]), multiple=True,
    help="Only these; all by default.", show_default=False,
)  # fmt: skip
@click.option("--seed", type=int, default=1, help="Of losses and bursts.")
@click.option("--datapath", type=click.Choice(["auto", "xdp", "udp"]), default="auto", help="How we receive.")
@_QUICK
@_JSON
def tail(rate: str, envs: tuple[str, ...], quick: bool, json_file: Path | None, **settings: Any) -> None:
    """The slowest all-reduces under foreign traffic, loss and a rank that stands still, in turn with Gloo's."""
    from tailbound_lab.bench.tail import ENVS, run
    from tailbound_lab.lab.spec import parse_rate

    if quick:
        settings["seconds"] = min(settings["seconds"], 15.0)
    run(rate=parse_rate(rate), envs=envs or ENVS, json_file=json_file, **settings)


@bench.command()
@spec_options
@click.option("--size", type=SIZE, default="25MiB", help="Bytes of float32 of a step.")
@click.option("--delay", "delays", type=click.FloatRange(0, 500), multiple=True, help="Of the last rank, in ms.")
@click.option("--iters", type=click.IntRange(2), default=20, help="Steps of each kind at every delay.")
@click.option("--datapath", type=click.Choice(["auto", "xdp", "udp"]), default="auto", help="How we receive.")
@_QUICK
@_JSON
def straggler(
    size: int, delays: tuple[float, ...], iters: int, datapath: str, quick: bool, json_file: Path | None, **lab: Any
) -> None:
    """What a step still costs once a late rank is there: with agreed owner maps, without, and with Gloo."""
    from tailbound_lab.bench.straggler import DELAYS_MS, run
    from tailbound_lab.lab.spec import parse_rate

    lab["rate"] = lab["rate"] or parse_rate("1gbit")
    delays = delays or (DELAYS_MS[::2] if quick else DELAYS_MS)
    iters = min(iters, 6) if quick else iters
    run(spec_from_options(lab), size=size, delays=delays, iters=iters, datapath=datapath, json_file=json_file)


@bench.command()
@click.option("--workers", "-n", type=click.IntRange(2), multiple=True, default=(4, 8), help="One or more of these.")
@click.option("--size", type=_Size(), default="8MiB", help="Bytes of float32.")
@click.option("--rate", default="1gbit", help="Of every link, each way.")
@click.option(
    "--delay", "delays", type=click.FloatRange(0), multiple=True,
    help="Of the last rank, in transfer times; 0 to 4 by default.", show_default=False,
)  # fmt: skip
@click.option("--iters", type=click.IntRange(2), default=12, help="All-reduces of each kind at every delay.")
@click.option("--datapath", type=click.Choice(["auto", "xdp", "udp"]), default="auto", help="How we receive.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="The picture; default beside the JSON.")
@_QUICK
@_JSON
def late(
    workers: tuple[int, ...], rate: str, delays: tuple[float, ...], iters: int, quick: bool, **settings: Any
) -> None:
    """Time of an all-reduce over the delay of one late rank: Gloo, ring, StragglAR, Tailbound strict and bounded."""
    from tailbound_lab.bench.late import DELAYS, run
    from tailbound_lab.lab.spec import parse_rate

    delays = delays or (DELAYS[::2] if quick else DELAYS)
    iters = min(iters, 4) if quick else iters
    run(workers=workers[:1] if quick else workers, rate=parse_rate(rate), delays=delays, iters=iters, **settings)


@bench.command()
@click.option(
    "--scenario", "scenarios", type=click.Choice([*SCENARIOS, *TAILED]), multiple=True,
    help=f"Only these; {', '.join(SCENARIOS)} by default.", show_default=False,
)  # fmt: skip
@click.option("--workers", "-n", type=click.IntRange(2), help="Workers, one namespace each  [default: 4]")
@click.option("--rate", metavar="RATE", help="Of every link, each way; 'none': no limit  [default: the scenario's]")
@click.option("--loss", "losses", metavar="P", multiple=True, help="Packets lost, one or more of these.")
@click.option("--tail", "tails", type=float, multiple=True, help="P99/P50 of Gloo by foreign bursts, one or more.")
@click.option("--seeds", type=click.IntRange(1), help="How many; each has data, weights and losses of its own.")
@click.option("--seed", "first_seed", type=click.IntRange(0), default=1, help="The first of them.")
@click.option("--steps", type=click.IntRange(1), help="Of every variant.")
@click.option("--epochs", type=click.IntRange(1), help="Instead of --steps.")
@click.option("--batch", type=click.IntRange(1), help="Images, or pieces of text, a worker and step.")
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), help="Of training, after which a variant stops."
)
@click.option(
    "--variants", "--variant", type=click.Choice(VARIANTS), multiple=True,
    help="Only these; more than one allowed.", show_default=False,
)  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Train on CUDA devices.  [default: cpu]")
@click.option("--lossy-tcp", is_flag=True, default=None, help="Let what goes over TCP train at every loss, too.")
@click.option("--datapath", type=click.Choice(["auto", "xdp", "udp"]), default="auto", help="How we receive.")
@click.option("--option", "options", metavar="NAME=VALUE", multiple=True, help="Of tailbound.torch.register.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="The picture; default beside the JSON.")
@_QUICK
@_JSON
def train(
    scenarios: tuple[str, ...], rate: str | None, losses: tuple[str, ...], tails: tuple[float, ...],
    seeds: int | None, first_seed: int,
    variants: tuple[str, ...], datapath: str, options: tuple[str, ...], plot: Path | None, json_file: Path | None,
    **changes: Any,
) -> None:  # fmt: skip
    """The same training without communication, with Gloo, fp16, PowerSGD and Tailbound, in turn."""
    from tailbound_lab.bench.train import run
    from tailbound_lab.bench.train_plan import parse_options, plan
    from tailbound_lab.lab.spec import parse_probability, parse_rate

    asked = bool(rate or losses)
    try:
        chosen = plan(
            scenarios,
            rate=None if rate is None else 0 if rate == "none" else parse_rate(rate),
            losses=tuple(parse_probability(loss, "loss") for loss in losses) or None,
            seeds=None if seeds is None and first_seed == 1 else tuple(range(first_seed, first_seed + (seeds or 1))),
            variants=variants or None,
            tails=tails or None,
            **changes,
        )
        given = parse_options(options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    run(chosen, datapath=datapath, options=given, lab_only=asked, json_file=json_file, plot=plot)


@bench.command()
@click.option("--model", "models", type=click.Choice(["conv", "gpt"]), multiple=True, default=("conv", "gpt"))
@click.option(
    "--share", "shares", metavar="P", multiple=True, default=("1%", "5%", "10%", "20%"), help="Of all packets."
)
@click.option("--seeds", type=click.IntRange(1), default=2, help="How many; each has data, weights and losses.")
@click.option("--steps", type=click.IntRange(1), help="Of every training, in place of the model's own number.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="The picture; default beside the JSON.")
@_QUICK
@_JSON
def drops(shares: tuple[str, ...], seeds: int, steps: int | None, quick: bool, **settings: Any) -> None:
    """What lost packets do to training, by share, pattern and rotation, and what cutting the tail gains."""
    from tailbound_lab.bench.drops import run
    from tailbound_lab.lab.spec import parse_probability

    parsed = tuple(parse_probability(share, "share") for share in shares)
    if quick:
        parsed, seeds, steps = parsed[-1:], 1, steps or 24
    run(shares=parsed, seeds=seeds, steps=steps or 0, **settings)


@bench.command()
@click.option(
    "--simulated", is_flag=True,
    help="In the simulator and not in a lab; no privileges are needed. The incast counts for 1 s at most.",
)  # fmt: skip
@click.option(
    "--case", "cases", type=click.Choice(["incast", "tcp", "jobs"]), multiple=True,
    help="Only these; all by default.", show_default=False,
)  # fmt: skip
@click.option(
    "--marks/--no-marks", default=None, help="Only with marks and a known speed, or only without both; else in turn."
)
@click.option("--ranks", type=click.IntRange(2, 256), default=64, help="Of the incast.")
@click.option("--few", type=click.IntRange(2, 256), default=4, help="Ranks of each job that has neighbours.")
@click.option("--size", type=SIZE, default="512KiB", help="Bytes of float32 of an op.")
@click.option("--rate", default="100mbit", help="Of every link, each way.")
@click.option("--queue", type=SIZE, default="64KiB", help="What waits before a worker's link at most.")
@click.option("--apart", "apart_ms", type=click.FloatRange(0), default=10.0, help="Pause before ops, at most, in ms.")
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, help="That count, of each row.")
@click.option(
    "--congestion", metavar="NAME", multiple=True, show_default=False,
    help="Of TCP, as the kernel calls it; one or more. By default reno and cubic; the simulator has reno alone.",
)  # fmt: skip
@click.option("--seed", type=int, default=1, help="Of everything.")
@_JSON
def neighbours(
    simulated: bool, cases: tuple[str, ...], marks: bool | None, rate: str, json_file: Path | None, **settings: Any
) -> None:
    """Incast of many ranks, a job beside TCP, two jobs on one network: what is lost, and who gets what."""
    from tailbound_lab.bench.neighbours import CASES, Wanted, run
    from tailbound_lab.lab.spec import parse_rate

    wanted = Wanted(rate=parse_rate(rate), **settings)
    how = import_module("tailbound_lab.simulate.beside").run if simulated else run  # it builds on benchmarks
    how(wanted, cases=cases or CASES, marks=(True, False) if marks is None else (marks,), json_file=json_file)


@bench.command()
@click.option("--ranks", type=click.IntRange(2, 256), default=4, help="Of the job.")
@click.option("--size", type=SIZE, default="1MiB", help="Bytes of float32 of an op.")
@click.option(
    "--rate", "rates", type=click.IntRange(0), multiple=True, default=(0, 100_000, 300_000, 1_000_000),
    help="Forged packets a second, one or more of these.",
)  # fmt: skip
@click.option("--ops", type=click.IntRange(1), default=100, help="All-reduces at each rate, in a round.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Of all rates.")
@_JSON
def flood(json_file: Path | None, **settings: Any) -> None:
    """What forged packets by the hundred thousand cost a job with a key, beside the same packets to nobody."""
    from tailbound_lab.bench.flood import Wanted, run

    run(Wanted(**settings), json_file)


@bench.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="out/evidence", help="JSON files.")
@click.option("--only", metavar="NAME", multiple=True, help="Only these; all by default.", show_default=False)
@click.option(
    "--repeat", type=click.IntRange(1), default=1, help="Run each so often, and say which figures differ by over 15 %."
)
def evidence(out: Path, only: tuple[str, ...], repeat: int) -> None:
    """The benchmarks that docs/evidence.md rests on, in under two hours, with commit and load."""
    from tailbound_lab.bench.evidence import run

    run(out, only, repeat=repeat)
