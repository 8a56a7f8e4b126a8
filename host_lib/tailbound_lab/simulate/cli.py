"""``tailbound simulate``: the verb only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tailbound_lab.bench.cli import SIZE
from tailbound_lab.simulate.layouts import LAYOUTS


@click.command(context_settings={"show_default": True})
@click.option("--ranks", "-n", type=click.IntRange(2, 4096), multiple=True, default=(16,), help="One or more of these.")
@click.option("--layout", type=click.Choice(LAYOUTS), default="flat", help="One job; or groups, then across.")
@click.option("--size", type=SIZE, default="1MiB", help="Bytes of float32 of a rank and step.")
@click.option("--rate", default="10gbit", help="Of every host's link, each way.")
@click.option("--port-buffer", type=SIZE, default="256KiB", help="What waits before a host's link at most.")
@click.option("--ecn", type=SIZE, help="Backlog above which a port marks packets.")
@click.option("--latency", type=click.FloatRange(0), default=10.0, help="One way, without queues, in microseconds.")
@click.option("--loss", metavar="P", default="0", help="Packets lost besides, each by itself.")
@click.option("--tail", type=click.FloatRange(1), default=1.0, help="P99/P50 of who waits for all, by foreign bursts.")
@click.option("--straggler-ms", type=click.FloatRange(0), default=0.0, help="The last rank begins each step later.")
@click.option("--wait", is_flag=True, help="Wait for every row, as a reliable transport does.")
@click.option("--floor-ms", type=click.FloatRange(0, min_open=True), default=10.0, help="Shortest deadline.")
@click.option("--steps", type=click.IntRange(1), default=40, help="That count.")
@click.option("--warm", type=click.IntRange(1), default=12, help="Before them, without bursts or straggler.")
@click.option("--seed", type=int, default=1, help="Of everything.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this file, too."
)
def simulate(ranks: tuple[int, ...], json_file: Path | None, **options: Any) -> None:
    """Run the engine of many ranks in a simulated network of one switch."""
    from tailbound.settings.kinds import parse_rate
    from tailbound_lab.lab.spec import parse_probability
    from tailbound_lab.simulate.fabric import MS
    from tailbound_lab.simulate.ports import Switching
    from tailbound_lab.simulate.run import Wanted, run

    wanted = Wanted(
        switching=Switching(
            rate=parse_rate(options["rate"]),
            buffer=options["port_buffer"],
            mark=options["ecn"] or 0,
            latency=int(options["latency"] * 1000),
            loss=parse_probability(options["loss"], "loss"),
        ),
        late=options["straggler_ms"] / 1e3,
        settings={"floor": int(options["floor_ms"] * MS)},
        **{name: options[name] for name in ("layout", "size", "tail", "steps", "warm", "seed", "wait")},
    )
    run(ranks, wanted, json_file)
