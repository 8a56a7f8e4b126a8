"""``tailbound simulate``: the verb only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tailbound_lab.bench.cli import SIZE
from tailbound_lab.simulate.layouts import LAYOUTS

__all__ = ["simulate"]


@click.command(context_settings={"show_default": True})
@click.option("--ranks", "-n", type=click.IntRange(2, 4096), multiple=True, default=(16,), help="One or more of these.")
@click.option("--layout", type=click.Choice(LAYOUTS), default="flat", help="One job; groups, then across; or hosts.")
@click.option("--group", type=click.IntRange(2), help="Ranks of a group of 2d; without it, the root of --ranks.")
@click.option("--per-host", type=click.IntRange(2, 64), default=8, help="Ranks of a host; they share its link.")
@click.option("--local-rate", default="100gbit", help="At which ranks of a host reduce and gather among themselves.")
@click.option("--size", type=SIZE, default="1MiB", help="Bytes of float32 of a rank and step.")
@click.option("--rate", default="10gbit", help="Of every host's link, each way.")
@click.option("--port-buffer", type=SIZE, default="256KiB", help="What waits before a host's link at most.")
@click.option("--ecn", type=SIZE, help="Backlog above which a port marks packets.")
@click.option("--latency", type=click.FloatRange(0), default=10.0, help="One way, without queues, in microseconds.")
@click.option("--rack", type=click.IntRange(2), help="Hosts of a rack; without it, all are in one.")
@click.option(
    "--oversubscription", type=click.FloatRange(1), default=1.0, help="Rate of a rack's hosts over its uplinks."
)
@click.option("--loss", metavar="P", default="0", help="Packets lost besides, each by itself.")
@click.option("--tail", type=click.FloatRange(1), default=1.0, help="P99/P50 of who waits for all, by foreign bursts.")
@click.option("--background", metavar="RATE:ON_MS:OFF_MS", help="Foreign bursts, in place of --tail.")
@click.option(
    "--straggler", metavar="TIME", help="The last rank begins each step later by so much: 20ms, or 2x the usual step."
)
@click.option("--as-lab", is_flag=True, help="Buffers and token buckets of a lab's ports, in place of --port-buffer.")
@click.option("--wait", is_flag=True, help="Wait for every row, as a reliable transport does.")
@click.option(
    "--floor-ms",
    "floors",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    default=(10.0,),
    help="Shortest deadline, as `floor_ms`; one or more of these.",
)
@click.option("--flows", is_flag=True, help="A coarse model without the engine, for thousands of ranks.")
@click.option(
    "--cut", "cuts", type=click.FloatRange(1), multiple=True, show_default=False,
    help="With --flows and besides: halves end at so many times the usual.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=40, help="That count.")
@click.option("--warm", type=click.IntRange(1), default=12, help="Before them, without bursts or straggler.")
@click.option("--seed", type=int, default=1, help="Of everything.")
@click.option(
    "--confirm", is_flag=True,
    help="4 and 8 ranks here and in the lab, at 20 and 10 Mbit/s; only --ranks, --steps, --seed and --json count.",
)  # fmt: skip
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this file, too."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="The picture; default beside the JSON.")
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    ranks: tuple[int, ...],
    confirm: bool,
    json_file: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Run the engine of many ranks in a simulated network of switches."""
    if confirm:
        from tailbound_lab.simulate import confirm as beside

        asked = {
            name: ctx.params[name]
            for name in ("ranks", "steps", "seed")
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
        }
        beside.run(json_file=json_file, **asked)
        return
    from tailbound.errors import ConfigError
    from tailbound_lab.lab.spec import MOST_BACKGROUND, parse_background, parse_probability, parse_rate
    from tailbound_lab.simulate.fabric import MS
    from tailbound_lab.simulate.ports import Switching
    from tailbound_lab.simulate.run import Wanted, as_in_the_lab, parse_late, run

    if options["background"] and options["tail"] > 1:
        raise ConfigError("--tail and --background both say which bursts there are: give one of them")
    if options["oversubscription"] > 1 and not options["rack"]:
        raise ConfigError("--oversubscription is that of racks: give --rack, the hosts of one")
    switching = Switching(
        rate=parse_rate(options["rate"]),
        buffer=options["port_buffer"],
        mark=options["ecn"] or 0,
        latency=int(options["latency"] * 1000),
        rack=options["rack"] or 0,
        oversubscription=options["oversubscription"],
        loss=parse_probability(options["loss"], "loss"),
        background=parse_background(options["background"], MOST_BACKGROUND) if options["background"] else None,
    )
    wanted = Wanted(
        switching=as_in_the_lab(switching) if options["as_lab"] else switching,
        local_rate=parse_rate(options["local_rate"]),
        group=options["group"] or 0,
        late=parse_late(options["straggler"]) if options["straggler"] else None,
        **{
            name: options[name]
            for name in ("layout", "size", "tail", "steps", "warm", "seed", "wait", "flows", "per_host")
        },
    )
    all_of = [replace(wanted, settings={"floor": int(floor * MS)}) for floor in options["floors"]]
    all_of += [replace(wanted, cut=cut) for cut in options["cuts"]]
    run(ranks, *all_of, json_file=json_file, plot=plot)
